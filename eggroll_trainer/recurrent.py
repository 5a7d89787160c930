"""Recurrent layers of a whole chunk of members: `torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu`.

Inputs are kept flat, as in a packed sequence: the rows of step 0, then those of step 1, and so on,
with `sizes` rows in each. The inputs' product is one for all steps; the steps themselves are one
operator for each layer and direction, which loops over tensors of all members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import members
from .errors import NotBatchableError
from .lowrank import LowRankTensor

State = tuple[Tensor, ...]  # (h,) or (h, c)
Step = Callable[[Tensor, Tensor, State], State]


def _lstm(gates: Tensor, recurrent: Tensor, state: State) -> State:
    i, f, g, o = (gates + recurrent).chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(gates: Tensor, recurrent: Tensor, state: State) -> State:
    (reset, update, new), (r_h, u_h, n_h) = gates.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
    new = torch.addcmul(new, (reset + r_h).sigmoid(), n_h).tanh()
    return (torch.lerp(new, state[0].to(new.dtype), (update + u_h).sigmoid()),)


def _tanh(gates: Tensor, recurrent: Tensor, state: State) -> State:
    return ((gates + recurrent).tanh(),)


def _relu(gates: Tensor, recurrent: Tensor, state: State) -> State:
    return ((gates + recurrent).relu(),)


STEPS: dict[str, Step] = {"lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}


def _loop(
    step: Step,
    gates: Tensor,
    product: Callable[[Tensor], Tensor],
    state: State,
    sizes: Sequence[int],
    reverse: bool,
) -> tuple[Tensor, State]:
    """Run the steps over gates `(M, sum(sizes), …)` from a state `(M, batch, hidden)`."""
    parts = list(torch.split(gates, list(sizes), dim=1))
    outputs: list[Tensor] = []
    current, waiting = tuple(s[:, :0] for s in state), state
    for part in reversed(parts) if reverse else parts:
        count, size = current[0].shape[1], part.shape[1]
        if size > count:  # sequences begin here: the first ones, or backwards the shorter ones
            current = tuple(
                torch.cat([c, w[:, count:size]], dim=1)
                for c, w in zip(current, waiting, strict=True)
            )
        elif size < count:  # sequences end here, and keep their last state
            waiting = _merge(current, waiting)
            current = tuple(c[:, :size] for c in current)
        current = step(part, product(current[0]), current)
        outputs.append(current[0])
    ordered = outputs[::-1] if reverse else outputs
    return torch.cat(ordered, dim=1), _merge(current, waiting)


def _merge(current: State, waiting: State) -> State:
    pairs = zip(current, waiting, strict=True)
    return tuple(torch.cat([c, w[:, c.shape[1] :]], dim=1) for c, w in pairs)


def _layer_rule(
    info: Any,
    in_dims: tuple[Any, ...],
    gates: Tensor,
    coefficient: Tensor | None,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    state: list[Tensor],
    cell: str,
    sizes: list[int],
    reverse: bool,
) -> tuple[Any, Any]:
    def first(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    shift = None if bias is None else first(bias, in_dims[6]).unsqueeze(1)
    if left is None or right is None or scales is None:
        dense = first(weight, in_dims[2]).mT

        def product(h: Tensor) -> Tensor:
            return torch.bmm(h, dense) if shift is None else torch.baddbmm(shift, h, dense)
    elif in_dims[1] is None:
        raise NotBatchableError("a recurrent layer ran inside a vmap of the fitness's own")
    else:
        factors = (weight, left, right, scales)

        def product(h: Tensor) -> Tensor:
            out = members.linear_members(h, 0, *factors)
            return out if shift is None else out.add_(shift)

    states = tuple(first(s, d) for s, d in zip(state, in_dims[7], strict=True))
    outputs, final = _loop(STEPS[cell], first(gates, in_dims[0]), product, states, sizes, reverse)
    return [outputs, *final], [0] * (1 + len(final))


members.define(
    "recurrent_layer",
    "(Tensor gates, Tensor? coefficient, Tensor weight, Tensor? left, Tensor? right, "
    "Tensor? scales, Tensor? bias, Tensor[] state, str cell, int[] sizes, bool reverse) "
    "-> Tensor[]",
    _layer_rule,
)


def _layer(
    inputs: Tensor,
    state: State,
    weights: Sequence[Any],
    cell: str,
    sizes: list[int],
    reverse: bool,
) -> list[Tensor]:
    """One layer in one direction: its outputs, and its final state."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    gates = F.linear(inputs, w_ih, b_ih)
    factors: tuple[Any, ...] = (None, w_hh, None, None, None)
    if isinstance(w_hh, LowRankTensor):
        factors = (w_hh.coefficient, w_hh.weight, w_hh.left, w_hh.right, w_hh.scales)
    layer = torch.ops.eggroll.recurrent_layer
    out: list[Tensor] = layer(gates, *factors, b_hh, list(state), cell, sizes, reverse)
    return out


def _layers(
    cell: str,
    inputs: Tensor,
    states: State,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    sizes: list[int],
) -> tuple[Tensor, State]:
    """All layers and directions; `states` are `(layers · directions, batch, hidden)`."""
    directions = 2 if bidirectional else 1
    count = 4 if has_biases else 2
    finals: list[list[Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for i in range(layer * directions, (layer + 1) * directions):
            state = tuple(s[i] for s in states)
            weights = params[i * count : (i + 1) * count]
            output, *final = _layer(inputs, state, weights, cell, sizes, i % directions == 1)
            outputs.append(output)
            finals.append(final)
        inputs = torch.cat(outputs, dim=-1)
        if dropout and train and layer < num_layers - 1:
            inputs = F.dropout(inputs, dropout)
    return inputs, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _network(cell: str) -> Callable[..., Any]:
    """A network with the two signatures of `torch.lstm` and its like, padded and packed."""

    def run(*args: Any) -> Any:
        # As in torch, the place of the parameters tells the two signatures apart.
        packed = not isinstance(args[3], bool)
        sequence, batch_sizes, hx, params, *options = args if packed else (args[0], None, *args[1:])
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        has_biases, num_layers, _, _, bidirectional, *batch_first = options
        cells = num_layers * (2 if bidirectional else 1)
        if len(params) != cells * (4 if has_biases else 2):
            raise NotBatchableError("an LSTM with proj_size has no batched form")
        if batch_sizes is not None:
            inputs, sizes = sequence, batch_sizes.tolist()
        else:
            steps = sequence.transpose(0, 1) if batch_first[0] else sequence
            inputs, sizes = steps.flatten(0, 1), [steps.shape[1]] * steps.shape[0]
        outputs, finals = _layers(cell, inputs, states, params, *options[:5], sizes=sizes)
        if batch_sizes is None:
            outputs = outputs.view(len(sizes), -1, outputs.shape[-1])
            outputs = outputs.transpose(0, 1) if batch_first[0] else outputs
        return outputs, *finals

    return run


def _cell(cell: str) -> Callable[..., Any]:
    """One step, with the signature of `torch.lstm_cell` and its like."""

    def run(
        input: Tensor,
        hx: Tensor | State,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        out = STEPS[cell](F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return out if len(out) > 1 else out[0]

    return run


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _network("lstm"),
    torch.gru: _network("gru"),
    torch.rnn_tanh: _network("tanh"),
    torch.rnn_relu: _network("relu"),
    torch.lstm_cell: _cell("lstm"),
    torch.gru_cell: _cell("gru"),
    torch.rnn_tanh_cell: _cell("tanh"),
    torch.rnn_relu_cell: _cell("relu"),
}
