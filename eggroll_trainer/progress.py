"""`ProgressBar`: one tidy bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .callbacks import Callback
from .metrics import Metrics

if TYPE_CHECKING:
    from .base import ESTrainer

PLAIN_LINES_EVERY = 10.0  # seconds


class ProgressBar(Callback):
    """Generation, best, mean and spread of fitness, members per second; `verbose=True` adds one."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._begun = self._last_line = 0.0
        self._first = 0

    def on_train_start(self, trainer: ESTrainer) -> None:
        """Show an empty bar."""
        self._begun = self._last_line = time.perf_counter()
        self._first = trainer.generation
        if sys.stderr.isatty():
            total = trainer.last_planned - self._first
            self._bar = tqdm(total=total, unit="gen", dynamic_ncols=True)

    def on_generation_end(self, trainer: ESTrainer, metrics: Metrics) -> None:
        """Count a generation and show its metrics."""
        done = trainer.generation - self._first
        seconds = max(1e-9, time.perf_counter() - self._begun)
        text = (
            f"best {metrics['best_fitness']:.4g}, mean {metrics['mean_fitness']:.4g} "
            f"± {metrics['std_fitness']:.2g}, "
            f"{done * trainer.population_size / seconds:,.0f} members/s"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif done == 1 or trainer.last_generation or self._line_is_due():
            self._last_line = time.perf_counter()
            total = trainer.last_planned - self._first
            self._show(f"generation {trainer.generation} ({done}/{total}): {text}")

    def on_train_end(self, trainer: ESTrainer) -> None:
        """Close the bar."""
        if trainer.interrupted:
            self._show(f"interrupted after generation {trainer.generation}")
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line_is_due(self) -> bool:
        return time.perf_counter() - self._last_line >= PLAIN_LINES_EVERY

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)
