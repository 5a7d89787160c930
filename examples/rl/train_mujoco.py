"""A body learns to move: one of gymnasium's MuJoCo tasks, or one of your own, in minutes.

    python examples/rl/train_mujoco.py --task HalfCheetah --minutes 15
    python examples/rl/train_mujoco.py --task examples/animals_3d/scenes.py:Dog --minutes 15

Writes the policy, its learning curve, a strip of pictures and an animation.
"""

from __future__ import annotations

import os

os.environ.setdefault("MUJOCO_GL", "egl")  # pictures without a display; before mujoco is imported

import runpy
from dataclasses import replace

import imageio.v3 as imageio
import numpy as np
from training import Settings, parser, save, seeded, train

from eggroll_trainer import top_directions
from eggroll_trainer.integrations.mujoco import MujocoReturn, MujocoTask
from eggroll_trainer.integrations.mujoco_tasks import TASKS, make_task
from eggroll_trainer.integrations.video import film
from eggroll_trainer.policies import Policy

SETTINGS = {
    "HalfCheetah": Settings(),
    "Swimmer": Settings(sigma=0.1, hidden=()),
    "Hopper": Settings(population_size=128, hidden=()),
    "Walker2d": Settings(population_size=128, hidden=(), shaping="centered_rank"),
    "Ant": Settings(population_size=128, sigma=0.03, hidden=()),
    "Humanoid": Settings(population_size=128, sigma=0.02, hidden=(), shaping="centered_rank"),
    "Reacher": Settings(population_size=128, episodes=4),
    "InvertedPendulum": Settings(sigma=0.3, hidden=()),
    "InvertedDoublePendulum": Settings(population_size=128, sigma=0.2, episodes=2),
    "Pusher": Settings(population_size=128, episodes=2, shaping=top_directions(0.5)),
}
# What training leaves out of the reward: a bonus for staying alive teaches to stand still first.
# What is reported is always gymnasium's reward.
NO_BONUS = ("Hopper",)


def load_task(name: str) -> MujocoTask:
    """A task that is shipped, by name; or `FILE.py:CLASS`."""
    file, _, wanted = name.rpartition(":")
    return runpy.run_path(file)[wanted]() if file else make_task(name)


def tasks(name: str) -> tuple[MujocoTask, MujocoTask]:
    """The task as it is trained, and as it is."""
    trained, real = load_task(name), load_task(name)
    if name in NO_BONUS:
        trained.healthy_reward = 0.0
    return trained, real


def main() -> None:
    options = parser(__doc__, minutes=15, out="mujoco")
    options.add_argument(
        "--task", default="HalfCheetah", help=f"{', '.join(TASKS)}, or FILE.py:CLASS"
    )
    options.add_argument("--population", type=int, help="members, if others than the table's")
    args = options.parse_args()
    settings = SETTINGS.get(args.task, Settings(population_size=128))
    if args.population:
        settings = replace(settings, population_size=args.population)
    trained, real = tasks(args.task)
    sizes = real.observation_size, real.action_size
    low, high = real.action_range
    policy = seeded(
        args.seed, lambda: Policy(*sizes, settings.hidden, low=low, high=high, squash=False)
    )
    fitness = MujocoReturn(trained, episodes=settings.episodes)
    judge = MujocoReturn(real)
    clock = train(policy, fitness, settings, 60 * args.minutes, args.seed, judge)
    returns = judge.evaluate(policy, 20).returns
    title = args.task.rpartition(":")[2]
    save(args.out, policy, clock, returns, title, seed=args.seed, settings=str(settings))
    pictures = film(real, policy, steps=400, every=2)
    imageio.imwrite(args.out / "film.gif", pictures[:, ::2, ::2], loop=0, duration=40)
    some = np.linspace(0, len(pictures) - 1, 6).astype(int)
    imageio.imwrite(args.out / "strip.png", np.hstack(pictures[some]))


if __name__ == "__main__":
    main()
