"""Episodes of a whole population: the loop between policies and worlds.

`Worlds` are what a simulator gives; `EpisodeFitness` turns them into a population fitness.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..checks import check_integer
from ..errors import ConfigurationError, FitnessError
from ..folded import Folded
from ..noise import derive_seed
from ..policies import Normalize, RecurrentPolicy
from ..population import Population, population_fitness

Array = np.ndarray[Any, Any]

# Fewer rows than this are multiplied by other kernels, whose last bits differ.
FEW_ROWS = 8


class Worlds(ABC):
    """Worlds that are stepped together, each through one episode at a time.

    Attributes:
        capacity: How many there can be at once; None if any number.
    """

    capacity: int | None = None

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each of `len(seeds)` worlds; returns `(worlds, …)` observations."""

    @abstractmethod
    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step some of the worlds.

        Args:
            worlds: Which, `(n,)`, in ascending order.
            actions: What the policies returned for them, `(n, …)`.

        Returns:
            Observations `(n, …)`, rewards `(n,)`, terminated `(n,)` and truncated `(n,)`. A reward
            of −inf says that the world broke down, and its member counts as the worst.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of processes and simulators."""


@dataclass
class Episodes:
    """What episodes came to: each array has an entry for each of them.

    Attributes:
        returns: Sum of the rewards.
        lengths: Steps.
        terminated: Whether the world ended it, and no limit of steps.
        count: Observations that were acted on.
        sums: Their sums, `(episodes, observation)`; None where they are not wanted.
        squares: The sums of their squares.
    """

    returns: Array
    lengths: Array
    terminated: Array
    sums: Array | None = None
    squares: Array | None = None


class Play:
    """Episodes in progress: one world for each row of the members' observations.

    Args:
        policy: The members.
        worlds: The worlds.
        seeds: Of the episodes, `(members, rows)`.
        centre: What is taken off observations before their statistics; None for no statistics.
    """

    def __init__(
        self, policy: Folded | Alone, worlds: Worlds, seeds: Array, centre: Array | None = None
    ) -> None:
        self.policy, self.worlds = policy, worlds
        self.rows = seeds.shape[1]
        self.observations = worlds.reset([int(seed) for seed in seeds.flat])
        total = seeds.size
        self.episodes = Episodes(
            np.zeros(total), np.zeros(total, dtype=np.int64), np.zeros(total, dtype=bool)
        )
        self.centre = centre
        if centre is not None:
            self.episodes.sums = np.zeros((total, *centre.shape))
            self.episodes.squares = np.zeros((total, *centre.shape))
        self.ids = np.arange(total)  # the episode of each row of `observations`
        self.alive = np.ones(total, dtype=bool)
        self.state: Any = None
        if isinstance(policy.model, RecurrentPolicy):
            self.state = policy.model.initial_state(total)

    def run(self, max_steps: float) -> Episodes:
        """Play every episode to its end, or for so many steps."""
        step = 0
        while self.alive.any() and step < max_steps:
            self._step()
            step += 1
            self._leave_out()
        return self.episodes

    def _step(self) -> None:
        actions = self._act()
        here = np.flatnonzero(self.alive)
        ids, episodes = self.ids[here], self.episodes
        if self.centre is not None:
            shifted = self.observations[here] - self.centre
            episodes.sums[ids] += shifted  # type: ignore[index]
            episodes.squares[ids] += shifted * shifted  # type: ignore[index]
        observations, rewards, terminated, truncated = self.worlds.step(ids, actions[here])
        if np.isnan(rewards).any() or not np.isfinite(observations).all():
            self._complain(ids, observations, rewards)
        episodes.returns[ids] += rewards
        episodes.lengths[ids] += 1
        episodes.terminated[ids] = terminated
        self.observations[here] = observations
        self.alive[here] = ~(terminated | truncated)

    def _act(self) -> Array:
        given = torch.from_numpy(self.observations)
        if given.is_floating_point():
            given = given.to(self.policy.dtype)
        if self.state is None:
            actions = self.policy(given)
        else:
            actions, self.state = self.policy(given, self.state)
        found: Array = actions.numpy()
        if found.dtype.kind == "f" and not np.isfinite(found[self.alive]).all():
            row = np.flatnonzero(self.alive & ~np.isfinite(found).reshape(len(found), -1).all(1))[0]
            raise FitnessError(
                f"{self._name(self.ids[row])}: the policy returned the action {found[row]}: "
                "expected finite numbers"
            )
        return found

    def _leave_out(self) -> None:
        """Members whose episodes have all ended are left out, when they are half of all."""
        playing = self.alive.reshape(-1, self.rows).max(axis=1)
        if playing.sum() > len(playing) // 2 or playing.sum() * self.rows < FEW_ROWS:
            return
        self.policy = self.policy.subset(
            [m for m, on in zip(self.policy.members, playing, strict=True) if on]
        )
        rows = np.repeat(playing, self.rows)
        self.ids, self.alive = self.ids[rows], self.alive[rows]
        self.observations = self.observations[rows]
        keep = torch.from_numpy(rows)
        self.state = tree_map(lambda x: x[keep], self.state)

    def _name(self, episode: int) -> str:
        row = int(np.flatnonzero(self.ids == episode)[0])
        return f"member {self.policy.members[row // self.rows]}"

    def _complain(self, ids: Array, observations: Array, rewards: Array) -> None:
        bad = np.isnan(rewards) | ~np.isfinite(observations).reshape(len(ids), -1).all(axis=1)
        first = np.flatnonzero(bad)[0]
        raise FitnessError(
            f"{self._name(ids[first])}: after {self.episodes.lengths[ids[first]]} steps the "
            f"environment gave the reward {rewards[first]} and the observation "
            f"{observations[first]}: expected finite numbers"
        )


class Alone:
    """A model by itself, in the place of `Folded`: for `EpisodeFitness.evaluate`."""

    members = range(1)

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def __call__(self, *args: Any) -> Any:
        """Call the model."""
        return self.model(*args)

    def subset(self, members: Sequence[int]) -> Alone:
        """Itself."""
        return self


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
        try:
            yield self._worlds
        except BaseException:
            self.close()
            raise

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
        with torch.no_grad(), self._open_worlds() as worlds:
            capacity = worlds.capacity or episodes
            for start in range(0, episodes, capacity):
                some = seeds[None, start : start + capacity]
                parts.append(Play(Alone(model), worlds, some).run(limit))
        return _joined(parts)

    def complete(self, model: nn.Module) -> dict[str, float]:
        """Take in what the generation's episodes showed; called once it has been told."""
        played, self._played = self._played, []
        if not played:
            return {}
        episodes = _joined(played)
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


def _joined(parts: list[Episodes]) -> Episodes:
    """One after another, as they were played."""

    def join(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    names = ("returns", "lengths", "terminated", "sums", "squares")
    return Episodes(**{name: join(name) for name in names})
