"""Those of gymnasium's MuJoCo tasks that are to run: see `mujoco_tasks`."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np

from .episodes import Array
from .mujoco import MujocoTask, State

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


def squares(x: Array) -> Array:
    """The sum of squares of each row."""
    total: Array = np.square(x).reshape(len(x), -1).sum(axis=1)
    return total


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
            - self.control_cost * squares(action)
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
        cost = self.contact_cost * squares(self._forces(after))
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
        cost = np.minimum(self.contact_cost * squares(after["cfrc_ext"]), 10.0)
        return super().reward(before, action, after) - cost
