"""START HERE: EGGROLL and dense ES, side by side, on real handwritten digits.

Both train the same network from the same weights by scores alone, no gradient anywhere. They are
compared at an equal wall-clock budget and at an equal number of generations. Writes a plot and the
numbers to --out.

    python examples/basic_example.py --seconds 40
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, ESTrainer, VanillaESTrainer

# The same for both methods; found with EGGROLL on a part of the training set held out for it.
WIDTH = 256
POPULATION = 1024
BATCH = 32
SIGMA = 0.02  # in units of the weights; falls to 0.3 of it over the run
LEARNING_RATE = 0.01  # Adam's; falls to 0 over the run
METHODS = {"EGGROLL": EGGROLLTrainer, "dense ES": VanillaESTrainer}
COLOURS = {"EGGROLL": "#d1495b", "dense ES": "#30638e"}

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Run:
    """One training run: what it took, what came of it, and the loss after each generation."""

    method: str
    generations: int
    seconds: float
    accuracy: float
    clock: list[float]
    loss: list[float]


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 images of 8×8 pixels: training images and labels, and a quarter for the test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_test = (torch.tensor(part) for part in split[2:])
    mean, std = x.mean(), x.std()
    return (x - mean) / std, y, (x_test - mean) / std, y_test


def make_batches(x: Tensor, y: Tensor, seed: int) -> Batches:
    """Shuffled batches for 100 passes over the data; the trainer begins again at their end."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(x), generator=generator) for _ in range(100))
    return [(x[i], y[i]) for order in orders for i in order.split(BATCH) if len(i) == BATCH]


def make_model() -> nn.Sequential:
    """The network, always with the same initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(64, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 10),
        )


def fitness(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Higher is better: the negative cross-entropy on a batch."""
    x, y = batch
    return -F.cross_entropy(model(x), y)


def make_trainer(method: str, batches: Batches, generations: int, seed: int) -> ESTrainer:
    """A trainer with a torch optimizer, a learning-rate schedule, a σ schedule and batches."""
    model = make_model()
    return METHODS[method](
        model.parameters(),
        model=model,
        fitness_fn=fitness,
        population_size=POPULATION,
        learning_rate=LEARNING_RATE,
        sigma=lambda g: SIGMA * (0.65 + 0.35 * math.cos(math.pi * min(1.0, g / generations))),
        seed=seed,
        data=batches,
        optimizer=torch.optim.Adam,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, generations
        ),
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of images whose digit is named rightly."""
    return (model(x).argmax(dim=1) == y).float().mean().item()


def generations_in(seconds: float, method: str, batches: Batches) -> int:
    """Generations that fit: schedules must know beforehand. Timed on a run that is thrown away."""
    trainer = make_trainer(method, batches, 100, seed=1)
    trainer.train(3, verbose=False)
    start = time.perf_counter()
    trainer.train(8, verbose=False)
    return max(1, int(seconds * 8 / (time.perf_counter() - start)))


def run(method: str, generations: int, batches: Batches, seed: int, test: tuple) -> Run:
    """Train, and measure the accuracy on the test set at the end."""
    trainer = make_trainer(method, batches, generations, seed)
    print(f"\n{method}: {generations:,} generations of {POPULATION:,} members", flush=True)
    start = time.perf_counter()
    trainer.train(generations)
    seconds = time.perf_counter() - start
    spent = [m["ask_seconds"] + m["evaluate_seconds"] + m["tell_seconds"] for m in trainer.history]
    clock = torch.tensor(spent).cumsum(0).tolist()
    loss = [-fitness for fitness in trainer.fitness_history]
    return Run(method, generations, seconds, accuracy(trainer.model, *test), clock, loss)


def print_table(runs: dict[str, Run], untrained: float) -> None:
    """The result, to read."""
    print(f"\n{'':28} generations   seconds   test accuracy")
    print(f"{'untrained':28} {0:11,} {0:9.1f} {untrained:15.1%}")
    for title, result in runs.items():
        print(f"{title:28} {result.generations:11,} {result.seconds:9.1f} {result.accuracy:15.1%}")


def smooth(values: list[float], width: int = 15) -> list[float]:
    """Running mean over the last `width` generations: each has a batch of its own."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))
    ]


def plot(runs: dict[str, Run], path: Path) -> None:
    """The loss against the clock, and against generations."""
    eggroll, same_time, same_generations = runs.values()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, pair, label in (
        (axes[0], (eggroll, same_time), "seconds"),
        (axes[1], (eggroll, same_generations), "generations"),
    ):
        for result in pair:
            steps = result.clock if label == "seconds" else range(1, result.generations + 1)
            text = f"{result.method}: {result.accuracy:.1%} on the test set"
            axis.plot(steps, smooth(result.loss), color=COLOURS[result.method], label=text)
        axis.set(xlabel=label, yscale="log", title=f"an equal number of {label}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    axes[0].set_ylabel("cross-entropy of the population,\nmean of 15 generations")
    figure.suptitle(f"Digits, 64·{WIDTH}·{WIDTH}·10 network, {POPULATION:,} members, no gradients")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40, help="wall-clock budget of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/basic_example"))
    options = parser.parse_args()

    x, y, *test = load()
    batches = make_batches(x, y, options.seed)
    eggroll, dense = (generations_in(options.seconds, method, batches) for method in METHODS)
    print(make_trainer("EGGROLL", batches, eggroll, options.seed).explain())

    runs = {
        title: run(method, generations, batches, options.seed, test)
        for title, method, generations in (
            ("EGGROLL", "EGGROLL", eggroll),
            ("dense ES, equal time", "dense ES", dense),
            ("dense ES, equal generations", "dense ES", eggroll),
        )
    }
    untrained = accuracy(make_model(), *test)
    print_table(runs, untrained)
    speed = runs["dense ES, equal generations"].seconds / runs["EGGROLL"].seconds
    print(f"\nA generation of EGGROLL is {speed:.1f} times as fast as one of dense ES here.")

    options.out.mkdir(parents=True, exist_ok=True)
    plot(runs, options.out / "digits.png")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    results = {"machine": machine, "seed": options.seed, "untrained": untrained}
    results["runs"] = {title: asdict(result) for title, result in runs.items()}
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"plot and numbers: {options.out}/digits.png, {options.out}/results.json")


if __name__ == "__main__":
    main()
