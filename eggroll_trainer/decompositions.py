"""Operations written out in simpler ones, for those that torch runs as one opaque kernel.

Nothing here knows of low-rank weights: `F.linear`, `F.embedding` and `w.T` do what is needed with
them. The numbers are those of torch's own kernels, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # (h,) or (h, c), each (batch, hidden)


def _lstm_step(gates: Tensor, recurrent: Tensor, state: State) -> State:
    i, f, g, o = (gates + recurrent).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(gates: Tensor, recurrent: Tensor, state: State) -> State:
    (reset, update, new), (r_h, u_h, n_h) = gates.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
    new = (new + (reset + r_h).sigmoid() * n_h).tanh()
    update = (update + u_h).sigmoid()
    return (new + update * (state[0] - new),)


def _tanh_step(gates: Tensor, recurrent: Tensor, state: State) -> State:
    return ((gates + recurrent).tanh(),)


def _relu_step(gates: Tensor, recurrent: Tensor, state: State) -> State:
    return ((gates + recurrent).relu(),)


Step = Callable[[Tensor, Tensor, State], State]


def _unroll(
    step: Step, inputs: list[Tensor], state: State, weights: Sequence[Tensor], biased: bool
) -> tuple[list[Tensor], State]:
    """One layer in one direction over inputs `(batch_t, n)`; packed ones change `batch_t`."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if biased else (None, None)
    projection = rest[-1] if len(rest) % 2 else None  # LSTM's proj_size
    # The input's product is one for all steps, where it can be.
    gates = torch.split(F.linear(torch.cat(inputs), w_ih, b_ih), [len(x) for x in inputs])
    outputs, last = [], state
    current = tuple(s[: len(gates[0])] for s in state)
    for gate in gates:
        if len(gate) > len(current[0]):  # backwards over packed sequences: more begin here
            current = tuple(
                torch.cat([c, s[len(c) : len(gate)]]) for c, s in zip(current, last, strict=True)
            )
        elif len(gate) < len(current[0]):  # forwards: some end here, and keep their last state
            last = tuple(torch.cat([c, s[len(c) :]]) for c, s in zip(current, last, strict=True))
            current = tuple(c[: len(gate)] for c in current)
        current = step(gate, F.linear(current[0], w_hh, b_hh), current)
        if projection is not None:
            current = (F.linear(current[0], projection), *current[1:])
        outputs.append(current[0])
    final = tuple(torch.cat([c, s[len(c) :]]) for c, s in zip(current, last, strict=True))
    return outputs, final


def _stack(
    step: Step,
    inputs: list[Tensor],
    states: State,
    params: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[list[Tensor], State]:
    """Layers × directions; `states` are `(layers · directions, batch, hidden)`."""
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (layers * directions)
    finals: list[State] = []
    for layer in range(layers):
        runs = []
        for direction in range(directions):
            cell = layer * directions + direction
            weights = params[cell * per_cell : (cell + 1) * per_cell]
            order = slice(None, None, -1 if direction else 1)
            state = tuple(s[cell] for s in states)
            outputs, final = _unroll(step, inputs[order], state, weights, biased)
            runs.append(outputs[order])
            finals.append(final)
        inputs = [torch.cat(parts, dim=-1) for parts in zip(*runs, strict=True)]
        if dropout and train and layer < layers - 1:
            sizes = [len(x) for x in inputs]
            inputs = list(torch.split(F.dropout(torch.cat(inputs), dropout), sizes))
    return inputs, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _recurrent(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """A network of `step` cells with the signatures of `torch.lstm`, `torch.gru` and so on."""

    def padded(
        input: Tensor,
        hx: Tensor | State,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        time = 1 if batch_first else 0
        options = (has_biases, num_layers, dropout, train, bidirectional)
        outputs, finals = _stack(step, list(input.unbind(time)), states, params, *options)
        return torch.stack(outputs, dim=time), *finals

    def packed(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor | State,
        params: Sequence[Tensor],
        *options: Any,
    ) -> tuple[Tensor, ...]:
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        inputs = list(torch.split(data, batch_sizes.tolist()))
        outputs, finals = _stack(step, inputs, states, params, *options)
        return torch.cat(outputs), *finals

    def run(*args: Any) -> tuple[Tensor, ...]:
        # As in torch, the place of the parameters tells the two signatures apart.
        return padded(*args) if isinstance(args[3], bool) else packed(*args)

    return run


def _cell(step: Step) -> Callable[..., Tensor | State]:
    def run(
        input: Tensor,
        hx: Tensor | State,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        out = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return out if len(out) > 1 else out[0]

    return run


RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _recurrent(_lstm_step),
    torch.gru: _recurrent(_gru_step),
    torch.rnn_tanh: _recurrent(_tanh_step),
    torch.rnn_relu: _recurrent(_relu_step),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_tanh_step),
    torch.rnn_relu_cell: _cell(_relu_step),
}


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.embedding_bag` (0 sum, 1 mean, 2 maximum) as look-up and reduction by bag."""
    if mode == 2 or per_sample_weights is not None or padding_idx not in (None, -1):
        return NotImplemented
    bags = len(offsets) - include_last_offset
    positions = torch.arange(len(indices), device=indices.device)
    bag = torch.searchsorted(offsets[:bags].contiguous(), positions, right=True) - 1
    rows = F.embedding(indices, weight)
    total = torch.zeros(bags, rows.shape[-1], dtype=rows.dtype, device=rows.device)
    total = total.index_add(0, bag, rows)
    sizes = torch.bincount(bag, minlength=bags).to(rows.dtype)
    if mode == 1:
        total = total / sizes.clamp(min=1)[:, None]
    return total, bag, sizes, sizes


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.bilinear` as two products; `weight` is `(out, in1, in2)`."""
    left = torch.einsum("...i,kij->...kj", input1, weight)
    out = (left @ input2.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The kernel behind `torch.nn.utils.parametrizations.weight_norm`: `g · v / |v|`."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    scale: Tensor = g / torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    return v * scale


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`scaled_dot_product_attention` written out, for random masks that `vmap` can draw."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, dim=-3) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.mT
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(dim=-1), dropout_p) @ value
