"""Shaping: scale, offset, ties, outliers, groups, numbers that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import (
    ConfigurationError,
    EGGROLLTrainer,
    centered_rank,
    standardize,
    top_directions,
)
from eggroll_trainer.shaping import replace_nonfinite

SHAPINGS = pytest.mark.parametrize("shape", [standardize, centered_rank])
NAN, INF = float("nan"), float("inf")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_standardize_by_hand() -> None:
    torch.testing.assert_close(standardize(f64(1, 2, 3, 6)), f64(-2, -1, 0, 3) / 3.5**0.5)


def test_standardize_in_groups_by_hand() -> None:
    """The mean is the group's, the deviation everybody's (about the mean of all)."""
    f = f64(1, 3, 10, 14)
    torch.testing.assert_close(standardize(f, 2), f64(-1, 1, -2, 2) / f.std(correction=0))


def test_centered_rank_by_hand() -> None:
    torch.testing.assert_close(centered_rank(f64(5, -1, 9, 7, 6)), f64(-2, -4, 4, 2, 0) / 8)
    torch.testing.assert_close(centered_rank(f64(1, 1, 2, 0)), f64(0, 0, 3, -3) / 6)
    torch.testing.assert_close(centered_rank(f64(1, 3, 9, 4), 2), f64(-1, 1, 1, -1) / 2)


@SHAPINGS
@pytest.mark.parametrize("group_size", [0, 4])
def test_scale_and_offset_do_not_matter(shape: Any, group_size: int) -> None:
    f = torch.randn(64, dtype=torch.float64)
    for scale, offset in ((1, 1000), (1e4, 0), (1e-6, 0), (1e300, 0), (3, -1e6)):
        torch.testing.assert_close(
            shape(f * scale + offset, group_size), shape(f, group_size), rtol=1e-6, atol=1e-6
        )


@SHAPINGS
@pytest.mark.parametrize("value", [0.0, 0.1, 1e20, -3.3])
def test_equal_fitnesses_weigh_exactly_nothing(shape: Any, value: float) -> None:
    assert torch.equal(shape(torch.full((6,), value)), torch.zeros(6))
    grouped = torch.tensor([value] * 3 + [1.0, 2.0, 4.0], dtype=torch.float64)
    assert torch.equal(shape(grouped, 3)[:3], torch.zeros(3, dtype=torch.float64))


@SHAPINGS
def test_equal_ones_get_equal_weights(shape: Any) -> None:
    weights = shape(f64(2, 0.1, 0.1, 5, 0.1, 2))
    assert len({weights[1].item(), weights[2].item(), weights[4].item()}) == 1
    assert weights[0] == weights[5]
    assert weights[3] > weights[0] > weights[1]


def test_an_outlier_is_kept() -> None:
    weights = standardize(f64(*[0.0] * 99, 1e9))
    assert weights[-1] > 9
    assert torch.isfinite(weights).all()


def test_bad_numbers_are_the_worst_of_their_group() -> None:
    f = f64(NAN, 1, 5, -INF, 8, INF)
    assert torch.equal(replace_nonfinite(f, 0), f64(1, 1, 5, 1, 8, 1))
    assert torch.equal(replace_nonfinite(f, 3), f64(1, 1, 5, 8, 8, 8))
    # A group without a finite one: as bad as the worst of all.
    assert torch.equal(replace_nonfinite(f64(NAN, INF, 3, 2), 2), f64(2, 2, 3, 2))


def make(**options: Any) -> EGGROLLTrainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    options = {"population_size": 8, "seed": 0, **options}
    return EGGROLLTrainer(model.parameters(), model, lambda m: 0.0, **options)


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("shaping", ["standardize", "centered_rank", "raw", lambda f: f**3])
@pytest.mark.parametrize("group_size", [0, 4])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_numbers_poison_nothing(shaping: Any, group_size: int, bad: float) -> None:
    trainer = make(shaping=shaping, group_size=group_size)
    trainer.ask()
    before = flat(trainer)
    metrics = trainer.tell([bad, 1, 2, 3, 4, 5, 6, bad])
    assert metrics["nonfinite"] == 2 / 8
    assert metrics["best_fitness"] == metrics["max_fitness"] == 6, "a NaN or ∞ is never the best"
    assert torch.isfinite(flat(trainer)).all()
    assert not torch.equal(flat(trainer), before)
    assert all(x == x and abs(x) < INF for x in metrics.values())


def test_a_bad_number_does_not_change_what_the_worst_would_have_done() -> None:
    one, two = make(), make()
    one.ask(), two.ask()
    one.tell([NAN, 1, 2, 3, 4, 5, 6, 7])
    two.tell([1, 1, 2, 3, 4, 5, 6, 7])
    assert torch.equal(flat(one), flat(two))


@pytest.mark.parametrize("shaping", ["standardize", "centered_rank"])
def test_a_constant_fitness_moves_nothing(shaping: str) -> None:
    trainer = make(shaping=shaping)
    before = flat(trainer)
    for value in (0.0, 0.1, 1e10):
        trainer.ask()
        trainer.tell([value] * 8)
    assert torch.equal(flat(trainer), before)


@pytest.mark.parametrize("shaping", ["standardize", "centered_rank"])
def test_scores_times_1e4_plus_1000_take_the_same_step(shaping: str) -> None:
    one, two = make(shaping=shaping), make(shaping=shaping)
    f = torch.randn(8, dtype=torch.float64)
    one.ask(), two.ask()
    one.tell(f)
    two.tell(1e4 * f + 1000)
    torch.testing.assert_close(flat(one), flat(two))


def test_a_large_offset_costs_no_ranks() -> None:
    """In float32 all of these would be equal."""
    trainer = make(shaping="centered_rank")
    before = flat(trainer)
    trainer.ask()
    trainer.tell([1e9 + i / 8 for i in range(8)])
    assert not torch.equal(flat(trainer), before)
    assert trainer.history[0]["std_fitness"] > 0.1


def test_top_directions_by_hand() -> None:
    """The pairs of 9 and of 7 are the best two of four; their own deviation counts."""
    f = f64(1, 2, 9, 0, 3, 3, 7, 6)
    kept = f64(9, 0, 7, 6)
    z = (kept - kept.mean()) / kept.std(correction=0) * 2**0.5
    expected = torch.cat([torch.zeros(2).double(), z[:2], torch.zeros(2).double(), z[2:]])
    torch.testing.assert_close(top_directions(0.5)(f), expected)
    torch.testing.assert_close(top_directions(1.0)(f), standardize(f))
    assert top_directions(0.01)(f).count_nonzero() == 2
    assert not top_directions(0.5)(torch.ones(8)).any()


def test_top_directions_are_as_long_as_standardize_in_noise() -> None:
    f = torch.randn(4096, dtype=torch.float64)
    for share in (0.1, 0.5):
        assert top_directions(share)(f).norm().item() == pytest.approx(64)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_shares_that_are_wrong(share: float) -> None:
    with pytest.raises(ConfigurationError, match="share="):
        top_directions(share)
