"""A body learns to move: one of gymnasium's MuJoCo tasks, or one of your own, in minutes.

    python examples/rl/train_mujoco.py --task HalfCheetah --minutes 15
    python examples/rl/train_mujoco.py --task examples/animals_3d/scenes.py:Dog --minutes 15
    python examples/rl/train_mujoco.py --task HalfCheetah --policy results/mujoco/policy.pt

Writes the policy, its learning curve, a strip of pictures and an animation.
"""

from __future__ import annotations

import ctypes.util
import os

if ctypes.util.find_library("EGL"):  # pictures without a display; before mujoco is imported
    os.environ.setdefault("MUJOCO_GL", "egl")

import functools
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import mujoco
import numpy as np
from training import Clock, Settings, parser, save, seeded, train

from eggroll_trainer import ConfigurationError, top_directions
from eggroll_trainer.integrations.mujoco import MujocoReturn, MujocoTask
from eggroll_trainer.integrations.mujoco_tasks import TASKS, make_task
from eggroll_trainer.integrations.video import film
from eggroll_trainer.policies import Policy

EULER = int(mujoco.mjtIntegrator.mjINT_EULER)
CHEAP = {"model.opt.integrator": EULER, "model.opt.timestep": 0.005, "frame_skip": 3}
SETTINGS = {
    "HalfCheetah": Settings(population_size=128, learning_rate=0.6),
    "Swimmer": Settings(sigma=0.1, hidden=()),
    "Hopper": Settings(
        population_size=128, hidden=(), steps=(200, 1000), shaped={"healthy_reward": 0.0}
    ),
    "Walker2d": Settings(
        population_size=128, hidden=(), steps=(200, 1000), shaped={"healthy_reward": 0.0}
    ),
    # Its contact forces are three quarters of what it observes, and nothing that it needs. A bonus
    # teaches it to stand still, and an end without one to fall: so neither in training.
    "Ant": Settings(
        population_size=128,
        hidden=(),
        shaping="centered_rank",
        steps=(100, 500),
        arguments={"contacts": False},
        shaped={"healthy_reward": 0.0, "terminate": False, "control_cost": 0.1},
    ),
    # Each of its five physics steps evaluates the dynamics four times (RK4), Euler's once.
    "Humanoid": Settings(
        population_size=512,
        learning_rate=1.0,
        hidden=(),
        shaping="centered_rank",
        common_seeds=False,
        arguments={"whole": False},
        shaped=CHEAP,
    ),
    "Reacher": Settings(population_size=128, episodes=4),
    "InvertedPendulum": Settings(sigma=0.3, hidden=()),
    "InvertedDoublePendulum": Settings(
        population_size=128, sigma=0.03, hidden=(), common_seeds=False
    ),
    "Pusher": Settings(population_size=128, episodes=2, shaping=top_directions(0.5)),
    "Dog": Settings(sigma=0.1, hidden=(), steps=(100, 300)),
    "Hexapod": Settings(sigma=0.1, hidden=(), steps=(100, 300)),
    "Fish": Settings(sigma=0.1, hidden=(), steps=(100, 300)),
}


def load_task(name: str, **arguments: Any) -> MujocoTask:
    """A task that is shipped, by name; or `FILE.py:CLASS`."""
    file, _, wanted = name.rpartition(":")
    make = runpy.run_path(file)[wanted] if file else functools.partial(make_task, name)
    task: MujocoTask = make(**arguments)
    return task


def change(task: MujocoTask, attributes: Mapping[str, float]) -> None:
    """Set attributes of a task, or of what it has, such as `model.opt.timestep`."""
    for path, value in attributes.items():
        *parts, attribute = path.split(".")
        owner = functools.reduce(getattr, parts, task)
        getattr(owner, attribute)  # one that is not there would change nothing
        setattr(owner, attribute, value)


def run(
    name: str, settings: Settings, seconds: float, seed: int
) -> tuple[Policy, MujocoTask, Clock, np.ndarray]:
    """Train a policy; returns it, the task as it is, the clock, and 20 returns of the policy."""
    trained, real = (load_task(name, **settings.arguments) for _ in range(2))
    change(trained, settings.shaped)
    sizes = real.observation_size, real.action_size
    low, high = real.action_range
    policy = seeded(seed, lambda: Policy(*sizes, settings.hidden, low=low, high=high, squash=False))
    fitness = MujocoReturn(trained, settings.episodes, common_seeds=settings.common_seeds)
    judge = MujocoReturn(real)
    clock = train(policy, fitness, settings, seconds, seed, judge)
    returns = judge.evaluate(policy, 20).returns
    fitness.close()
    judge.close()
    return policy, real, clock, returns


def take_pictures(task: MujocoTask, policy: Policy, folder: Path) -> None:
    """A film of five seconds of an episode, and a second from its middle in six pictures."""
    every = max(1, round(0.05 / task.dt))  # 20 pictures a second, or what there is
    pictures = film(task, policy, steps=round(5 / task.dt), every=every)
    shown = {"loop": 0, "duration": round(1000 * every * task.dt), "quality": 40}
    imageio.imwrite(folder / "film.webp", pictures[:, ::2, ::2], **shown)
    moment = pictures[len(pictures) // 2 :][:18:3]
    imageio.imwrite(folder / "strip.png", np.hstack(moment))
    print(f"pictures of it: {folder / 'film.webp'}, {folder / 'strip.png'}")


def main() -> None:
    options = parser(__doc__, minutes=15, out="mujoco")
    options.add_argument(
        "--task", default="HalfCheetah", help=f"{', '.join(TASKS)}, or FILE.py:CLASS"
    )
    options.add_argument("--population", type=int, help="members, if others than the table's")
    options.add_argument("--no-pictures", action="store_true", help="neither strip nor film")
    options.add_argument("--policy", type=Path, help="train nothing: take pictures of this one")
    args = options.parse_args()
    title = args.task.rpartition(":")[2]
    settings = SETTINGS.get(title, Settings(population_size=128))
    if args.population:
        settings = replace(settings, population_size=args.population)
    if args.policy:
        policy, real = Policy.load(args.policy), load_task(args.task, **settings.arguments)
        args.out.mkdir(parents=True, exist_ok=True)
    else:
        policy, real, clock, returns = run(args.task, settings, 60 * args.minutes, args.seed)
        save(args.out, policy, clock, returns, title, seed=args.seed, settings=str(settings))
    if args.no_pictures:
        return
    try:
        take_pictures(real, policy, args.out)
    except ConfigurationError as error:  # the policy is saved: it can be filmed elsewhere
        print(f"no pictures: {error}")


if __name__ == "__main__":
    main()
