"""`ClipUp`: the paper's equations by hand, and a run that resumes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import ClipUp, ConfigurationError, EGGROLLTrainer


def test_steps_by_hand() -> None:
    """v ← clip(m v − lr g/|g|), θ ← θ + v; the length is that of all parameters together."""
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = ClipUp([a, b], lr=0.5, momentum=0.9, max_speed=0.8)
    velocity, place = torch.zeros(3), torch.zeros(3)
    for gradient in ([3.0, 0.0, 4.0], [300.0, 0.0, 400.0], [0.0, 0.0, 0.0], [0.0, -1e-6, 0.0]):
        g = torch.tensor(gradient)
        a.grad, b.grad = g[:2].clone(), g[2:].clone()
        optimizer.step()
        velocity = 0.9 * velocity - (0.5 * g / g.norm() if g.any() else 0)
        velocity *= min(1.0, 0.8 / velocity.norm().item())
        place += velocity
        torch.testing.assert_close(torch.cat([a, b]).detach(), place)


def test_the_speed_is_twice_the_learning_rate_at_most() -> None:
    p = nn.Parameter(torch.zeros(5))
    optimizer = ClipUp([p], lr=0.1)
    for _ in range(50):
        before = p.detach().clone()
        p.grad = torch.ones(5)
        optimizer.step()
    assert (p.detach() - before).norm().item() == pytest.approx(0.2)


def test_it_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    def fitness(model: nn.Module) -> Tensor:
        return -(model.weight - 3).square().sum()  # type: ignore[operator, union-attr]

    def fresh() -> EGGROLLTrainer:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        factory = functools.partial(ClipUp, momentum=0.8)
        return EGGROLLTrainer(
            [model.weight], model, fitness, 32, learning_rate=0.3, seed=0, optimizer=factory
        )

    whole, half, rest = fresh(), fresh(), fresh()
    whole.train(60, verbose=False)
    half.train(20, verbose=False)
    half.save(tmp_path / "run.pt")
    rest.train(60, verbose=False, resume_from=tmp_path / "run.pt")
    assert torch.equal(whole.current_params, rest.current_params)
    assert (whole.current_params - 3).abs().max() < 0.5


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": 1.0}, {"max_speed": 0.0}])
def test_settings_that_are_wrong(options: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected lr"):
        ClipUp([nn.Parameter(torch.zeros(1))], **options)
