"""Episodes of a whole population: the loop between policies and worlds."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import FitnessError
from ..folded import Folded
from ..policies import RecurrentPolicy

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
        sums: Sums of the observations that were acted on, `(episodes, …)`; None if not wanted.
        squares: Sums of their squares.
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

    def run(self, max_steps: float, stop: threading.Event | None = None) -> Episodes:
        """Play every episode to its end, for so many steps, or until the event is set."""
        step = 0
        while self.alive.any() and step < max_steps and not (stop and stop.is_set()):
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
        given = given.to(self.policy.device)
        if self.state is None:
            actions = self.policy(given)
        else:
            actions, self.state = self.policy(given, self.state)
        found: Array = actions.cpu().numpy()
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
    """A model by itself, in the place of `Folded`: for evaluation."""

    members = range(1)

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, first.device

    def __call__(self, *args: Any) -> Any:
        """Call the model."""
        return self.model(*args)

    def subset(self, members: Sequence[int]) -> Alone:
        """Itself."""
        return self


def shares(count: int, rows: int, worlds: Sequence[Worlds]) -> list[range]:
    """So many members, of so many rows each, in even parts that several `Worlds` play at once.

    Each fits into its worlds, and none is so small that its last bits would differ.
    """
    capacity = worlds[0].capacity or count * rows
    needed = math.ceil(count / max(1, capacity // rows))
    wanted = math.ceil(needed / len(worlds)) * len(worlds)
    parts = max(needed, min(wanted, count * rows // FEW_ROWS))
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def play(
    worlds: Sequence[Worlds], jobs: Sequence[Callable[[Worlds], Play]], max_steps: float
) -> list[Episodes]:
    """Play parts of a population, each `Worlds` in a thread of its own.

    A thread has its part's policies and worlds: while one waits for a process or is in a physics
    engine, which lets go of Python's lock, the others go on.

    Args:
        worlds: The worlds.
        jobs: Each begins the episodes of one part.
        max_steps: As for `Play.run`.
    """
    left, stop = enumerate(jobs), threading.Event()
    played: list[Any] = [None] * len(jobs)

    def work(some: Worlds) -> None:
        with torch.no_grad():  # which each thread has to say
            for index, begin in left:  # the threads take from it in turn
                played[index] = begin(some).run(max_steps, stop)
                if stop.is_set():
                    break

    if len(worlds) == 1:  # in the caller's own thread: an environment may insist on the main one
        work(worlds[0])
        return played
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads would spin on the cores that these need
    try:
        with ThreadPoolExecutor(len(worlds)) as pool:
            working = [pool.submit(work, some) for some in worlds]
            try:
                for done in as_completed(working):
                    done.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)
    return played


def joined(parts: list[Episodes]) -> Episodes:
    """One after another, as they were played."""

    def join(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    names = ("returns", "lengths", "terminated", "sums", "squares")
    return Episodes(**{name: join(name) for name in names})
