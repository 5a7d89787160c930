"""`Folded`: every member at once, laid out in the batch axis, for programs around the model.

A simulator calls a policy a thousand times an episode: what costs there is dispatch. So the batched
pass is traced into a graph of tensor operations, once for each shape, and only that is run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_map

from .errors import NotBatchableError, PopulationSizeError
from .graphs import signature, split, trace

if TYPE_CHECKING:
    from .population import Population

Run = Callable[..., Any]

# Threads run graphs side by side. But while one is traced, torch's modules behave otherwise and the
# model holds stand-ins for its weights: nobody else may trace, or copy the model, meanwhile.
MAKING = threading.RLock()


class Folded:
    """Some members of a population as one callable: see `Population.folded`.

    Args:
        population: The population.
        members: Indices of the members, in the order of the rows.
        checked: Compare the first call with the members one by one.
    """

    def __init__(self, population: Population, members: Sequence[int], checked: bool) -> None:
        self.population = population
        self.members = members
        self.checked = checked

    @functools.cached_property
    def _run(self) -> Run:
        """Made with the first call: who only takes subsets pays for no more."""
        with MAKING:
            return self.population.evaluator.fold(self.population, self.members, self.checked)

    @property
    def model(self) -> nn.Module:
        """The model whose members these are."""
        return self.population.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(iter(self.population.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.population.device

    def __len__(self) -> int:
        return len(self.members)

    def __call__(self, *args: Any) -> Any:
        """Run the model on every member's own rows.

        Args:
            *args: The model's arguments. Each tensor is `(members · rows, …)`, member after member:
                observations, and where the model is recurrent, its state.

        Returns:
            What the model returns, its tensors `(members · rows, …)`.
        """
        for leaf in tree_flatten(args)[0]:
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) % len(self.members)):
                raise PopulationSizeError(
                    f"an argument of shape {tuple(leaf.shape)}: expected a multiple of the "
                    f"{len(self.members)} members in its first axis, member after member"
                )
        return self._run(*args)

    def subset(self, members: Sequence[int]) -> Folded:
        """Some of the population's members alone, with the weights they have here.

        Each number of members is traced anew, which takes longer than many calls: leave members
        out by halves, not one by one.

        Args:
            members: Their indices in the population.
        """
        return Folded(self.population, members, self.checked)


class FoldedPass:
    """A batched pass over members that have rows of their own, as graphs.

    Args:
        members: How many.
        weights: What the members' weights are made of: any nesting of tensors.
        run: `run(weights, args) -> result`, with a leading member axis in `args` and `result`.
        finish: Makes a graph ready to be called.
        graphs: The graphs so far, and those of what their weights need but once; they outlive a
            generation.
        check: `check(args, result)` raises unless the members alone do the same; called for each
            new graph.
    """

    def __init__(
        self,
        members: int,
        weights: Any,
        run: Run,
        finish: Callable[[GraphModule], Run],
        graphs: dict[Any, tuple[Run, Run]],
        check: Callable[[Any, Any], None],
    ) -> None:
        self.members, self.weights, self.run = members, weights, run
        self.finish, self.graphs, self.check = finish, graphs, check
        leaves, spec = tree_flatten(weights)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.signature = (members, str(spec), signature(leaves))
        self.known: dict[Any, Run] = {}  # by the make of the arguments alone: quick to find

    def __call__(self, *args: Any) -> Any:
        """Run every member on its rows."""
        leaves, spec = tree_flatten(args)
        key, tensors = signature(leaves), [x for x in leaves if isinstance(x, Tensor)]
        if key not in self.known:
            with MAKING:
                self.known[key] = self._graph((*self.signature, str(spec), key), args, tensors)
        return self.known[key](*tensors)

    def _graph(self, key: Any, args: Any, tensors: list[Tensor]) -> Run:
        known = self.graphs.get(key)
        early, late = known or self._traced(args)
        run = functools.partial(late, *early(*self.tensors))
        if known is None:
            self.check(args, run(*tensors))
            self.graphs[key] = early, late
        return run

    def _traced(self, args: Any) -> tuple[Run, Run]:
        """What is run once for the weights, and what is run with each call."""
        early, late = split(trace(self._folded, self.weights, args), len(self.tensors))
        return early.forward, self.finish(late)

    def _folded(self, weights: Any, args: Any) -> Any:
        def unfold(x: Any) -> Any:
            return x.reshape(self.members, -1, *x.shape[1:]) if isinstance(x, Tensor) else x

        result = self.run(weights, tree_map(unfold, args))
        return tree_map(lambda x: x.flatten(0, 1), result)


def in_turn(population: Population, members: Sequence[int]) -> Run:
    """The members one after another, each on its own rows."""
    with MAKING:
        modules = [population.member(index) for index in members]

    def run(*args: Any) -> Any:
        results = [module(*rows_of(args, i, len(modules))) for i, module in enumerate(modules)]
        return tree_map(lambda *x: torch.cat(x), *results)

    return run


def rows_of(args: Any, index: int, members: int) -> Any:
    """The part of member-major arguments that belongs to one member."""

    def rows(x: Any) -> Any:
        return x.reshape(members, -1, *x.shape[1:])[index] if isinstance(x, Tensor) else x

    return tree_map(rows, args)


def check_alone(population: Population, members: Sequence[int], args: Any, result: Any) -> None:
    """Raise unless the first and the last member do the same alone."""
    for i in {0, len(members) - 1}:
        alone = population.member(members[i])(*rows_of(args, i, len(members)))
        folded = rows_of(result, i, len(members))
        for x, y in zip(tree_flatten(folded)[0], tree_flatten(alone)[0], strict=True):
            if x.shape != y.shape or not _close(x, y):
                raise NotBatchableError(
                    f"member {members[i]} does not do alone what it does among the others: does "
                    "the model mix its rows, keep a state, or draw random numbers?"
                )


def _close(x: Tensor, y: Tensor) -> bool:
    """Equal, up to the rounding of their type."""
    if not y.is_floating_point():
        return torch.equal(x, y)
    eps = torch.finfo(y.dtype).eps ** 0.5
    return torch.allclose(x, y, rtol=eps, atol=eps * max(1.0, y.abs().max()), equal_nan=True)
