"""Functions of tensors traced into graphs of tensor operations, with no Python between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .noise import keyed_global_rng

# Products of so few factors are written out as sums: a batched product of small matrices costs
# more, and a compiler fuses sums with what stands around them (the bias, the activation).
FEW = 4


def trace(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The operations of `function(*args)`, as a function of the tensors in `args`, flat.

    Everything else is a constant of the graph: what is no tensor, shapes, the branches taken.
    """
    leaves, spec = tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def run(*given: Tensor) -> Any:
        rest = iter(given)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return function(*tree_unflatten(filled, spec))

    # Tracing runs the function; its random numbers must not be missing afterwards.
    with keyed_global_rng(tensors[0].device, 0):
        return make_fx(run, decomposition_table=DECOMPOSITIONS)(*tensors)


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph depends on: the make of each tensor, the value of anything else."""
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    )


def _accumulated(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """`baddbmm` as a sum of outer products, where there are few."""
    if batch1.shape[2] > FEW or (beta, alpha) != (1, 1):
        return NotImplemented
    for j in range(batch1.shape[2]):
        input = input + batch1[..., j : j + 1] * batch2[:, j : j + 1]
    return input


def _accumulated_in_place(input: Tensor, batch1: Tensor, batch2: Tensor, **scales: float) -> Any:
    result = _accumulated(input, batch1, batch2, **scales)
    return result if result is NotImplemented else input.copy_(result)


DECOMPOSITIONS = {
    torch.ops.aten.baddbmm.default: _accumulated,
    torch.ops.aten.baddbmm_.default: _accumulated_in_place,
}
