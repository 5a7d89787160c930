"""Losses and softmaxes over few classes have a way of their own in a batched pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_equivalence import alone, assert_equal, scores
from torch import Tensor, nn

B = 12
LABELS = torch.arange(B) % 3
SOFT = torch.eye(3, dtype=torch.float64)[LABELS]

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda z: F.cross_entropy(z, LABELS),
    "sum": lambda z: F.cross_entropy(z, LABELS, reduction="sum"),
    "none": lambda z: F.cross_entropy(z, LABELS, reduction="none").square().mean(),
    "class weights": lambda z: F.cross_entropy(z, LABELS, weight=z.new_tensor([1.0, 2.0, 5.0])),
    "ignored label": lambda z: F.cross_entropy(z, LABELS, ignore_index=1),
    "smoothed labels": lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1),
    "soft labels": lambda z: F.cross_entropy(z, SOFT.to(z.dtype)),
    "its own labels": lambda z: F.cross_entropy(z, z.argmin(dim=1)),
    "a map of classes": lambda z: F.cross_entropy(z.view(4, 3, 3).mT, LABELS.view(4, 3)),
    "one example": lambda z: F.cross_entropy(z[0], LABELS[0]),
    "module": lambda z: nn.CrossEntropyLoss()(z, LABELS),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, dim=1), LABELS),
    "log_softmax": lambda z: torch.log_softmax(z, 1)[:, 0].mean(),
    "another dim": lambda z: z.log_softmax(dim=0)[:, 0].mean(),
    "softmax": lambda z: z.softmax(-1)[:, 1].mean(),
    "F.softmax": lambda z: F.softmax(z, dim=-1, dtype=torch.float64)[:, 1].mean(),
    "all masked": lambda z: z.masked_fill(z > 0, -torch.inf).softmax(-1)[:, 1].nanmean(),
    "of one number": lambda z: z.sum().log_softmax(0) + z.mean(),
}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batched_equals_plain(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(B, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    fitness = lambda m: LOSSES[name](m(x))  # noqa: E731
    batched, trainer = scores(model(dtype), fitness, evaluation="vmap")
    assert_equal(batched, alone(trainer, fitness), dtype)


def test_a_label_that_is_no_class_is_an_error() -> None:
    x = torch.randn(B, 5)
    for label in (3, 7, -1):
        wrong = torch.full((B,), label)
        with pytest.raises((IndexError, RuntimeError)):
            scores(model(torch.float32), lambda m, y=wrong: F.cross_entropy(m(x), y))
