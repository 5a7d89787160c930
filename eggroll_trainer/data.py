"""`BatchSource`: the batches of `data=`, one generation after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .errors import ConfigurationError


class BatchSource:
    """Hands out batches, and begins again when they are exhausted.

    Args:
        data: Any iterable of batches that can be iterated over again: a list, a `DataLoader`.

    Attributes:
        position: Batches handed out in the current pass.
        done: The position up to which generations are complete; a checkpoint goes on from there.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        if not isinstance(data, Iterable):
            raise ConfigurationError(
                f"data={type(data).__name__}: expected an iterable of batches, such as a DataLoader"
            )
        self._data = data
        self._batches: Iterator[Any] | None = None
        self.position = self.done = 0

    def next(self) -> Any:
        """The next batch."""
        if self._batches is None:
            self._batches = iter(self._data)
        for batch in self._batches:
            self.position += 1
            return batch
        self._batches, self.position = iter(self._data), 0
        for batch in self._batches:
            self.position += 1
            return batch
        raise ConfigurationError(
            "data yields no batch (any more): pass something that can be iterated over again and "
            "again, such as a list or a DataLoader, and that is not empty"
        )

    def seek(self, position: int) -> None:
        """Go to where `position` batches of a pass have been handed out."""
        self._batches, self.position = iter(self._data), 0
        for _ in range(position):
            self.next()
        self.complete()

    def complete(self) -> None:
        """The generation that the last batches were handed out for has ended."""
        self.done = self.position
