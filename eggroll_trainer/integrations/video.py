"""Pictures of a policy in a MuJoCo task; they need no display."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import torch

from ..errors import ConfigurationError
from .episodes import Alone, Array, Play
from .mujoco import MujocoTask, MujocoWorlds


def film(
    task: MujocoTask,
    policy: torch.nn.Module,
    seed: int = 0,
    steps: int = 300,
    every: int = 2,
    size: tuple[int, int] = (480, 320),
    camera: str | int | None = None,
    distance: float | None = None,
) -> Array:
    """Play an episode and take pictures of it.

    Args:
        task: The task.
        policy: As for `MujocoReturn`.
        seed: Of the episode.
        steps: Steps of the policy, at most.
        every: A picture after so many steps; the first is that of the beginning.
        size: Of a picture, width and height in pixels.
        camera: A camera of the model's; None follows the first body from the side, or from above
            where it lies flat.
        distance: Of that one, in metres; None is twice the span of the body.

    Returns:
        `(pictures, height, width, 3)`, 8 bits.

    Raises:
        ConfigurationError: If there is no way to draw here.
    """
    renderer = _renderer(task, size)
    worlds = MujocoWorlds(task)
    try:
        with torch.no_grad():
            play = Play(Alone(policy), worlds, np.array([[seed]]))
            data = mujoco.MjData(task.model)
            _pose(task.model, data, worlds)
            view = _following(task.model, data, distance) if camera is None else camera
            pictures = []
            for step in range(steps):
                if step % every == 0:
                    _pose(task.model, data, worlds)
                    renderer.update_scene(data, view)
                    pictures.append(renderer.render().copy())
                play.run(1)
                if not play.alive.any():
                    break
    finally:
        worlds.close()
        renderer.close()
    return np.stack(pictures)


def _pose(model: Any, data: Any, worlds: MujocoWorlds) -> None:
    """Bring what is drawn to where the first world is."""
    data.qpos[:], data.qvel[:] = worlds.state.qpos[0], worlds.state.qvel[0]
    mujoco.mj_forward(model, data)


def _following(model: Any, data: Any, distance: float | None) -> Any:
    """A camera at the side of the first body, which moves with it."""
    its_own = model.body_rootid[model.geom_bodyid] == model.body_rootid[1]
    reach, places = model.geom_rbound[its_own, None], data.geom_xpos[its_own]
    span = np.linalg.norm((places + reach).max(axis=0) - (places - reach).min(axis=0))
    extent = np.ptp(places, axis=0)
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
    camera.trackbodyid = 1
    camera.distance = distance or 2 * float(span)
    camera.azimuth, camera.elevation = 90, -60 if extent[2] < 0.1 * extent.max() else -15
    return camera


def _renderer(task: MujocoTask, size: tuple[int, int]) -> Any:
    make: Callable[..., Any] = mujoco.Renderer
    try:
        return make(task.model, height=size[1], width=size[0])
    except Exception as error:
        raise ConfigurationError(
            f"MuJoCo cannot draw here ({type(error).__name__}: {error}). On a machine without a "
            "display, set the environment variable MUJOCO_GL=egl (or osmesa, in software) before "
            "mujoco is imported, and install that library"
        ) from error
