"""EGGROLL beside ARS and PPO of Stable-Baselines3, at equal wall-clock, on three MuJoCo tasks.

    pip install "eggroll-trainer[peers]"
    python benchmarks/rl_peers.py

EGGROLL's runs are those of `rl_runs.py`, made now where they are missing; the peers are given as
many minutes. ARS and PPO are sb3-contrib's and Stable-Baselines3's, with the settings that RL
Baselines3 Zoo recommends for each task; EGGROLL's settings were searched for at a budget of
minutes, which theirs were not. Resumable: a run whose numbers are there is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import rl_runs
import torch
from matplotlib.figure import Figure
from sb3_contrib import ARS
from sb3_contrib.common.vec_env import AsyncEval
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize
from timing import hardware, table

IMAGES = Path(__file__).parent.parent / "docs" / "images"
TASKS = ("Swimmer", "Hopper", "HalfCheetah")
COLOURS = {"EGGROLL": "#d1495b", "ARS": "#00798c", "PPO": "#777777"}
CORES = 2  # the processes of the peers
FOREVER = 10**9  # control steps: the clock ends a run
POINTS = 15  # of a curve
# The settings of RL Baselines3 Zoo for version 3 of these tasks (hyperparams/ars.yml, ppo.yml).
ARS_SETTINGS: dict[str, dict[str, Any]] = {
    "HalfCheetah": {"n_delta": 32, "n_top": 4, "learning_rate": 0.02, "delta_std": 0.03},
    "Swimmer": {
        "n_delta": 1,
        "n_top": 1,
        "learning_rate": 0.02,
        "delta_std": 0.01,
        "norm_obs": False,
    },
    "Hopper": {
        "n_delta": 8,
        "n_top": 4,
        "learning_rate": 0.01,
        "delta_std": 0.025,
        "alive_bonus_offset": -1,
    },
}
WIDE = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": torch.nn.ReLU,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
PPO_SETTINGS: dict[str, dict[str, Any]] = {
    "HalfCheetah": {
        "batch_size": 64,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-5,
        "ent_coef": 4.01762e-4,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": WIDE,
    },
    "Swimmer": {"gamma": 0.9999},
    "Hopper": {
        "batch_size": 32,
        "n_steps": 512,
        "gamma": 0.999,
        "learning_rate": 9.80828e-5,
        "ent_coef": 2.29519e-3,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
        "policy_kwargs": WIDE,
    },
}


class TimeIsUp(Exception):
    """Ends a peer's run: ARS does not ask its callbacks whether to go on."""


class Clock(BaseCallback):
    """Ends a run after so many seconds; evaluates the policy on the way, off the clock.

    It looks between updates, where the policy is the one learnt and not a candidate of ARS.
    """

    def __init__(self, task: str, seconds: float) -> None:
        super().__init__()
        self.task, self.seconds = task, seconds
        self.begun, self.paused = time.perf_counter(), 0.0
        self.curve: list[dict[str, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        spent = time.perf_counter() - self.begun - self.paused
        if spent * POINTS >= self.seconds * (len(self.curve) + 1):
            now = time.perf_counter()
            mean = float(returns(self.model, self.task, 5).mean())
            self.curve.append({"seconds": spent, "steps": self.num_timesteps, "return": mean})
            self.paused += time.perf_counter() - now
        if spent >= self.seconds:
            raise TimeIsUp


def learn_ars(task: str, seed: int, clock: Clock) -> Any:
    """Candidates in turn, in a process for each core."""
    settings = dict(ARS_SETTINGS[task])
    seen = settings.pop("norm_obs", True)

    def make_env() -> VecEnv:
        world = DummyVecEnv([lambda: gymnasium.make(f"{task}-v5")])
        return VecNormalize(world, norm_reward=False) if seen else world

    model = ARS("LinearPolicy", make_env(), seed=seed, device="cpu", **settings)
    workers = AsyncEval([make_env] * CORES, model.policy)
    workers.seed(seed)
    try:
        with contextlib.suppress(TimeIsUp):
            model.learn(FOREVER, callback=clock, async_eval=workers)
    finally:
        workers.close()
    return model


def learn_ppo(task: str, seed: int, clock: Clock) -> Any:
    """An environment in a process for each core."""
    env = VecNormalize(SubprocVecEnv([lambda: gymnasium.make(f"{task}-v5")] * CORES))
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", **PPO_SETTINGS[task])
    with contextlib.suppress(TimeIsUp):
        model.learn(FOREVER, callback=clock)
    return model


def returns(model: Any, task: str, episodes: int) -> np.ndarray:
    """Of the policy without noise, in gymnasium's own reward."""
    world, found = gymnasium.make(f"{task}-v5"), []
    normalize = model.get_vec_normalize_env()
    for episode in range(episodes):
        observation, _ = world.reset(seed=10_000 + episode)
        total, ended = 0.0, False
        while not ended:
            seen = observation if normalize is None else normalize.normalize_obs(observation)
            action, _ = model.predict(seen, deterministic=True)
            observation, reward, terminated, truncated, _ = world.step(action)
            total, ended = total + float(reward), terminated or truncated
        found.append(total)
    world.close()
    return np.array(found)


def train_peer(method: str, task: str, seed: int, minutes: float) -> dict[str, Any]:
    """One run of a peer."""
    torch.set_num_threads(1)  # its environments have the cores
    clock = Clock(task, 60 * minutes)
    model = {"ARS": learn_ars, "PPO": learn_ppo}[method](task, seed, clock)
    final = returns(model, task, 20)
    model.get_env().close()
    return {"return": float(final.mean()), "steps": model.num_timesteps, "curve": clock.curve}


def train(method: str, task: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run's numbers, made now unless they are there."""
    if method == "EGGROLL":
        return rl_runs.train(task, seed, IMAGES / "rl")
    file = folder / task / method / f"seed_{seed}.json"
    if not file.exists():
        found = train_peer(method, task, seed, rl_runs.GOALS[task].minutes)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    known: dict[str, Any] = json.loads(file.read_text())
    return known


def row(task: str, method: str, runs: list[dict[str, Any]]) -> list[str]:
    """One row of the table."""
    scores = sorted(run["return"] for run in runs)
    steps = float(np.median([run["steps"] for run in runs]))
    band = f"{scores[0]:,.0f} to {scores[-1]:,.0f}"
    minutes = np.median([run["curve"][-1]["seconds"] / 60 for run in runs])
    return [
        task,
        f"{minutes:.0f}",
        method,
        f"{np.median(scores):,.0f}",
        band,
        f"{steps / 1e6:.2f} M",
    ]


def draw(found: dict[tuple[str, str], list[dict[str, Any]]], file: Path) -> None:
    """Each run's curve, by wall-clock and by control steps."""
    figure = Figure(figsize=(4 * len(TASKS), 6), layout="constrained")
    axes = figure.subplots(2, len(TASKS))
    for (task, method), runs in found.items():
        by_clock, by_steps = axes[:, TASKS.index(task)]
        for number, run in enumerate(runs):
            look = {"color": COLOURS[method], "lw": 1.2, "label": "" if number else method}
            returns = [point["return"] for point in run["curve"]]
            by_clock.plot([point["seconds"] / 60 for point in run["curve"]], returns, **look)
            by_steps.plot([point["steps"] for point in run["curve"]], returns, **look)
        by_clock.set(title=task, xlabel="minutes")
        by_steps.set(xlabel="control steps", xscale="log")
        by_steps.xaxis.set_minor_formatter("")  # their labels overlap
    for ax in axes.ravel():
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.supylabel("return without noise")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=IMAGES / "rl_peers")
    args = parser.parse_args()
    found = {
        (task, method): [train(method, task, seed, args.out) for seed in range(args.seeds)]
        for task in TASKS
        for method in COLOURS
    }
    rows = [row(task, method, runs) for (task, method), runs in found.items()]
    header = ["task", "minutes", "method", "median return", "lowest to highest", "control steps"]
    text = f"{args.seeds} seeds each. On {hardware()}.\n\n{table(header, rows)}\n"
    print(text)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(found, args.out / "curves.png")


if __name__ == "__main__":
    main()
