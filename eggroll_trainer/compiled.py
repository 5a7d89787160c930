"""Batched passes, traced once and compiled by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .batched import BatchedEvaluator, Own, Owner, Shared
from .inputs import Inputs
from .noise import keyed_global_rng
from .population import Population

# Products of so few factors are written out as sums, which the compiler fuses with what stands
# around them: the bias, the activation. A batched product would be a pass of its own.
FEW = 4


class CompiledEvaluator(BatchedEvaluator):
    """A batched pass becomes a graph of tensor operations, and that is compiled.

    The graph is kept for the shapes and types of its inputs, the function, and the model's modes.
    Chunks of an odd size, such as the last of a generation, are not worth the seconds: they run as
    they are.
    """

    name = "vmap, compiled"

    def __init__(self, chunk_size: int | None, randomness: str) -> None:
        super().__init__(chunk_size, randomness)
        self._function: Any = None
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._odd = True

    def _run(
        self, population: Population, owner: Owner, inputs: Inputs, start: int, stop: int
    ) -> Any:
        usual = inputs.limit(0, min(self._size(population), len(population)))
        self._odd = self.chunk_size is None or stop - start != usual
        return super()._run(population, owner, inputs, start, stop)

    def run_chunk(self, owner: Owner, own: Own, dims: Any, shared: Shared) -> Any:
        """One batched pass: traced and compiled the first time."""
        uncompiled = super().run_chunk
        if self._odd:
            return uncompiled(owner, own, dims, shared)
        if owner.function != self._function:
            self._function, self._graphs = owner.function, {}
        leaves, spec = tree_flatten((own, shared))
        modes = tuple(module.training for module in owner.modules())
        key = (modes, str(dims), str(spec), *map(_signature, leaves))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if key not in self._graphs:

            def run(*given: Tensor) -> Any:
                rest = iter(given)
                filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                own, shared = tree_unflatten(filled, spec)
                return uncompiled(owner, own, dims, shared)

            # Tracing runs the fitness; its random numbers must not be missing afterwards.
            with keyed_global_rng(tensors[0].device, 0):
                graph = make_fx(run, decomposition_table=DECOMPOSITIONS)(*tensors)
            # Random numbers from torch's generators, which are seeded for each chunk.
            options: dict[str, Any] = {"fallback_random": True}
            self._graphs[key] = torch.compile(graph, dynamic=False, options=options)
        return self._graphs[key](*tensors)


def _signature(leaf: Any) -> Any:
    """What a graph depends on: the make of a tensor, the value of anything else."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return repr(leaf)


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
