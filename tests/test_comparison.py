"""The comparison framework: budgets are equal, and counted as a reader would count."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from comparison_framework import Budget, Comparison, Meter, Run, Task, compare, run, sweep
from matplotlib.figure import Figure
from methods import Evolution, Gradient
from utils import Data, Split

from eggroll_trainer import VanillaESTrainer


class Counting(nn.Module):
    """A linear classifier that counts the examples of its forward passes in training."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 100:  # the test set is larger
            Counting.seen += len(x)
        return self.layer(x)


def split(count: int) -> Split:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    return Split(x, (x[:, 0] > 0).long())


def task(model: Any = Counting, examples: int = 10) -> Task:
    return Task("toy", model, Data(split(examples), split(100), "made here"))


SEQUENTIAL = Evolution(population_size=6, batch_size=4, options={"evaluation": "sequential"})
# One forward pass for each backward one, which counts as two: 3 in all.
METHODS = {
    "EGGROLL": (SEQUENTIAL, 1),
    "Vanilla ES": (replace(SEQUENTIAL, trainer=VanillaESTrainer), 1),
    "Adam": (Gradient(batch_size=4), 3),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("examples", [10, 8])
def test_forward_passes_are_those_that_were_made(name: str, examples: int) -> None:
    """With a last, smaller batch (10 = 4 + 4 + 2) and without."""
    method, each = METHODS[name]
    Counting.seen = 0
    end = run(task(examples=examples), name, method, Budget(forward_passes=500), 0).curve[-1]
    assert end["forward_passes"] == each * Counting.seen
    step = each * 4 * (6 if each == 1 else 1)
    assert 500 <= end["forward_passes"] < 500 + step


def test_samples_are_examples_drawn() -> None:
    ends = [
        run(task(), name, method, Budget(forward_passes=24 * 10), 0).curve[-1]
        for name, (method, _) in METHODS.items()
    ]
    # 4 + 4 + 2, …: 240 = 6 members · 40 examples, 12 steps; by gradients 3 · 80, 24 steps.
    assert [(end["samples"], end["steps"]) for end in ends] == [(40, 12), (40, 12), (80, 24)]


def test_seconds_end_a_run_and_evaluation_is_free() -> None:
    def evaluate() -> dict[str, float]:
        time.sleep(0.02)
        return {"accuracy": 0.5}

    meter = Meter(Budget(seconds=0.3), evaluate)
    begun = time.perf_counter()
    while meter.tick(1, 1):
        time.sleep(0.001)
    spent = time.perf_counter() - begun
    assert 0.3 <= meter.curve[-1]["seconds"] < 0.6
    assert len(meter.curve) >= 5, "30, if the machine never pauses"
    assert spent - meter.curve[-1]["seconds"] >= 0.02 * (len(meter.curve) - 1)
    assert meter.progress == 1.0
    assert [p["seconds"] for p in meter.curve] == sorted(p["seconds"] for p in meter.curve)


def test_progress_follows_the_budget() -> None:
    meter = Meter(Budget(forward_passes=100), lambda: {"accuracy": 0.0})
    going = [(meter.tick(1, 25), meter.progress) for _ in range(5)]
    assert going == [(True, 0.25), (True, 0.5), (True, 0.75), (False, 1.0), (False, 1.0)]


@pytest.mark.parametrize("budget", [{}, {"seconds": 1, "forward_passes": 1}, {"seconds": 0}])
def test_a_budget_is_one_positive_number(budget: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Budget"):
        Budget(**budget)


def test_every_method_starts_from_the_same_weights() -> None:
    began: dict[Any, Tensor] = {}

    def spy(model: nn.Module, train: Split, meter: Meter, seed: int) -> None:
        began[len(began)] = torch.cat([p.detach().flatten() for p in model.parameters()])
        meter.tick(1, 10)

    compare([task()], {"a": spy, "b": spy}, Budget(forward_passes=5), seeds=[0, 1])
    assert torch.equal(began[0], began[2])
    assert torch.equal(began[1], began[3])
    assert not torch.equal(began[0], began[1])


@dataclass(frozen=True)
class Peaked:
    """A method whose accuracy is best at a learning rate of 0.9; fails if shown the test set."""

    learning_rate: float = 0.1

    def __call__(self, model: Any, train: Split, meter: Meter, seed: int) -> None:
        assert len(train) == 100
        good = 1 / (1 + abs(self.learning_rate - 0.9))
        meter.evaluate = lambda: {"accuracy": good, "loss": 0.0}
        meter.tick(1, 1)


def test_a_sweep_goes_on_where_the_best_is_the_last() -> None:
    data = Data(split(120), Split(torch.full((5, 3), torch.nan), torch.zeros(5)), "")
    best, found = sweep(
        Task("toy", Counting, data), "", Peaked(), Budget(forward_passes=1), (0.01, 0.03, 0.1)
    )
    assert sorted(found) == pytest.approx([0.01, 0.03, 0.1, 0.3, 0.9, 2.7])
    assert best.learning_rate == pytest.approx(0.9)


def test_tables_and_figures_show_medians_of_the_seeds() -> None:
    def made(method: str, seed: int, accuracy: float) -> Run:
        points = [
            {"accuracy": a, "seconds": s, "steps": s, "samples": s, "forward_passes": s}
            for a, s in ((0.1, 0), (accuracy / 2, 5), (accuracy, 10))
        ]
        return Run("toy", method, seed, points, None, nn.Identity())

    accuracies = {"EGGROLL": (0.9, 0.5, 0.6), "mine": (0.3, 0.2, 0.1)}
    runs = [made(m, seed, a) for m, values in accuracies.items() for seed, a in enumerate(values)]
    comparison = Comparison(Budget(seconds=10), runs)
    assert comparison.accuracy("toy", "EGGROLL") == 0.6
    lines = comparison.table().splitlines()
    assert lines[0] == "equal budgets of 10 seconds"
    assert lines[2].split()[:6] == ["toy,", "EGGROLL", "60.00%", "(50.00%", "to", "90.00%)"]
    assert "10.0" in lines[2]
    axes = Figure().subplots()
    comparison.plot(axes, "toy", "seconds")
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(100 * (1 - 0.6))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "EGGROLL: 60.0%",
        "mine: 20.0%",
    ]
    numbers = comparison.numbers()
    assert numbers["budget"] == "10 seconds"
    assert [r["curve"][-1]["accuracy"] for r in numbers["runs"]] == [0.9, 0.5, 0.6, 0.3, 0.2, 0.1]


@pytest.mark.parametrize("name", METHODS)
def test_methods_learn(name: str) -> None:
    method = replace(METHODS[name][0], learning_rate=0.05)
    result = run(task(examples=60), name, method, Budget(forward_passes=30_000), 0)
    assert result.curve[0]["accuracy"] < 0.9
    assert result.accuracy > 0.93
