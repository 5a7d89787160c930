"""Three animals of our own: a dog on hills, a beetle of six legs, a fish in water."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eggroll_trainer.integrations.mujoco import MujocoTask, State

SCENES = Path(__file__).parent / "scenes"
Array = np.ndarray[Any, Any]


def upright(state: State) -> Array:
    """The height of the body's own up, 1 where it stands straight and −1 on its back; `(n,)`."""
    _, x, y, _ = state.qpos[:, 3:7].T  # the root's quaternion
    return 1 - 2 * (x**2 + y**2)


def ahead(state: State) -> Array:
    """The forward part of the body's own forward, 1 where it faces along x; `(n,)`."""
    _, _, y, z = state.qpos[:, 3:7].T
    return 1 - 2 * (y**2 + z**2)


class Animal(MujocoTask):
    """Runs along x: speed, less what its motors ask and less what it drifts to the side."""

    control_cost: float = 0.01
    top_speed: float = 2.0  # m/s: no reward for more, so that it does not leap

    def observe(self, state: State) -> Array:
        """Everything but the place."""
        return np.hstack([state.qpos[:, 2:], state.qvel])

    def reward(self, before: State, action: Array, after: State) -> Array:
        """Metres forward in a second, held straight."""
        speed = (after.qpos[:, :2] - before.qpos[:, :2]) / self.dt
        forward = np.minimum(speed[:, 0], self.top_speed) - 0.3 * np.abs(speed[:, 1])
        return (
            forward + 0.5 * (ahead(after) - 1) - self.control_cost * np.square(action).sum(axis=1)
        )

    def terminated(self, state: State) -> Array:
        """When it has rolled over."""
        return upright(state) < 0.3


class Dog(Animal):
    """Eight motors, on hills that are the same for all."""

    xml = SCENES / "dog.xml"
    frame_skip = 4
    noise = 0.02

    def __init__(self) -> None:
        super().__init__()
        rows, columns = self.model.hfield_nrow[0], self.model.hfield_ncol[0]
        y, x = np.mgrid[0:rows, 0:columns].astype(float)
        waves = np.random.default_rng(0).uniform(-0.9, 0.9, (12, 3))
        hills = sum(np.sin(a * x + b * y + 7 * c) for a, b, c in waves)
        start = np.clip((x - 38) / 12, 0, 1)  # flat where it begins
        hills = (hills - hills.min()) / np.ptp(hills) * start
        self.model.hfield_data[:] = hills.ravel()


class Hexapod(Animal):
    """Twelve motors."""

    xml = SCENES / "hexapod.xml"
    frame_skip = 4
    top_speed = 1.0


class Fish(Animal):
    """Five motors; it does not fall, and nothing holds it on its course but itself."""

    xml = SCENES / "fish.xml"
    frame_skip = 4
    control_cost = 0.002

    def terminated(self, state: State) -> Array:
        """Never."""
        return np.zeros(len(state.qpos), dtype=bool)


ANIMALS: dict[str, type[MujocoTask]] = {task.__name__: task for task in (Dog, Hexapod, Fish)}
