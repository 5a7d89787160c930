"""`Progress`: one tidy bar in a terminal, plain lines elsewhere, nothing when not wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

PLAIN_LINES_EVERY = 10.0  # seconds


class Progress:
    """Progress of a run, for `with`.

    Args:
        num_generations: Generations of the run.
        population_size: Members of a generation.
        enabled: Whether anything is shown.
    """

    def __init__(self, num_generations: int, population_size: int, enabled: bool) -> None:
        self.total = num_generations
        self.population_size = population_size
        self.enabled = enabled
        self.done = 0
        self.started = self.last = time.perf_counter()
        terminal = enabled and sys.stderr.isatty()
        self.bar: tqdm[Any] | None = None
        if terminal:
            self.bar = tqdm(total=num_generations, unit="gen", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count a generation and show its metrics."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(self._describe(metrics), refresh=False)
            self.bar.update()
        elif self.enabled:
            now = time.perf_counter()
            if self.done in (1, self.total) or now - self.last >= PLAIN_LINES_EVERY:
                self.last = now
                self.note(
                    f"generation {metrics['generation'] + 1:.0f} "
                    f"({self.done}/{self.total}): {self._describe(metrics)}"
                )

    def note(self, text: str) -> None:
        """Show a line."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif self.enabled:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, metrics: Mapping[str, float]) -> str:
        rate = self.done * self.population_size / max(1e-9, time.perf_counter() - self.started)
        return (
            f"best {metrics['best_fitness']:.4g}, mean {metrics['mean_fitness']:.4g} "
            f"± {metrics['std_fitness']:.2g}, {rate:,.0f} members/s"
        )
