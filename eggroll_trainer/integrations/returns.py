"""`EpisodeFitness`: worlds as a population fitness, the mean return of each member's episodes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
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
from .episodes import Alone, Array, Episodes, Play, Worlds, joined


class EpisodeFitness(population_fitness[Array]):
    """The mean return of each member's episodes.

    A policy is any module from observations `(rows, …)` to what the worlds take as actions, or a
    `RecurrentPolicy`. Where it has a `Normalize`, that learns from the observations of each
    generation, once it has been told.

    Args:
        worlds: Makes the worlds; called once, when they are first needed.
        episodes: Of each member.
        max_steps: End an episode after so many steps; or a function generation → steps, for
            episodes that grow. None leaves it to the worlds.
        common_seeds: All members of a generation meet the same episodes, so that they are compared
            and not their luck. Each generation has new ones, which the trainer's seed decides.
    """

    def __init__(
        self,
        worlds: Callable[[], Worlds],
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
        self._worlds: Worlds | None = None
        self._played: list[Episodes] = []

    @contextlib.contextmanager
    def _open_worlds(self) -> Iterator[Worlds]:
        """The worlds; after an error they are closed, since they may be in the middle of a step."""
        if self._worlds is None:
            self._worlds = self._make_worlds()
        threads = torch.get_num_threads()
        if self._worlds.parallel:
            torch.set_num_threads(1)
        try:
            yield self._worlds
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """Let go of the worlds; they are made anew when they are needed."""
        if self._worlds is not None:
            self._worlds.close()
            self._worlds = None

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
        limit, parts = math.inf if max_steps is None else max_steps, []
        with torch.no_grad(), preserved(model), self._open_worlds() as worlds:
            capacity = worlds.capacity or episodes
            for start in range(0, episodes, capacity):
                some = seeds[None, start : start + capacity]
                parts.append(Play(Alone(model), worlds, some).run(limit))
        return joined(parts)

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
        returns, self._played = np.zeros(seeds.shape), []
        with population.folded() as everyone, self._open_worlds() as worlds:
            capacity = worlds.capacity or seeds.size
            rows = min(self.episodes, capacity)
            batches = math.ceil(len(seeds) / max(1, capacity // rows))
            members = math.ceil(len(seeds) / batches)  # even ones: see FEW_ROWS
            for first in range(0, len(seeds), members):
                some = range(first, min(first + members, len(seeds)))
                policy = everyone if len(some) == len(seeds) else everyone.subset(some)
                for row in range(0, self.episodes, rows):
                    part = slice(some.start, some.stop), slice(row, row + rows)
                    play = Play(policy, worlds, seeds[part], centre)
                    self._played.append(play.run(limit))
                    returns[part] = self._played[-1].returns.reshape(len(some), -1)
        mean: Array = returns.mean(axis=1)
        return mean

    def _seeds(self, population: Population) -> Array:
        """One for each member and episode."""
        key = population.seed, population.generation, "episode"
        if self.common_seeds:
            row = [_episode_seed(*key, e) for e in range(self.episodes)]
            return np.tile(row, (len(population), 1))
        return np.array(
            [
                [_episode_seed(*key, member, e) for e in range(self.episodes)]
                for member in range(len(population))
            ]
        )

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
