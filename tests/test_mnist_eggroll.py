"""Learning on real handwritten digits: fails if the optimizer does nothing, or does it badly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, VanillaESTrainer

Digits = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def digits() -> Digits:
    """Training images and labels, and a quarter for the test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_test = (torch.tensor(part) for part in split[2:])
    mean, std = x.mean(), x.std()
    return (x - mean) / std, y, (x_test - mean) / std, y_test


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def train(
    trainer: Any, model: nn.Module, digits: Digits, generations: int, **options: Any
) -> dict[str, float]:
    x, y, x_test, y_test = digits
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(x), generator=generator) for _ in range(50)]
    batches = [(x[i], y[i]) for order in orders for i in order.split(192)]  # 7 × 192, and 3
    batches = [batch for batch in batches if len(batch[1]) == 192]
    untrained = accuracy(model, x_test, y_test)
    made = trainer(
        model.parameters(),
        model=model,
        fitness_fn=lambda m, b: -F.cross_entropy(m(b[0]), b[1]),
        data=batches,
        seed=0,
        **{
            "population_size": 256,
            "learning_rate": 0.02,
            "sigma": 0.05,
            "optimizer": torch.optim.Adam,
            **options,
        },
    )
    made.train(generations, verbose=False)
    assert made.evaluator.name == "vmap"
    return {"before": untrained, "after": accuracy(model, x_test, y_test)}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
def test_an_mlp_reads_digits(trainer: Any, digits: Digits) -> None:
    result = train(trainer, mlp(), digits, 150)
    assert result["before"] < 0.25
    assert result["after"] > 0.88


def test_a_convnet_reads_digits(digits: Digits) -> None:
    """Low-rank kernels, pooling."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)),
    )
    options = {"matricize": True, "population_size": 128, "evaluation": "vmap"}
    result = train(EGGROLLTrainer, model, digits, 150, **options)
    assert result["before"] < 0.25
    assert result["after"] > 0.85


def test_learning_rate_zero_reads_nothing(digits: Digits) -> None:
    result = train(EGGROLLTrainer, mlp(), digits, 5, learning_rate=0.0)
    assert result["after"] == result["before"]


@pytest.mark.slow
def test_digits_at_97_percent(digits: Digits) -> None:
    """The level that a good optimizer reaches with this network; schedules to zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generations = 400
    result = train(
        EGGROLLTrainer,
        model,
        digits,
        generations,
        population_size=512,
        sigma=lambda g: 0.05 * (1 - 0.7 * g / generations),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, generations),
    )
    assert result["after"] >= 0.97
