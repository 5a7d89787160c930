"""Callbacks: what happens around a run, beside training.

A callback sees the trainer and the metrics of a generation, and may put metrics of its own into
them: those that come later in the list, such as loggers, see them too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .checks import check_callable, check_choice, check_integer, check_number
from .errors import ConfigurationError
from .evaluators import preserved
from .metrics import Metrics

if TYPE_CHECKING:
    from .base import ESTrainer


class Callback:
    """Override what you need.

    An exception in a callback ends the run, after `on_train_end` of all; the trainer stays whole.
    (Loggers are the exception: see `Logger`.)

    Example:
        >>> class StopWhenSolved(Callback):
        ...     def on_generation_end(self, trainer, metrics):
        ...         if metrics["max_fitness"] >= 0.0:
        ...             trainer.stop()
    """

    def on_train_start(self, trainer: ESTrainer) -> None:
        """Before the first generation of a `train()`."""

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """After each generation; `metrics` are the trainer's own, and may be added to."""

    def on_train_end(self, trainer: ESTrainer) -> None:
        """After the last generation, however the run ended."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up another run's state."""


class Evaluate(Callback):
    """Score the *centre*, on held-out data for instance, now and then.

    Args:
        function: `f(model)` → a number, or a dictionary of numbers by name. It runs without
            gradients; the model's mode is its own affair, and is restored.
        every: Generations between two evaluations. The last of a run is always one.
        name: The metric's name, or what the names of a dictionary begin with.

    Example:
        >>> Evaluate(lambda model: model.weight.norm(), every=10, name="norm")
        Evaluate(norm, every=10)
    """

    def __init__(
        self, function: Callable[[nn.Module], Any], every: int = 10, name: str = "evaluation"
    ) -> None:
        self.function = check_callable("function", function, "a function of the model")
        self.every = check_integer("every", every, at_least=1)
        self.name = name

    def __repr__(self) -> str:
        return f"Evaluate({self.name}, every={self.every})"

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Evaluate, if it is time."""
        if trainer.generation % self.every and not trainer.last_generation:
            return
        with preserved(trainer.model), torch.no_grad():
            values = self.function(trainer.model)
        if isinstance(values, Mapping):
            metrics.update({f"{self.name}/{key}": float(value) for key, value in values.items()})
        else:
            metrics[self.name] = float(values)


class EarlyStopping(Callback):
    """End the run when a metric has got no better for a while, or is good enough.

    Args:
        monitor: The metric; generations without it do not count.
        patience: Generations (with the metric) without an improvement after which the run ends.
        min_delta: What counts as an improvement, in the metric's units.
        target: End the run as soon as the metric is this good.
        mode: Whether `"max"` or `"min"` is better.
    """

    def __init__(
        self,
        monitor: str = "mean_fitness",
        patience: int = 100,
        min_delta: float = 0.0,
        target: float | None = None,
        mode: str = "max",
    ) -> None:
        self.monitor = monitor
        self.patience = check_integer("patience", patience, at_least=1)
        self.min_delta = check_number("min_delta", min_delta)
        self.sign = 1 if check_choice("mode", mode, ("max", "min")) == "max" else -1
        self.target = target
        self.best = -float("inf")
        self.waited = 0

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Stop the trainer, if it is time."""
        if self.monitor not in metrics:
            if trainer.last_generation:
                self._check_name(trainer.history)
            return
        value = self.sign * metrics[self.monitor]
        self.waited += 1
        if value > self.best + self.min_delta:
            self.best, self.waited = value, 0
        good_enough = self.target is not None and value >= self.sign * self.target
        if good_enough or self.waited >= self.patience:
            trainer.stop()

    def _check_name(self, history: Iterable[Metrics]) -> None:
        names = sorted({name for metrics in history for name in metrics})
        if self.monitor not in names:
            raise ConfigurationError(
                f"EarlyStopping(monitor={self.monitor!r}): no generation had that metric; they had "
                f"{', '.join(names)}. A callback that adds it comes before this one"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value, and for how long it has stood."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up another run's."""
        self.best, self.waited = state["best"], state["waited"]


class Checkpoint(Callback):
    """Save the run now and then; `trainer.train(resume_from=folder)` goes on from the newest.

    Args:
        folder: Where to; made if it is not there. Files are `generation-00000100.pt`, `best.pt`.
        every: Generations between two; the end of a run is always saved.
        keep: How many to keep, the newest.
        monitor: A metric whose best generation is also kept, as `best.pt`; None for none.
        mode: Whether `"max"` or `"min"` of it is best.

    Raises:
        OSError: If a file cannot be written. The run ends there, and the files of before are whole.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 100,
        keep: int = 3,
        monitor: str | None = None,
        mode: str = "max",
    ) -> None:
        self.folder = Path(folder)
        self.every = check_integer("every", every, at_least=1)
        self.keep = check_integer("keep", keep, at_least=1)
        self.monitor = monitor
        self.sign = 1 if check_choice("mode", mode, ("max", "min")) == "max" else -1
        self.best = -float("inf")
        self._saved = -1

    def on_train_start(self, trainer: ESTrainer) -> None:
        """Make the folder: better now than after an hour."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Save, if it is time."""
        value = self.sign * metrics.get(self.monitor or "", -self.sign * float("inf"))
        if value > self.best:
            self.best = value
            trainer.save(self.folder / "best.pt")
        if trainer.generation % self.every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: ESTrainer) -> None:
        """Save, unless that has just been done."""
        self._save(trainer)

    def _save(self, trainer: ESTrainer) -> None:
        path = self.folder / f"generation-{trainer.generation:08d}.pt"
        if not path.exists() or trainer.generation > self._saved:
            trainer.save(path)
            self._saved = trainer.generation
        for old in saved(self.folder)[: -self.keep]:
            old.unlink()

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up another run's."""
        self.best = state["best"]


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("generation-*.pt"))


def newest(place: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to go on from: a file, or the newest of a folder; None if that has none."""
    path = Path(place)
    if path.is_file() or path.suffix:
        return path
    return saved(path)[-1] if saved(path) else None


def check_callbacks(callbacks: Any) -> list[Callback]:
    """`callbacks=` as a list; checkpoints last, since they save what the others know."""
    if isinstance(callbacks, Callback):
        raise ConfigurationError(
            f"callbacks={type(callbacks).__name__}: expected a list of callbacks, [callback]"
        )
    result = list(callbacks)
    for callback in result:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks holds a {type(callback).__name__}: expected instances of Callback"
            )
    return sorted(result, key=lambda callback: isinstance(callback, Checkpoint))


@contextlib.contextmanager
def running(
    callbacks: Sequence[Callback], trainer: ESTrainer
) -> Iterator[Callable[[Metrics], None]]:
    """Start the callbacks, yield what tells them of a generation, and end all that were started."""

    def tell(metrics: Metrics) -> None:
        for callback in callbacks:
            callback.on_generation_end(trainer, metrics)

    with contextlib.ExitStack() as ends:
        for callback in reversed(callbacks):  # the first to start is the last to end
            ends.callback(callback.on_train_end, trainer)
        for callback in callbacks:
            callback.on_train_start(trainer)
        yield tell
