"""Control steps per second: policies and physics together, against physics alone."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections.abc import Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from mujoco.rollout import Rollout
from timing import hardware, medians, table
from torch import nn

from eggroll_trainer import EGGROLLTrainer
from eggroll_trainer.integrations.gymnasium import EpisodeReturn
from eggroll_trainer.integrations.mujoco import MujocoReturn, MujocoTask
from eggroll_trainer.integrations.mujoco_runners import HalfCheetah
from eggroll_trainer.integrations.mujoco_tasks import make_task
from eggroll_trainer.policies import Policy

STEPS = 200
TASKS: dict[str, dict[str, Any]] = {
    "HalfCheetah": {},
    "Ant": {"contacts": False},
    "Humanoid": {"whole": False},
}
POLICIES: dict[str, tuple[int, ...]] = {"linear": (), "64·64": (64, 64)}


def bare(task: MujocoTask, members: int, actions: np.ndarray, threads: int) -> Any:
    """The same worlds and actions by `mujoco.rollout`, a call for each control step."""
    model, skip = task.model, task.frame_skip
    spec = mujoco.mjtState.mjSTATE_FULLPHYSICS
    first = mujoco.MjData(model)
    first.qpos[:], first.qvel[:] = task.initial(np.random.default_rng(0))
    mujoco.mj_forward(model, first)
    row = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, first, row, spec)
    start = np.tile(row, (members, 1))
    rollout, data = Rollout(nthread=threads), [mujoco.MjData(model) for _ in range(threads)]

    def run() -> None:
        states = start
        for some in actions:
            control = np.repeat(some[:, None], skip, axis=1)
            states = rollout.rollout(model, data, states, control)[0][:, -1]

    return run


def mujoco_row(name: str, members: int, threads: int, seconds: float) -> list[str]:
    """One row of the table."""
    task = make_task(name, **TASKS[name])
    task.max_steps = STEPS
    if not isinstance(task, HalfCheetah):
        task.terminate = False  # all worlds, all along
    contestants: dict[str, Any] = {}
    fitnesses = []
    for title, hidden in POLICIES.items():
        torch.manual_seed(0)
        policy = Policy(task.observation_size, task.action_size, hidden)
        nn.init.normal_(policy.head.weight, std=0.5)
        fitness = MujocoReturn(task, threads=threads)
        fitnesses.append(fitness)
        trainer = EGGROLLTrainer(policy.parameters(), policy, fitness, members, sigma=0.1, seed=0)
        population = trainer.ask()
        contestants[title] = functools.partial(fitness, population)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.4, 0.4, (STEPS, members, task.action_size))
    contestants["bare"] = bare(task, members, actions, threads)
    times = medians(contestants, seconds)
    for fitness in fitnesses:
        fitness.close()
    rates = {title: STEPS * members / time for title, time in times.items()}
    shares = [f"{rates[title]:,.0f} ({rates[title] / rates['bare']:.0%})" for title in POLICIES]
    return [name, f"{members:,}", f"{rates['bare']:,.0f}", *shares]


def mujoco_report(tasks: Sequence[str], sizes: Sequence[int], threads: int, seconds: float) -> str:
    rows = [mujoco_row(name, members, threads, seconds) for name in tasks for members in sizes]
    title = (
        f"Control steps per second, {threads} threads: `mujoco.rollout` alone, with random "
        "actions; and policies, observations, rewards and endings in the loop (share of it). "
        "Asked: 80 % at 256 members.\n\n"
    )
    return title + table(["task", "members", "rollout alone", *POLICIES], rows)


def gymnasium_row(name: str, envs: int, workers: int, seconds: float) -> list[str]:
    """`EpisodeReturn` against processes that step environments and do nothing else."""
    policy = make_policy(f"{name}-v5")
    fitness = EpisodeReturn(f"{name}-v5", num_envs=envs, workers=workers, max_steps=STEPS)
    trainer = EGGROLLTrainer(policy.parameters(), policy, fitness, envs, sigma=1e-3, seed=0)
    population = trainer.ask()
    processes = [Stepping(f"{name}-v5", envs // workers) for _ in range(workers)]

    def alone() -> None:
        for process in processes:
            process.begin()
        for process in processes:
            process.wait()

    times = medians({"alone": alone, "ours": functools.partial(fitness, population)}, seconds)
    for process in processes:
        process.close()
    fitness.close()
    alone_rate, rate = (STEPS * envs / times[title] for title in ("alone", "ours"))
    return [name, f"{envs}", f"{alone_rate:,.0f}", f"{rate:,.0f} ({rate / alone_rate:.0%})"]


def gymnasium_report(workers: int, seconds: float) -> str:
    names, sizes = ("HalfCheetah", "Ant"), (64, 256)
    rows = [gymnasium_row(name, envs, workers, seconds) for name in names for envs in sizes]
    title = (
        f"Control steps per second through gymnasium, {workers} processes: `SyncVectorEnv` alone, "
        "and `EpisodeReturn`, as many members as environments. Asked: 80 %.\n\n"
    )
    return title + table(["task", "environments", "SyncVectorEnv alone", "EpisodeReturn"], rows)


def make_policy(env_id: str) -> Policy:
    env = gymnasium.make(env_id)
    sizes = env.observation_space.shape[0], env.action_space.shape[0]
    env.close()
    torch.manual_seed(0)
    return Policy(*sizes, hidden=())


class Stepping:
    """A process that steps a `SyncVectorEnv` when it is told to, with actions of 0.

    Those of the policies that it is compared with are near 0 too.
    """

    def __init__(self, env_id: str, count: int) -> None:
        self.here, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(
            target=_step_when_told, args=(there, env_id, count), daemon=True
        )
        self.process.start()

    def begin(self) -> None:
        """Start stepping."""
        self.here.send(STEPS)

    def wait(self) -> None:
        """Until it is done."""
        self.here.recv()

    def close(self) -> None:
        """End the process."""
        self.here.send(0)
        self.process.join()


def _step_when_told(pipe: Any, env_id: str, count: int) -> None:
    env = gymnasium.make_vec(env_id, num_envs=count, vectorization_mode="sync")
    actions = np.zeros(env.action_space.shape, dtype=np.float32)
    while steps := pipe.recv():
        env.reset(seed=0)
        for _ in range(steps):
            env.step(actions)
        pipe.send(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contestant")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--members", nargs="+", type=int, default=[64, 256, 1024])
    args = parser.parse_args()
    print(f"On {hardware()}, MuJoCo {mujoco.__version__}.\n")
    print(gymnasium_report(args.threads, args.seconds), "\n")  # forks: before memory is taken
    print(mujoco_report(args.tasks, args.members, args.threads, args.seconds))


if __name__ == "__main__":
    main()
