"""MuJoCo tasks, a whole population at once: `MujocoTask` and `MujocoReturn`."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import check_integer
from ..errors import ConfigurationError, EggrollWarning
from .episodes import Array, Worlds
from .returns import EpisodeFitness

try:
    import mujoco

    from .simulations import State, make_simulations
except ImportError as error:  # pragma: no cover - the message is what matters
    raise ImportError('this needs MuJoCo 4 or later: pip install "eggroll-trainer[rl]"') from error

__all__ = ["MujocoReturn", "MujocoTask", "MujocoWorlds", "State"]


class MujocoTask(ABC):
    """A body and what it should do: subclass this to write one.

    Everything is a function of many worlds at once, a row each, in NumPy. Several threads call it,
    so it keeps nothing of an episode.

    Attributes:
        xml: The model: a path, or MJCF itself.
        frame_skip: Physics steps of one step of the policy.
        max_steps: Steps of the policy in an episode.
        fields: Names of further arrays of `MjData` that the task looks at, such as `"xpos"`.
        noise: Bound of the uniform noise on the first positions and velocities.
        model: The `MjModel`.
        dt: Seconds of one step of the policy.
    """

    xml: str | Path
    frame_skip: int = 5
    max_steps: int = 1000
    fields: tuple[str, ...] = ()
    noise: float = 0.01

    def __init__(self) -> None:
        self.model = _load(self.xml)
        self.dt = self.frame_skip * self.model.opt.timestep
        self.start = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.start)

    def initial(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """The first positions `(nq,)` and velocities `(nv,)` of one episode."""
        qpos = self.start.qpos + rng.uniform(-self.noise, self.noise, self.model.nq)
        qvel = self.start.qvel + rng.uniform(-self.noise, self.noise, self.model.nv)
        return qpos, qvel

    @abstractmethod
    def observe(self, state: State) -> Array:
        """What the policies see, `(n, …)`."""

    @abstractmethod
    def reward(self, before: State, action: Array, after: State) -> Array:
        """Of a step, `(n,)`; actions are `(n, nu)`."""

    def terminated(self, state: State) -> Array:
        """Whether episodes have ended before their time, `(n,)`: never, unless you say so."""
        return np.zeros(len(state.qpos), dtype=bool)

    @property
    def observation_size(self) -> int:
        """Numbers in an observation."""
        worlds = MujocoWorlds(self)
        try:
            return int(worlds.reset([0]).shape[1])
        finally:
            worlds.close()

    @property
    def action_size(self) -> int:
        """Numbers in an action."""
        return int(self.model.nu)

    @property
    def action_range(self) -> tuple[Array, Array]:
        """Lowest and highest actions, `(nu,)` each: `ctrlrange`."""
        low, high = self.model.actuator_ctrlrange.T.astype(np.float32)
        free = ~self.model.actuator_ctrllimited.astype(bool)
        return np.where(free, -np.inf, low), np.where(free, np.inf, high)


class MujocoReturn(EpisodeFitness):
    """The mean return of episodes of a MuJoCo task.

    Args:
        task: The task, or the name of one that is shipped, such as `"HalfCheetah"`.
        episodes: Of each member, each generation.
        max_steps: As for `EpisodeFitness`; None is the task's.
        common_seeds: As for `EpisodeFitness`.
        threads: Each plays its share of the population; None is one for each core.

    Example:
        >>> fitness = MujocoReturn("HalfCheetah", max_steps=10)
        >>> policy = Policy(fitness.task.observation_size, fitness.task.action_size)
        >>> trainer = EGGROLLTrainer(policy.parameters(), policy, fitness, 8, seed=0)
        >>> result = trainer.train(2, verbose=False)
        >>> fitness.close()
    """

    def __init__(
        self,
        task: MujocoTask | str,
        episodes: int = 1,
        max_steps: int | Callable[[int], int] | None = None,
        common_seeds: bool = True,
        threads: int | None = None,
    ) -> None:
        if isinstance(task, str):
            from .mujoco_tasks import make_task

            task = make_task(task)
        if not isinstance(task, MujocoTask):
            raise ConfigurationError(f"task={task!r}: expected a MujocoTask, or the name of one")
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        self.task = task
        self._threads = threads or os.cpu_count() or 1
        super().__init__(self._worlds_of_task, episodes, max_steps, common_seeds)

    def _worlds_of_task(self) -> list[Worlds]:
        return [MujocoWorlds(self.task) for _ in range(self._threads)]


class MujocoWorlds(Worlds):
    """As many worlds of a task as are wanted.

    Args:
        task: The task.
    """

    def __init__(self, task: MujocoTask) -> None:
        self.task = task
        self.low, self.high = task.action_range
        self.simulations = make_simulations(task.model, task.fields)
        self.state = State(np.empty(0), np.empty(0), np.empty(0), {})
        self.lengths = np.empty(0, dtype=int)

    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each world."""
        starts = [self.task.initial(np.random.default_rng(seed)) for seed in seeds]
        qpos, qvel = (np.stack(x) for x in zip(*starts, strict=True))
        self.simulations.begin(qpos, qvel)
        self.lengths = np.zeros(len(seeds), dtype=int)
        self.state = self.simulations.read(np.arange(len(seeds)))
        return self.task.observe(self.state)

    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step some of them; an unstable one ends, with the reward −inf."""
        if actions.shape[1:] != self.low.shape:
            raise ConfigurationError(
                f"the policy returns {actions.shape[1:]} for each observation, and the task has "
                f"{len(self.low)} actuators"
            )
        actions = np.clip(actions, self.low, self.high).astype(np.float32)
        self.simulations.step(worlds, actions, self.task.frame_skip)
        before, after = self.state.some(worlds), self.simulations.read(worlds)
        unstable = after.time < before.time + 0.5 * self.task.dt  # MuJoCo has reset itself
        rewards = np.asarray(self.task.reward(before, actions, after), dtype=float)
        terminated = np.asarray(self.task.terminated(after)) | unstable
        if unstable.any():
            warnings.warn(
                f"the simulation of {type(self.task).__name__} became unstable in "
                f"{unstable.sum()} worlds: their members count as the worst",
                EggrollWarning,
                stacklevel=2,
            )
            rewards[unstable] = -np.inf
        self.state.write(worlds, after)
        self.lengths[worlds] += 1
        truncated = self.lengths[worlds] >= self.task.max_steps
        return self.task.observe(after), rewards, terminated, truncated

    def close(self) -> None:
        """Let go of them: each may have megabytes for its contacts."""
        self.simulations = make_simulations(self.task.model, self.task.fields)


def _load(xml: str | Path) -> Any:
    try:
        if str(xml).lstrip().startswith("<"):
            return mujoco.MjModel.from_xml_string(str(xml))
        return mujoco.MjModel.from_xml_path(str(xml))
    except ValueError as error:
        raise ConfigurationError(f"the model cannot be read: {error}") from error
