"""`EpisodeFitness`: worlds as a population fitness, the mean return of each member's episodes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checks import check_integer
from ..errors import ConfigurationError
from ..evaluators import preserved
from ..noise import derive_seed
from ..policies import Normalize
from ..population import Population, population_fitness
from .episodes import FEW_ROWS, Alone, Array, Episodes, Play, Worlds, joined, play, shares


class EpisodeFitness(population_fitness[Array]):
    """The mean return of each member's episodes.

    A policy is any module from observations `(rows, …)` to what the worlds take as actions, or a
    `RecurrentPolicy`. Where it has a `Normalize`, that learns from the observations of each
    generation, once it has been told.

    Args:
        worlds: Makes the worlds; called once, when they are first needed. Where there are several
            `Worlds`, each plays its share of the population in a thread of its own.
        episodes: Of each member.
        max_steps: End an episode after so many steps; or a function generation → steps, for
            episodes that grow. None leaves it to the worlds.
        common_seeds: All members of a generation meet the same episodes, so that they are compared
            and not their luck. If False, each antithetic pair meets episodes of its own: the two
            are compared still, and a generation sees as many beginnings as it has pairs, which is
            better where one says little of the others. Each generation has new episodes, which the
            trainer's seed decides.
    """

    def __init__(
        self,
        worlds: Callable[[], Sequence[Worlds]],
        episodes: int = 1,
        max_steps: int | Callable[[int], int] | None = None,
        common_seeds: bool = True,
    ) -> None:
        super().__init__(self._score)
        self.episodes = check_integer("episodes", episodes, at_least=1)
        if max_steps is not None and not callable(max_steps):
            check_integer("max_steps", max_steps, at_least=1)
        self.max_steps = max_steps
        self.common_seeds = common_seeds
        self._make_worlds = worlds
        self._worlds: Sequence[Worlds] = ()
        self._played: list[Episodes] = []

    @contextlib.contextmanager
    def _open_worlds(self) -> Iterator[Sequence[Worlds]]:
        """The worlds; after an error they are closed, since they may be in the middle of a step."""
        if not self._worlds:
            self._worlds = self._make_worlds()
        try:
            yield self._worlds
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the worlds; they are made anew when they are needed."""
        worlds, self._worlds = self._worlds, ()
        for some in worlds:
            some.close()

    def evaluate(
        self, model: nn.Module, episodes: int = 20, seed: int = 0, max_steps: int | None = None
    ) -> Episodes:
        """Play episodes that no training has met; statistics stay as they are.

        Args:
            model: The policy: `trainer.model`, usually.
            episodes: How many.
            seed: The same episodes for the same seed.
            max_steps: End them after so many steps.
        """
        check_integer("episodes", episodes, at_least=1)
        seeds = np.array([_episode_seed(seed, "evaluation", e) for e in range(episodes)])
        limit = math.inf if max_steps is None else max_steps
        with torch.no_grad(), preserved(model), self._open_worlds() as worlds:
            # So many at once, whatever holds the worlds: the last bits depend on the rows.
            rows = min(FEW_ROWS, worlds[0].capacity or FEW_ROWS)
            jobs = [
                functools.partial(Play, Alone(model), seeds=seeds[None, first : first + rows])
                for first in range(0, episodes, rows)
            ]
            return joined(play(worlds, jobs, limit))

    def complete(self, model: nn.Module) -> dict[str, float]:
        """Take in what the generation's episodes showed; called once it has been told."""
        played, self._played = self._played, []
        if not played:
            return {}
        episodes = joined(played)
        if episodes.sums is not None and (normalize := _normalizer(model)) is not None:
            count = float(episodes.lengths.sum())
            offset = torch.from_numpy(episodes.sums.sum(axis=0)) / count
            squares = torch.from_numpy(episodes.squares.sum(axis=0)) / count  # type: ignore[union-attr]
            device = normalize.mean.device
            mean = normalize.mean + offset.to(device)
            normalize.merge(count, mean, (squares - offset.square()).clamp(min=0).to(device))
        return {
            "steps": float(episodes.lengths.sum()),
            "episode_length": float(episodes.lengths.mean()),
        }

    def _score(self, population: Population) -> Array:
        seeds, limit = self._seeds(population), self._limit(population.generation)
        normalize = _normalizer(population.model)
        centre = None if normalize is None else normalize.mean.cpu().numpy()
        with population.folded() as everyone, self._open_worlds() as worlds:
            rows = min(self.episodes, worlds[0].capacity or self.episodes)
            parts = [
                (some, slice(row, row + rows))
                for row in range(0, self.episodes, rows)
                for some in shares(len(seeds), rows, worlds)
            ]
            jobs = [
                functools.partial(
                    Play, everyone.subset(some), seeds=seeds[some, row], centre=centre
                )
                for some, row in parts
            ]
            self._played = play(worlds, jobs, limit)
        returns = np.zeros(seeds.shape)
        for (some, row), episodes in zip(parts, self._played, strict=True):
            returns[some, row] = episodes.returns.reshape(len(some), -1)
        mean: Array = returns.mean(axis=1)
        return mean

    def _seeds(self, population: Population) -> Array:
        """One for each member and episode."""
        key = population.seed, population.generation, "episode"
        pairs = len(population) // len(population.perturbations.signs)
        rows = [
            [_episode_seed(*key, pair, e) for e in range(self.episodes)]
            for pair in range(1 if self.common_seeds else pairs)
        ]
        return np.repeat(rows, len(population) // len(rows), axis=0)

    def _limit(self, generation: int) -> float:
        if self.max_steps is None:
            return math.inf
        return self.max_steps(generation) if callable(self.max_steps) else self.max_steps


def _episode_seed(*key: Any) -> int:
    """Of 31 bits: all that some environments take."""
    return derive_seed(*key) & 0x7FFFFFFF


def _normalizer(model: nn.Module) -> Normalize | None:
    found = [module for module in model.modules() if isinstance(module, Normalize)]
    if len(found) > 1:
        raise ConfigurationError(
            f"the policy has {len(found)} Normalize modules: expected one, for the observations"
        )
    return found[0] if found else None
