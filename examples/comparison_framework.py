"""Compare ways of training one network: equal seconds or equal forward passes, several seeds.

By import:

    task = Task("MLP", lambda: mlp(28, 64, 10), data)
    methods = {"EGGROLL": Evolution(), "Adam": Gradient(torch.optim.Adam, learning_rate=3e-3)}
    comparison = compare([task], methods, Budget(seconds=60), seeds=[0, 1, 2])
    print(comparison.table())
    comparison.plot(axes, "MLP", "seconds")

A method is any callable `method(model, train, meter, seed)` that trains the model in place, and
calls `meter.tick(…)` after each step, until that says that the budget is spent: see `methods.py`.

As a program, it compares EGGROLL, dense ES, SGD and Adam on an MLP, at equal forward passes:

    python examples/comparison_framework.py --forward-passes 50e6 --seeds 3 --data-dir FOLDER
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from models import mlp
from torch import nn
from tqdm import tqdm
from utils import (
    COLOURS,
    Data,
    Split,
    load_images,
    logits,
    parser,
    principal_components,
    save_figure,
    save_results,
    tidy,
    upright,
)

POINTS = 30  # of a learning curve


@dataclass(frozen=True)
class Budget:
    """What a run may spend, in one currency: seconds, or forward passes of one example each.

    A backward pass counts as two forward passes. Evaluation on the test set is free.
    """

    seconds: float = float("inf")
    forward_passes: float = float("inf")

    def __post_init__(self) -> None:
        if (self.seconds < float("inf")) == (self.forward_passes < float("inf")):
            raise ValueError(f"{self!r}: give either seconds or forward_passes")
        if min(self.seconds, self.forward_passes) <= 0:
            raise ValueError(f"{self!r}: expected more than nothing")

    def __truediv__(self, parts: float) -> Budget:
        return Budget(self.seconds / parts, self.forward_passes / parts)

    def __str__(self) -> str:
        if self.seconds < float("inf"):
            return f"{self.seconds:g} seconds"
        return f"{self.forward_passes:,.0f} forward passes"


class Meter:
    """Counts what a run spends, and evaluates the model now and then, off the clock.

    Args:
        budget: What may be spent.
        evaluate: `() -> {"accuracy": …, …}`, for the learning curve.
        title: Of the progress bar; none without a title.
    """

    def __init__(
        self, budget: Budget, evaluate: Callable[[], Mapping[str, float]], title: str = ""
    ) -> None:
        self.budget = budget
        self.evaluate = evaluate
        self.steps = self.samples = self.forward_passes = 0
        self.curve: list[dict[str, float]] = []
        layout = "{desc:36} {bar:20} {n:3.0f} %{postfix}"
        self.bar = tqdm(total=100, desc=title, bar_format=layout, disable=not title)
        self._paused = 0.0
        self._begun = time.perf_counter()
        self._record()

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._begun - self._paused

    @property
    def progress(self) -> float:
        """The share of the budget that is spent, from 0 to 1: schedules follow it."""
        return min(
            1.0,
            max(
                self.seconds / self.budget.seconds,
                self.forward_passes / self.budget.forward_passes,
            ),
        )

    def tick(self, samples: int, forward_passes: int) -> bool:
        """Count a step; is there budget for another one?

        Args:
            samples: Training examples that the step drew from the data.
            forward_passes: Forward passes of one example each that it cost.
        """
        self.steps += 1
        self.samples += samples
        self.forward_passes += forward_passes
        progress = self.progress
        if progress == 1.0 or progress * POINTS >= len(self.curve):
            self._record()
        if progress == 1.0:
            self.bar.close()
        return progress < 1.0

    def _record(self) -> None:
        spent = {
            "seconds": self.seconds,
            "steps": self.steps,
            "samples": self.samples,
            "forward_passes": self.forward_passes,
        }
        start, progress = time.perf_counter(), self.progress
        self.curve.append({**spent, **self.evaluate()})
        self.bar.set_postfix_str(f"accuracy {self.curve[-1]['accuracy']:.2%}", refresh=False)
        self.bar.update(100 * progress - self.bar.n)
        self._paused += time.perf_counter() - start


Method = Callable[[nn.Module, Split, Meter, int], Any]


@dataclass(frozen=True)
class Task:
    """A network to train, and what on."""

    name: str
    make_model: Callable[[], nn.Module]
    data: Data

    def model(self, seed: int) -> nn.Module:
        """The network with the initial weights of a seed: the same for every method."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make_model()


@dataclass
class Run:
    """One training run: its learning curve on the test set, what the method returned, the model."""

    task: str
    method: str
    seed: int
    curve: list[dict[str, float]]
    returned: Any = field(repr=False)
    model: nn.Module = field(repr=False)

    @property
    def accuracy(self) -> float:
        """On the test set, at the end."""
        return self.curve[-1]["accuracy"]


def run(task: Task, name: str, method: Method, budget: Budget, seed: int) -> Run:
    """Train once."""
    model, test = task.model(seed), task.data.test

    def evaluate() -> dict[str, float]:
        out = logits(model, test.x)
        hits = out.argmax(dim=1) == test.y
        return {
            "accuracy": hits.float().mean().item(),
            "loss": F.cross_entropy(out, test.y).item(),
        }

    meter = Meter(budget, evaluate, f"{task.name}, {name}, seed {seed}")
    returned = method(model, task.data.train, meter, seed)
    return Run(task.name, name, seed, meter.curve, returned, model)


def sweep(
    task: Task, name: str, method: Any, budget: Budget, learning_rates: Iterable[float]
) -> tuple[Any, dict[float, float]]:
    """The method at its best learning rate on a held-out part of the training set.

    Where the best is the lowest or the highest, the sweep goes on beyond it, in steps of 3.

    Args:
        task: What to train; its test set is not looked at.
        name: The method's, for the progress bar.
        method: A dataclass with a `learning_rate`.
        budget: Of each run.
        learning_rates: Where to begin.

    Returns:
        The method, and learning rate → accuracy.
    """
    task = replace(task, data=task.data.held_out())
    found: dict[float, float] = {}
    waiting = sorted(learning_rates)
    while waiting:
        for rate in waiting:
            result = run(task, f"{name} {rate:g}", replace(method, learning_rate=rate), budget, 100)
            found[rate] = result.accuracy
        best = max(found, key=lambda rate: found[rate])
        beyond = {min(found): min(found) / 3, max(found): max(found) * 3}
        waiting = [beyond[best]] if best in beyond else []
    return replace(method, learning_rate=best), found


@dataclass
class Comparison:
    """The runs of several methods, on one or more tasks, at an equal budget."""

    budget: Budget
    runs: list[Run]

    def of(self, task: str, method: str) -> list[Run]:
        """The runs of one method on one task, a seed each."""
        return [run for run in self.runs if (run.task, run.method) == (task, method)]

    def middle(self, task: str, method: str) -> Run:
        """The run whose accuracy is the median (the lower one, of two)."""
        runs = sorted(self.of(task, method), key=lambda run: run.accuracy)
        return runs[(len(runs) - 1) // 2]

    def accuracy(self, task: str, method: str) -> float:
        """The median over the seeds, at the end."""
        return statistics.median(run.accuracy for run in self.of(task, method))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Tasks and methods, in the order in which they ran."""
        return list(dict.fromkeys((run.task, run.method) for run in self.runs))

    def table(self) -> str:
        """Medians over the seeds; beside the accuracy, its lowest and highest."""
        lines = [
            f"equal budgets of {self.budget}",
            f"{'':32} {'test accuracy':>24} {'seconds':>9} {'steps':>9} {'forward passes':>16}",
        ]
        for task, method in self.pairs:
            ends = [run.curve[-1] for run in self.of(task, method)]
            scores = [end["accuracy"] for end in ends]
            middle = {key: statistics.median(end[key] for end in ends) for key in ends[0]}
            band = f"({min(scores):.2%} to {max(scores):.2%})" if len(scores) > 1 else ""
            lines.append(
                f"{f'{task}, {method}':32} {middle['accuracy']:7.2%} {band:>16}"
                f" {middle['seconds']:9.1f} {middle['steps']:9,.0f} "
                f"{middle['forward_passes']:16,.0f}"
            )
        return "\n".join(lines)

    def plot(self, axes: Axes, task: str, currency: str = "seconds") -> None:
        """Test error of each method against what was spent: medians, and bands of all seeds."""
        for method in dict(pair[::-1] for pair in self.pairs if pair[0] == task):
            curves = [run.curve for run in self.of(task, method)]
            first = min(curve[1][currency] for curve in curves)
            last = statistics.median(curve[-1][currency] for curve in curves)
            grid = np.geomspace(first, last, 60)
            errors = 100 * np.array(
                [
                    np.interp(grid, [p[currency] for p in c], [1 - p["accuracy"] for p in c])
                    for c in curves
                ]
            )
            label = f"{method}: {self.accuracy(task, method):.1%}"
            colour = COLOURS.get(method)
            (line,) = axes.plot(grid, np.median(errors, axis=0), color=colour, label=label)
            band, colour = (errors.min(axis=0), errors.max(axis=0)), line.get_color()
            axes.fill_between(grid, *band, color=colour, alpha=0.2, lw=0)
        axes.set(xscale="log", yscale="log", xlabel=currency.replace("_", " "))
        axes.set(title=task, ylabel="test error, %")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)

    def numbers(self) -> dict[str, Any]:
        """What to keep: the budget and every learning curve."""
        keys = ("task", "method", "seed", "curve")
        runs = [{key: getattr(run, key) for key in keys} for run in self.runs]
        return {"budget": str(self.budget), "runs": runs}


def compare(
    tasks: Iterable[Task],
    methods: Mapping[str, Method],
    budget: Budget,
    seeds: Iterable[int] = (0,),
) -> Comparison:
    """Run every method on every task with every seed."""
    seeds = list(seeds)
    return Comparison(
        budget,
        [
            run(task, name, method, budget, seed)
            for task in tasks
            for name, method in methods.items()
            for seed in seeds
        ],
    )


def main() -> None:
    from methods import BASELINES, Evolution  # they are written for this framework

    from eggroll_trainer import VanillaESTrainer

    options = parser(__doc__, seconds=60, out="comparison_framework")
    options.add_argument("--forward-passes", type=float, help="budget, in place of --seconds")
    options.add_argument("--seeds", type=int, default=3, help="how many, from --seed on")
    args = options.parse_args()
    data, _ = principal_components(upright(load_images(args.dataset, args.data_dir)), 28, 0.25)
    print(data)
    spend, currency = Budget(seconds=args.seconds), "seconds"
    if args.forward_passes:
        spend, currency = Budget(forward_passes=args.forward_passes), "forward_passes"
    task = Task("MLP", lambda: mlp(28, 64, 10), data)
    methods: dict[str, Method] = {
        "EGGROLL": Evolution(),
        "Vanilla ES": Evolution(trainer=VanillaESTrainer),
    }
    sweeps = {}
    for name, (method, rates) in BASELINES.items():
        methods[name], sweeps[name] = sweep(task, name, method, spend / 6, rates)
    seeds = range(args.seed, args.seed + args.seeds)
    comparison = compare([task], methods, spend, seeds)
    print(f"\n{comparison.table()}\n")
    save_results(args.out, {"data": data.source, "sweeps": sweeps, **comparison.numbers()})
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    comparison.plot(figure.subplots(), task.name, currency)
    save_figure(figure, args.out / "comparison.png")


if __name__ == "__main__":
    main()
