"""The MuJoCo tasks of gymnasium, version 5: the same numbers, for a whole population at once.

What is observed and rewarded is gymnasium's (gymnasium.farama.org/environments/mujoco); the bodies
are the files that it carries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ConfigurationError
from .episodes import Array
from .mujoco import MujocoTask, State
from .mujoco_runners import (
    ASSETS,
    Ant,
    HalfCheetah,
    Hopper,
    Humanoid,
    NormalVelocities,
    Swimmer,
    Walker2d,
    squares,
)


def _distance(x: Array, y: Array) -> Array:
    distance: Array = np.linalg.norm(x - y, axis=-1)
    return distance


class Reacher(MujocoTask):
    """An arm of two links that is to reach a point."""

    xml = ASSETS / "reacher.xml"
    frame_skip = 2
    max_steps = 50
    fields = ("xpos",)

    def __init__(self) -> None:
        super().__init__()
        self.fingertip, self.target = (self.model.body(n).id for n in ("fingertip", "target"))

    def initial(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """A point within reach."""
        qpos = rng.uniform(-0.1, 0.1, self.model.nq) + self.start.qpos
        goal = rng.uniform(-0.2, 0.2, 2)
        while np.linalg.norm(goal) >= 0.2:
            goal = rng.uniform(-0.2, 0.2, 2)
        qpos[-2:] = goal
        qvel = self.start.qvel + rng.uniform(-0.005, 0.005, self.model.nv)
        qvel[-2:] = 0
        return qpos, qvel

    def observe(self, state: State) -> Array:
        """Angles, the point, velocities, and how far it is off."""
        angles = state.qpos[:, :2]
        off = state["xpos"][:, self.fingertip] - state["xpos"][:, self.target]
        parts = [np.cos(angles), np.sin(angles), state.qpos[:, 2:], state.qvel[:, :2], off[:, :2]]
        return np.hstack(parts)

    def reward(self, before: State, action: Array, after: State) -> Array:
        """How near it is, less the cost of control."""
        xpos = after["xpos"]
        return -_distance(xpos[:, self.fingertip], xpos[:, self.target]) - squares(action)


class InvertedPendulum(MujocoTask):
    """A pole on a cart."""

    xml = ASSETS / "inverted_pendulum.xml"
    frame_skip = 2

    def observe(self, state: State) -> Array:
        """Everything."""
        return np.hstack([state.qpos, state.qvel])

    def terminated(self, state: State) -> Array:
        """When it falls."""
        fallen: Array = np.abs(state.qpos[:, 1]) > 0.2
        return fallen

    def reward(self, before: State, action: Array, after: State) -> Array:
        """1 while it stands."""
        return (~self.terminated(after)).astype(float)


class InvertedDoublePendulum(NormalVelocities):
    """A pole on a pole on a cart."""

    xml = ASSETS / "inverted_double_pendulum.xml"
    fields = ("site_xpos", "qfrc_constraint")
    noise = 0.1

    def observe(self, state: State) -> Array:
        """The cart, the angles, velocities and the force at the cart's stop."""
        angles, force = state.qpos[:, 1:], state["qfrc_constraint"][:, :1]
        moving = [state.qvel.clip(-10, 10), force.clip(-10, 10)]
        return np.hstack([state.qpos[:, :1], np.sin(angles), np.cos(angles), *moving])

    def terminated(self, state: State) -> Array:
        """When the tip is low."""
        fallen: Array = state["site_xpos"][:, 0, 2] <= 1
        return fallen

    def reward(self, before: State, action: Array, after: State) -> Array:
        """10 while it stands, less what it is off, and its swing."""
        tip, swing = after["site_xpos"][:, 0], after.qvel[:, 1:3]
        off = 0.01 * tip[:, 0] ** 2 + (tip[:, 2] - 2) ** 2
        cost = 0.001 * swing[:, 0] ** 2 + 0.005 * swing[:, 1] ** 2
        reward: Array = 10.0 * ~self.terminated(after) - off - cost
        return reward


class Pusher(MujocoTask):
    """An arm that is to push a thing to a place."""

    xml = ASSETS / "pusher_v5.xml"
    max_steps = 100
    fields = ("xpos",)

    def __init__(self) -> None:
        super().__init__()
        self.parts = [self.model.body(name).id for name in ("tips_arm", "object", "goal")]

    def initial(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """The thing, not too near its goal."""
        place = np.zeros(2)
        while np.linalg.norm(place) <= 0.17:
            place = np.concatenate([rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)])
        qpos = self.start.qpos.copy()
        qpos[-4:-2], qpos[-2:] = place, 0
        qvel = self.start.qvel + rng.uniform(-0.005, 0.005, self.model.nv)
        qvel[-4:] = 0
        return qpos, qvel

    def observe(self, state: State) -> Array:
        """The arm; where tip, thing and goal are."""
        parts = [state["xpos"][:, part] for part in self.parts]
        return np.hstack([state.qpos[:, :7], state.qvel[:, :7], *parts])

    def reward(self, before: State, action: Array, after: State) -> Array:
        """How near the tip is to the thing and the thing to its goal, less the cost of control."""
        tip, thing, goal = (after["xpos"][:, part] for part in self.parts)
        near = 0.5 * _distance(thing, tip) + _distance(thing, goal)
        return -near - 0.1 * squares(action)


TASKS: dict[str, type[MujocoTask]] = {
    task.__name__: task
    for task in (
        *(HalfCheetah, Hopper, Walker2d, Swimmer, Ant, Humanoid, Reacher, InvertedPendulum),
        *(InvertedDoublePendulum, Pusher),
    )
}


def make_task(name: str, **options: Any) -> MujocoTask:
    """A task by gymnasium's name, with or without its `-v5`.

    Raises:
        ConfigurationError: If there is none of this name.
    """
    if (task := TASKS.get(name.removesuffix("-v5"))) is None:
        raise ConfigurationError(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    return task(**options)
