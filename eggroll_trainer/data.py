"""`BatchSource`: the batches of `data=`, one generation after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from .checks import check_integer
from .errors import ConfigurationError
from .noise import derive_seed, keyed_global_rng

END = object()
CPU = torch.device("cpu")


@runtime_checkable
class Movable(Protocol):
    """A tensor, or a batch of somebody's own class that can be moved as one."""

    def to(self, device: torch.device) -> Any:
        """The same on another device."""


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all that can be moved, in tuples, lists and dictionaries, on `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Movable) else leaf, batch)


class TensorBatches:
    """Shuffled batches of tensors, by indexing; a `DataLoader` would collect row by row.

    Args:
        tensors: Alike in their first axis.
        batch_size: Rows of a batch; the last may have fewer.
    """

    def __init__(self, tensors: tuple[Tensor, ...], batch_size: int) -> None:
        self.tensors = tensors
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.split(torch.randperm(len(self.tensors[0])), self.batch_size):
            yield tuple(tensor[rows.to(tensor.device)] for tensor in self.tensors)


def make_batches(data: Any, batch_size: int | None) -> Iterable[Any]:
    """What `data=` and `batch_size=` mean, as an iterable of batches."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        if batch_size is None:
            raise ConfigurationError(
                f"data={type(data).__name__} has single examples: pass batch_size= too, or a "
                "DataLoader"
            )
        check_integer("batch_size", batch_size, at_least=1)
        if isinstance(data, TensorDataset):
            return TensorBatches(data.tensors, batch_size)
        loader: DataLoader[Any] = DataLoader(data, batch_size, shuffle=True)
        return loader
    if batch_size is not None:
        raise ConfigurationError(
            f"batch_size={batch_size!r} is for a Dataset of single examples, but data is a "
            f"{type(data).__name__}: leave it out"
        )
    if not isinstance(data, Iterable):
        raise ConfigurationError(
            f"data={type(data).__name__}: expected an iterable of batches, such as a DataLoader, "
            "or a Dataset with batch_size="
        )
    return data


class BatchSource:
    """Hands out batches, and begins another pass when they are exhausted.

    Whatever torch's global generator decides while batches are made, such as the order of a
    shuffling loader, is a function of seed, pass and position.

    Args:
        data: Any iterable of batches that can be iterated over again, or a `Dataset`.
        batch_size: Examples of a batch, for a `Dataset`.
        device: Where the batches go.

    Attributes:
        seed: The seed of the run.
    """

    def __init__(self, data: Any, batch_size: int | None, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self._data = make_batches(data, batch_size)
        self._generator = data.generator if isinstance(data, DataLoader) else None
        self.reset()

    def reset(self) -> None:
        """Begin again, with the first pass."""
        self._pass = self._position = 0
        self._batches: Iterator[Any] | None = None
        self._state_of_pass: Tensor | None = None
        self.complete()

    def next(self) -> Any:
        """The next batch."""
        batch = self._fetch()
        if batch is END:
            self._pass, self._position, self._batches = self._pass + 1, 0, None
            batch = self._fetch()
        if batch is END:
            raise ConfigurationError(
                "data yields no batch (any more): pass something that can be iterated over again "
                "and again, such as a list or a DataLoader, and that is not empty"
            )
        self._position += 1
        return to_device(batch, self.device)

    def complete(self) -> None:
        """The generation that the last batches were for has ended: a checkpoint begins here."""
        self._complete = {
            "pass": self._pass,
            "position": self._position,
            "generator": self._state_of_pass,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the next generation's batches begin."""
        return dict(self._complete)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there: batches of the pass that have been used are made again, and left out."""
        self._pass, self._position = state["pass"], state["position"]
        self._state_of_pass, self._batches = state["generator"], None
        if self._generator is not None and self._state_of_pass is not None:
            self._generator.set_state(self._state_of_pass.cpu())
        self.complete()

    def _fetch(self) -> Any:
        try:
            if self._batches is None:
                self._begin_pass()
            return self._draw(self._position)
        except BaseException:
            self.load_state_dict(self._complete)  # the loader is done for: the next try begins anew
            raise

    def _begin_pass(self) -> None:
        if self._generator is not None:
            self._state_of_pass = self._generator.get_state()
        with keyed_global_rng(CPU, derive_seed(self.seed, "data", self._pass)):
            self._batches = iter(self._data)
        for position in range(self._position):
            self._draw(position)

    def _draw(self, position: int) -> Any:
        assert self._batches is not None
        with keyed_global_rng(CPU, derive_seed(self.seed, "data", self._pass, position)):
            return next(self._batches, END)
