"""Loggers: the metrics of every generation, to files, TensorBoard or Weights & Biases.

A logger that fails never costs the run: its exception is reported once, as a warning, and training
goes on.
"""

from __future__ import annotations

import csv
import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .callbacks import Callback
from .errors import EggrollWarning
from .metrics import Metrics

if TYPE_CHECKING:
    from .base import ESTrainer


class Logger(Callback):
    """Base of loggers: fill in `log`, and `open` and `close` where there is something to."""

    def __init__(self) -> None:
        self.failed = False

    def open(self, trainer: ESTrainer) -> None:
        """Before the first generation; `trainer.history` holds those of before a resume."""

    @abstractmethod
    def log(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """After a generation."""

    def close(self) -> None:
        """After the run."""

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        if self.failed:
            return
        try:
            function(*args)
        except Exception as error:
            self.failed = True
            warnings.warn(
                f"{type(self).__name__} failed and logs no more, training goes on: "
                f"{type(error).__name__}: {error}",
                EggrollWarning,
                stacklevel=2,
            )

    def on_train_start(self, trainer: ESTrainer) -> None:
        """Open."""
        self.failed = False
        self._guarded(self.open, trainer)

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Log."""
        self._guarded(self.log, trainer, metrics)

    def on_train_end(self, trainer: ESTrainer) -> None:
        """Close."""
        self._guarded(self.close)


class CSVLogger(Logger):
    """A row a generation, a column a metric. The file always holds the whole run, resumed or not.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._names: list[str] = []

    def open(self, trainer: ESTrainer) -> None:
        """Write what has been so far."""
        self._names = []
        self._write_all(trainer.history)

    def log(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Append a row; write anew where a metric comes up that has no column yet."""
        if not metrics.keys() <= set(self._names):
            self._write_all(trainer.history)
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names).writerow(metrics)

    def _write_all(self, history: list[Metrics]) -> None:
        self._names = list(dict.fromkeys(name for metrics in history for name in metrics))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(history)


class JSONLogger(Logger):
    """A line of JSON a generation. The file always holds the whole run, resumed or not.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)

    def open(self, trainer: ESTrainer) -> None:
        """Write what has been so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(metrics) + "\n" for metrics in trainer.history]
        self.path.write_text("".join(lines), encoding="utf-8")

    def log(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")


class TensorBoardLogger(Logger):
    """For `tensorboard --logdir`; needs `pip install tensorboard`.

    Args:
        folder: Where the event files go.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)

    def open(self, trainer: ESTrainer) -> None:
        """Start a file; what an interrupted run logged beyond its checkpoint is dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=trainer.generation)

    def log(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Add a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, trainer.generation - 1)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbLogger(Logger):
    """For Weights & Biases; needs `pip install wandb`, and works offline (`mode="offline"`).

    Args:
        **options: For `wandb.init`: `project`, `name`, `mode`, `dir`, …
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def open(self, trainer: ESTrainer) -> None:
        """Start a wandb run, with the trainer's settings as its checks."""
        import wandb

        settings = {
            "trainer": type(trainer).__name__,
            "population_size": trainer.population_size,
            "learning_rate": trainer.learning_rate,
            "sigma": trainer.sigma,
            "group_size": trainer.group_size,
            "seed": trainer.seed,
            "optimizer": type(trainer.optimizer).__name__,
        }
        self._run = wandb.init(config=settings, **self.options)

    def log(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Log the metrics at their generation."""
        self._run.log(dict(metrics), step=trainer.generation - 1)

    def close(self) -> None:
        """Finish the wandb run."""
        self._run.finish()
