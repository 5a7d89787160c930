"""The MuJoCo tasks of gymnasium, version 5: the same numbers, for a whole population at once.

What is observed and rewarded is gymnasium's (gymnasium.farama.org/environments/mujoco); the bodies
are the files that it carries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from ..errors import ConfigurationError
from .episodes import Array
from .mujoco import MujocoTask, State

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


def _squares(x: Array) -> Array:
    """The sum of squares of each row."""
    total: Array = np.square(x).reshape(len(x), -1).sum(axis=1)
    return total


def _distance(x: Array, y: Array) -> Array:
    distance: Array = np.linalg.norm(x - y, axis=-1)
    return distance


class Runner(MujocoTask):
    """What is to run along x: forward speed, less what the motors cost.

    Attributes:
        speed_weight: Of the speed, in reward for each m/s.
        control_cost: Of the sum of the squared actions.
        healthy_reward: Of each step in which it has not fallen.
        terminate: Whether a fall ends the episode.
        hidden: Positions that the policy does not see: where it is.
    """

    speed_weight: float = 1.0
    control_cost: float = 1e-3
    healthy_reward: float = 0.0
    terminate: bool = True
    hidden: int = 1

    def observe(self, state: State) -> Array:
        """Positions, but for where it is, and velocities."""
        return np.hstack([state.qpos[:, self.hidden :], state.qvel])

    def speed(self, before: State, after: State) -> Array:
        """Along x, m/s."""
        speed: Array = (after.qpos[:, 0] - before.qpos[:, 0]) / self.dt
        return speed

    def healthy(self, state: State) -> Array:
        """Whether it has not fallen."""
        return np.ones(len(state.qpos), dtype=bool)

    def terminated(self, state: State) -> Array:
        """When it has fallen."""
        return ~self.healthy(state) & self.terminate

    def reward(self, before: State, action: Array, after: State) -> Array:
        """Speed and health, less the cost of control."""
        reward: Array = (
            self.speed_weight * self.speed(before, after)
            + self.healthy_reward * self.healthy(after)
            - self.control_cost * _squares(action)
        )
        return reward


class NormalVelocities(MujocoTask):
    """Uniform noise on the first positions, Gaussian noise on the velocities."""

    def initial(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """The noise."""
        qpos = self.start.qpos + rng.uniform(-self.noise, self.noise, self.model.nq)
        qvel = self.start.qvel + self.noise * rng.standard_normal(self.model.nv)
        return qpos, qvel


class Legs(Runner):
    """Legs in the plane that stand and can fall; velocities are clipped."""

    frame_skip = 4
    healthy_reward = 1.0
    noise = 5e-3

    def observe(self, state: State) -> Array:
        """Positions, but for where it is, and velocities."""
        return np.hstack([state.qpos[:, 1:], state.qvel.clip(-10, 10)])


class HalfCheetah(NormalVelocities, Runner):
    """Half a cheetah, in the plane."""

    xml = ASSETS / "half_cheetah.xml"
    control_cost = 0.1
    noise = 0.1


class Hopper(Legs):
    """One leg, in the plane."""

    xml = ASSETS / "hopper.xml"

    def healthy(self, state: State) -> Array:
        """High and upright, and nothing out of bounds."""
        z, angle = state.qpos[:, 1], state.qpos[:, 2]
        rest = np.hstack([state.qpos[:, 2:], state.qvel])
        healthy: Array = (z > 0.7) & (np.abs(angle) < 0.2) & (np.abs(rest) < 100).all(axis=1)
        return healthy


class Walker2d(Legs):
    """Two legs, in the plane."""

    xml = ASSETS / "walker2d_v5.xml"

    def healthy(self, state: State) -> Array:
        """High and upright."""
        z, angle = state.qpos[:, 1], state.qpos[:, 2]
        healthy: Array = (z > 0.8) & (z < 2.0) & (np.abs(angle) < 1.0)
        return healthy


class Swimmer(Runner):
    """Three links in a fluid."""

    xml = ASSETS / "swimmer.xml"
    frame_skip = 4
    control_cost = 1e-4
    noise = 0.1
    hidden = 2


class Ant(NormalVelocities, Runner):
    """Four legs, in space; it feels its contacts.

    Args:
        contacts: Whether contact forces are observed.
    """

    xml = ASSETS / "ant.xml"
    fields = ("xpos", "cfrc_ext")
    control_cost = 0.5
    contact_cost = 5e-4
    healthy_reward = 1.0
    noise = 0.1
    hidden = 2

    def __init__(self, contacts: bool = True) -> None:
        super().__init__()
        self.contacts = contacts

    def observe(self, state: State) -> Array:
        """And the contact forces, clipped."""
        seen = super().observe(state)
        if not self.contacts:
            return seen
        return np.hstack([seen, self._forces(state)[:, 1:].reshape(len(seen), -1)])

    def speed(self, before: State, after: State) -> Array:
        """Of the torso."""
        speed: Array = (after["xpos"][:, 1, 0] - before["xpos"][:, 1, 0]) / self.dt
        return speed

    def healthy(self, state: State) -> Array:
        """Neither fallen nor in the air."""
        z = state.qpos[:, 2]
        finite = np.isfinite(state.qpos).all(axis=1) & np.isfinite(state.qvel).all(axis=1)
        healthy: Array = finite & (z >= 0.2) & (z <= 1.0)
        return healthy

    def reward(self, before: State, action: Array, after: State) -> Array:
        """Less the cost of contacts."""
        cost = self.contact_cost * _squares(self._forces(after))
        return super().reward(before, action, after) - cost

    def _forces(self, state: State) -> Array:
        return state["cfrc_ext"].clip(-1, 1)


class Humanoid(Runner):
    """A body of thirteen parts.

    Args:
        whole: Observe inertias, velocities and forces of every part too, as gymnasium does (348
            numbers); without, positions and velocities (45).
    """

    xml = ASSETS / "humanoid.xml"
    fields: tuple[str, ...] = ("xipos", "cfrc_ext", "cinert", "cvel", "qfrc_actuator")
    speed_weight = 1.25
    control_cost = 0.1
    contact_cost = 5e-7
    healthy_reward = 5.0
    noise = 0.01
    hidden = 2

    def __init__(self, whole: bool = True) -> None:
        if not whole:
            self.fields = ("xipos", "cfrc_ext")
        super().__init__()
        self.whole = whole

    def observe(self, state: State) -> Array:
        """And what every part weighs, does and feels."""
        seen = super().observe(state)
        if not self.whole:
            return seen
        parts = [state[name][:, 1:].reshape(len(seen), -1) for name in ("cinert", "cvel")]
        forces = state["cfrc_ext"][:, 1:].reshape(len(seen), -1)
        return np.hstack([seen, *parts, state["qfrc_actuator"][:, 6:], forces])

    def speed(self, before: State, after: State) -> Array:
        """Of the centre of mass."""
        mass = self.model.body_mass
        distance = (after["xipos"][:, :, 0] - before["xipos"][:, :, 0]) @ mass
        speed: Array = distance / mass.sum() / self.dt
        return speed

    def healthy(self, state: State) -> Array:
        """On its feet."""
        healthy: Array = (state.qpos[:, 2] > 1.0) & (state.qpos[:, 2] < 2.0)
        return healthy

    def reward(self, before: State, action: Array, after: State) -> Array:
        """Less the cost of contacts."""
        cost = np.minimum(self.contact_cost * _squares(after["cfrc_ext"]), 10.0)
        return super().reward(before, action, after) - cost


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
        return -_distance(xpos[:, self.fingertip], xpos[:, self.target]) - _squares(action)


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
        return -near - 0.1 * _squares(action)


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
