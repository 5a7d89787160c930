"""Many simulations of one MuJoCo model, stepped by one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch

from .episodes import Array

FORCES = {"cacc", "cfrc_int", "cfrc_ext"}  # what MuJoCo computes only when it is asked to


@dataclass
class State:
    """The worlds at one moment, a row each.

    Attributes:
        time: Seconds since the episode began, `(n,)`.
        qpos: Positions, `(n, nq)`.
        qvel: Velocities, `(n, nv)`.
        fields: The arrays of `MjData` that the task asked for: name → `(n, …)`. As in MuJoCo
            itself, those that follow from the positions are one physics step behind.
    """

    time: Array
    qpos: Array
    qvel: Array
    fields: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    def some(self, rows: Array) -> State:
        """Some of the worlds, copied."""
        fields = {name: array[rows] for name, array in self.fields.items()}
        return State(self.time[rows], self.qpos[rows], self.qvel[rows], fields)

    def write(self, rows: Array, new: State) -> None:
        """Put others in the place of some of the worlds."""
        self.time[rows], self.qpos[rows], self.qvel[rows] = new.time, new.qpos, new.qvel
        for name, array in self.fields.items():
            array[rows] = new.fields[name]


class Simulations(ABC):
    """As many simulations as are wanted, each as if it were alone in an `MjData` of its own.

    So one carries everything from step to step that MuJoCo does, the solver's warm start too.
    (`mujoco.rollout` starts its solver afresh with each call.) Steps are taken outside Python's
    lock, so several of these step at once in threads.

    Args:
        model: The `MjModel`.
        fields: Names of further arrays of `MjData` to read.
    """

    def __init__(self, model: Any, fields: Sequence[str]) -> None:
        self.model, self.fields = model, fields

    @abstractmethod
    def begin(self, qpos: Array, qvel: Array) -> None:
        """Begin anew from positions `(n, nq)` and velocities `(n, nv)`."""

    @abstractmethod
    def step(self, which: Array, ctrl: Array, substeps: int) -> None:
        """Step some of them, `(n,)`, with controls `(n, nu)`."""

    @abstractmethod
    def read(self, which: Array) -> State:
        """Some of them, copied."""


def make_simulations(model: Any, fields: Sequence[str]) -> Simulations:
    """The faster kind that has these fields."""
    return WithForces(model, fields) if FORCES & set(fields) else Together(model, fields)


class Together(Simulations):
    """By MuJoCo's own `Batch`: a call takes a step of all of them."""

    def begin(self, qpos: Array, qvel: Array) -> None:
        """Begin anew, with the model as it is now: a `Batch` has a copy of it."""
        self.batch = batch = Batch(self.model, len(qpos), nthread=1)
        self.views = {name: batch.bind(name) for name in ("qpos", "qvel", *self.fields)}
        self.time, self.ctrl = batch.bind("time"), batch.bind("ctrl")
        self.views["qpos"][:], self.views["qvel"][:] = qpos, qvel
        batch.forward()

    def step(self, which: Array, ctrl: Array, substeps: int) -> None:
        """Step some of them."""
        self.ctrl[which] = ctrl
        self.batch.step(which.astype(np.int32), substeps)

    def read(self, which: Array) -> State:
        """Some of them."""
        fields = {name: view[which] for name, view in self.views.items()}
        return State(self.time[which], fields.pop("qpos"), fields.pop("qvel"), fields)


class WithForces(Simulations):
    """One after another, each with an `MjData`, from which `Batch` has no contact forces."""

    def __init__(self, model: Any, fields: Sequence[str]) -> None:
        super().__init__(model, fields)
        self.data: list[Any] = []
        self.ctrl: list[Array] = []
        # What is read of each, as views: a call of MuJoCo for each would cost more.
        self.views: dict[str, list[Array]] = {name: [] for name in ("qpos", "qvel", *fields)}

    def begin(self, qpos: Array, qvel: Array) -> None:
        """Begin anew."""
        for _ in range(len(self.data), len(qpos)):
            data = mujoco.MjData(self.model)
            self.data.append(data)
            self.ctrl.append(data.ctrl)
            for name, views in self.views.items():
                views.append(getattr(data, name))
        for data, position, velocity in zip(self.data, qpos, qvel, strict=False):
            mujoco.mj_resetData(self.model, data)
            data.qpos[:], data.qvel[:] = position, velocity
            mujoco.mj_forward(self.model, data)

    def step(self, which: Array, ctrl: Array, substeps: int) -> None:
        """Step some of them."""
        model, step, forces = self.model, mujoco.mj_step, mujoco.mj_rnePostConstraint
        for i, row in zip(which.tolist(), ctrl, strict=True):
            data = self.data[i]
            self.ctrl[i][:] = row
            step(model, data, substeps)
            forces(model, data)

    def read(self, which: Array) -> State:
        """Some of them."""
        some = which.tolist()
        fields = {
            name: np.concatenate([views[i] for i in some]).reshape(len(some), *views[0].shape)
            for name, views in self.views.items()
        }
        time = np.array([self.data[i].time for i in some])
        return State(time, fields.pop("qpos"), fields.pop("qvel"), fields)
