"""What a fitness is given beside the model: the same for all members, or each one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .errors import PopulationSizeError


class Inputs(ABC):
    """Arguments of a function that is mapped over the members."""

    @abstractmethod
    def member(self, index: int) -> tuple[Any, ...]:
        """The arguments of one member."""

    @abstractmethod
    def chunk(self, start: int, stop: int) -> tuple[tuple[Any, ...], Any]:
        """The arguments of members `start … stop`, and the member axis of each (`in_dims`)."""

    @abstractmethod
    def everything(self) -> tuple[Any, ...]:
        """The arguments of a function that takes the whole population."""

    def limit(self, start: int, stop: int) -> int:
        """Where a chunk from `start` must end, at most at `stop`."""
        return stop


class MemberInputs(Inputs):
    """Arguments that all members share, but for axes that hold one slice for each.

    Args:
        args: Positional arguments: any nesting of tuples, lists and dicts.
        in_dims: As for `torch.func.vmap`: None shares an argument, an integer is its member axis;
            one for all, or nested like `args`.
    """

    def __init__(self, args: tuple[Any, ...], in_dims: Any = None) -> None:
        self.args = args
        leaves, self.spec = tree_flatten(args)
        self.leaves = leaves
        if isinstance(in_dims, int) or in_dims is None:
            self.dims = [in_dims if isinstance(leaf, Tensor) else None for leaf in leaves]
        else:
            self.dims = []
            for argument, dim in zip(args, in_dims, strict=True):
                for leaf in tree_flatten(argument)[0]:
                    self.dims.append(dim if isinstance(leaf, Tensor) else None)

    def check(self, population_size: int) -> None:
        """Raise unless every argument with a member axis has one slice for each member."""
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is not None and leaf.shape[dim] != population_size:
                raise PopulationSizeError(
                    f"an argument of shape {tuple(leaf.shape)} has {leaf.shape[dim]} slices along "
                    f"in_dims={dim}: expected population_size={population_size}"
                )

    def member(self, index: int) -> tuple[Any, ...]:
        """The arguments of one member."""
        if all(dim is None for dim in self.dims):
            return self.args
        pairs = zip(self.leaves, self.dims, strict=True)
        own = [x if dim is None else x.select(dim, index) for x, dim in pairs]
        return tuple(tree_unflatten(own, self.spec))

    def everything(self) -> tuple[Any, ...]:
        """The arguments, uncut."""
        return self.args

    def chunk(self, start: int, stop: int) -> tuple[tuple[Any, ...], Any]:
        """The arguments of members `start … stop`, and their member axes."""
        pairs = zip(self.leaves, self.dims, strict=True)
        own = [x if dim is None else x.narrow(dim, start, stop - start) for x, dim in pairs]
        args = tuple(tree_unflatten(own, self.spec))
        return args, tuple(tree_unflatten(list(self.dims), self.spec))


class GroupInputs(Inputs):
    """One batch for each group of neighbouring members.

    Args:
        batches: A batch for each group.
        group_size: Members of a group.
    """

    def __init__(self, batches: Sequence[Any], group_size: int) -> None:
        self.batches = batches
        self.group_size = group_size
        flat = [tree_flatten(batch) for batch in batches]
        # Batches of one make are stacked, so that a chunk may span groups.
        makes = [
            (spec, [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in leaves])
            for leaves, spec in flat
        ]
        self.stackable = all(make == makes[0] and None not in make[1] for make in makes)

    def member(self, index: int) -> tuple[Any, ...]:
        """The batch of the member's group."""
        return (self.batches[index // self.group_size],)

    def everything(self) -> tuple[Any, ...]:
        """One argument: the list of the groups' batches."""
        return (list(self.batches),)

    def chunk(self, start: int, stop: int) -> tuple[tuple[Any, ...], Any]:
        """The batches of members `start … stop`: shared if they are one group, else stacked."""
        first, last = start // self.group_size, (stop - 1) // self.group_size
        if first == last:
            return (self.batches[first],), None
        groups = torch.arange(start, stop) // self.group_size - first
        batches = self.batches[first : last + 1]
        stacked = tree_map(lambda *x: torch.stack(x)[groups.to(x[0].device)], *batches)
        return (stacked,), 0

    def limit(self, start: int, stop: int) -> int:
        """A chunk ends with its group where the batches of groups differ in shape."""
        if self.stackable:
            return stop
        return min(stop, (start // self.group_size + 1) * self.group_size)
