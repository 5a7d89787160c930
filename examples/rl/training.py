"""What the examples of this folder share: a run of so many minutes, its curve and its files."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from eggroll_trainer import Callback, EGGROLLTrainer, ESTrainer
from eggroll_trainer.integrations.returns import EpisodeFitness
from eggroll_trainer.policies import Policy


@dataclass(frozen=True)
class Settings:
    """How a policy is trained."""

    population_size: int = 64
    learning_rate: float = 0.3  # SGD's: the fraction of σ by which a generation moves
    sigma: float = 0.05
    final: float = 0.3  # what is left of learning rate and σ at the end
    hidden: tuple[int, ...] = (64, 64)
    shaping: Any = "standardize"
    episodes: int = 1
    common_seeds: bool = True  # else each antithetic pair begins in its own way
    steps: tuple[int, int] | None = None  # most of an episode, at the beginning and at the end
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of a MuJoCo task
    # What training changes about it: a bonus for staying alive teaches to stand still first. What
    # is reported is always the task's own reward.
    shaped: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        usual = Settings()
        others = {k: v for k, v in vars(self).items() if v != getattr(usual, k)}
        text = ", ".join(f"{name}={value}" for name, value in others.items())
        return re.sub(r"<function (\S+) at 0x\w+>", r"\1", text)  # its address is another each time


class Clock(Callback):
    """Ends a run after so many seconds, and keeps the curve of the centre's return.

    Args:
        seconds: Of training; evaluations are off the clock.
        evaluate: Mean return of the policy on episodes that it has not met.
        points: Of the curve.
    """

    def __init__(self, seconds: float, evaluate: Callable[[], float], points: int = 20) -> None:
        self.seconds, self.evaluate, self.points = seconds, evaluate, points
        self.curve: list[dict[str, float]] = []
        self.steps, self.paused, self.begun = 0.0, 0.0, time.perf_counter()
        layout = "{desc} {bar:30} {n:3.0f} %{postfix}"
        self.bar = tqdm(total=100, desc="training", bar_format=layout)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun - self.paused

    @property
    def progress(self) -> float:
        return min(1.0, self.spent / self.seconds)

    def on_generation_end(self, trainer: ESTrainer, metrics: dict[str, float]) -> None:
        self.steps += metrics["steps"]
        if self.progress * self.points >= len(self.curve) + 1 or self.progress == 1.0:
            now = time.perf_counter()
            point = {"seconds": self.spent, "steps": self.steps, "return": self.evaluate()}
            self.curve.append(point)
            self.paused += time.perf_counter() - now
            self.bar.set_postfix_str(f"return {point['return']:,.0f}", refresh=False)
        self.bar.update(100 * self.progress - self.bar.n)
        if self.progress == 1.0:
            self.bar.close()
            trainer.stop()


def train(
    policy: Policy,
    fitness: EpisodeFitness,
    settings: Settings,
    seconds: float,
    seed: int,
    judge: EpisodeFitness | None = None,
) -> Clock:
    """Train a policy for so many seconds; its curve is what the judge says of the centre."""
    judge = judge or fitness
    clock = Clock(seconds, lambda: judge.evaluate(policy, 5, seed=1).returns.mean().item())

    def left() -> float:
        share = (1 + math.cos(math.pi * clock.progress)) / 2
        return settings.final + (1 - settings.final) * share

    if settings.steps is not None:
        first, last = settings.steps
        fitness.max_steps = lambda _: round(first + (last - first) * clock.progress)
    trainer = EGGROLLTrainer(
        policy.parameters(),
        policy,
        fitness,
        population_size=settings.population_size,
        learning_rate=settings.learning_rate,
        sigma=lambda _: settings.sigma * left(),
        shaping=settings.shaping,
        seed=seed,
        callbacks=[clock],
    )
    trainer.train(10**9, verbose=False)
    return clock


def save(
    folder: Path, policy: Policy, clock: Clock, returns: Any, title: str, **numbers: Any
) -> None:
    """The policy, the learning curve, and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save(folder / "policy.pt")
    found = {
        "return": float(returns.mean()),
        "returns": [round(float(r), 3) for r in returns],
        "steps": clock.steps,
        **numbers,
        "curve": clock.curve,
    }
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    minutes = [point["seconds"] / 60 for point in clock.curve]
    axes.plot(minutes, [point["return"] for point in clock.curve], color="#d1495b")
    axes.set(title=title, xlabel="minutes", ylabel="return of the centre")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "curve.png", dpi=110)
    print(f"\n{title}: mean return of {len(returns)} unseen episodes: {returns.mean():,.1f}")
    print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def parser(description: str | None, minutes: float, out: str) -> argparse.ArgumentParser:
    """What every example can be told."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=minutes, help="of training")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("results") / out)
    return options


def seeded(seed: int, make: Callable[[], Policy]) -> Policy:
    """A policy whose first weights are those of the seed."""
    torch.manual_seed(seed)
    return make()
