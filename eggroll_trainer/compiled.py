"""Batched passes, traced once and compiled by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten

from .batched import BatchedEvaluator, Own, Owner, Shared
from .graphs import signature, trace
from .inputs import Inputs
from .population import Population


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
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._odd = True

    def _run(
        self, population: Population, owner: Owner, inputs: Inputs, start: int, stop: int
    ) -> Any:
        usual = inputs.limit(0, min(self._size(population), len(population)))
        self._odd = self.chunk_size is None or stop - start != usual
        return super()._run(population, owner, inputs, start, stop)

    def run_chunk(self, owner: Owner, own: Own, dims: Any, shared: Shared) -> Any:
        """One batched pass: traced and compiled the first time."""
        if self._odd:
            return self.batched_pass(owner, own, dims, shared)
        if owner.function != self._function:
            self._function, self._compiled = owner.function, {}
        leaves, spec = tree_flatten((own, shared))
        key = (owner.modes, str(dims), str(spec), signature(leaves))
        if key not in self._compiled:
            self._compiled[key] = self.finish(
                trace(lambda own, shared: self.batched_pass(owner, own, dims, shared), own, shared)
            )
        return self._compiled[key](*(leaf for leaf in leaves if isinstance(leaf, Tensor)))

    def finish(self, graph: GraphModule) -> Callable[..., Any]:
        """A graph, compiled."""
        # Random numbers from torch's generators, which are seeded for each chunk.
        compiled: Callable[..., Any] = torch.compile(
            graph.forward, dynamic=False, options={"fallback_random": True}
        )
        return compiled
