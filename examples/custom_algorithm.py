"""An algorithm of one's own: separable natural evolution strategies (SNES), in two methods.

SNES (Schaul, Glasmachers and Schmidhuber, 2011) adapts a step size for every weight. What it is
known for is checked here: it converges at a constant rate, however badly the axes are scaled, but
is of little help where the bad scaling is rotated away from the axes.

    python examples/custom_algorithm.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from eggroll_trainer import ESTrainer, VanillaESTrainer

DIMENSIONS = 20
CONDITION = 1e6  # of the ellipsoids: the longest axis over the shortest, squared
TARGET = 1e-8  # a loss that counts as solved


class SNES(ESTrainer):
    """Separable natural evolution strategies; use with `sigma=1` and `learning_rate=1`."""

    def reset(self) -> None:
        super().reset()
        self.scale = torch.full_like(self.current_params, 0.5)  # a step size for every weight

    def sample_perturbations(self, population_size: int) -> Tensor:
        shape = (population_size, len(self.scale))
        return self.scale * torch.randn(shape, dtype=self.scale.dtype, generator=self.generator)

    def compute_update(self, perturbations: Tensor, fitnesses: Tensor) -> Tensor:
        n, d = perturbations.shape
        rank = fitnesses.argsort(descending=True).argsort()  # 0 is the best
        utility = (math.log(n / 2 + 1) - torch.log(rank + 1.0)).clamp(min=0)
        utility = (utility / utility.sum() - 1 / n).to(perturbations.dtype)
        steps = perturbations / self.scale
        rate = (3 + math.log(d)) / (5 * math.sqrt(d))
        update = self.scale * (utility @ steps)
        self.scale = self.scale * torch.exp(rate / 2 * (utility @ (steps.square() - 1)))
        return update

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.scale = state["scale"].clone()


class Point(nn.Module):
    """A point in the space that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(DIMENSIONS, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


def landscapes(seed: int) -> dict[str, Tensor]:
    """Name → matrix `M` of the loss `|M x|²`."""
    axes = torch.logspace(0, math.log10(CONDITION) / 2, DIMENSIONS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(DIMENSIONS, DIMENSIONS, dtype=torch.float64, generator=generator)
    rotation, _ = torch.linalg.qr(random)
    return {
        "sphere": torch.eye(DIMENSIONS, dtype=torch.float64),
        "ellipsoid": axes.diag(),
        "rotated ellipsoid": axes.diag() @ rotation,
    }


def run(method: str, matrix: Tensor, generations: int, seconds: float, seed: int) -> list[float]:
    """The loss of the centre after each generation, until solved or out of budget."""
    point = Point()

    def fitness(model: nn.Module) -> Tensor:
        return -(matrix @ model()).square().sum()

    population = 4 + int(3 * math.log(DIMENSIONS))
    arguments = (point.parameters(), point, fitness, population)
    trainer: ESTrainer
    if method == "SNES":
        trainer = SNES(*arguments, learning_rate=1.0, sigma=1.0, seed=seed)
    else:
        trainer = VanillaESTrainer(*arguments, learning_rate=0.1, sigma=0.01, seed=seed)
    losses, start = [-float(fitness(point).detach())], time.perf_counter()
    while len(losses) <= generations and time.perf_counter() - start < seconds:
        trainer.step()
        losses.append(-float(fitness(point).detach()))
        if losses[-1] < TARGET:
            break
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="wall-clock budget, at most")
    parser.add_argument("--generations", type=int, default=2000, help="of a run, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/custom_algorithm"))
    options = parser.parse_args()

    figure, axes = plt.subplots(figsize=(8.5, 4), layout="constrained")
    results = {}
    print(f"{'':42} generations   loss at the end")
    for method, style in (("SNES", "-"), ("dense ES, fixed σ", ":")):
        for (name, matrix), colour in zip(
            landscapes(options.seed).items(), ("#30638e", "#d1495b", "#edae49"), strict=True
        ):
            losses = run(method, matrix, options.generations, options.seconds / 6, options.seed)
            label = f"{method}, {name}"
            results[label] = losses
            print(f"{label:42} {len(losses) - 1:11,} {losses[-1]:17.2e}")
            axes.plot(losses, style, color=colour, label=label)
    axes.set(yscale="log", xlabel="generations", ylabel="loss of the centre")
    axes.set_title(f"{DIMENSIONS} dimensions; ellipsoids of condition {CONDITION:.0e}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "snes.png", dpi=110)
    (options.out / "results.json").write_text(json.dumps(results))
    print(f"plot and numbers: {options.out}/snes.png, {options.out}/results.json")


if __name__ == "__main__":
    main()
