"""Policies: statistics, bounds, memory, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eggroll_trainer import CheckpointError, ConfigurationError, EGGROLLTrainer
from eggroll_trainer.policies import Clip, Normalize, Policy, Squash


def test_merged_statistics_are_those_of_everything_seen() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n, 3, dtype=torch.float64) * 5 + 1000 for n in (7, 1, 100)]
    normalize = Normalize(3)
    for part in parts:
        normalize.merge(len(part), part.mean(dim=0), part.var(dim=0, correction=0))
    everything = torch.cat(parts)
    assert normalize.count.item() == len(everything)
    torch.testing.assert_close(normalize.mean, everything.mean(dim=0))
    torch.testing.assert_close(normalize.variance, everything.var(dim=0, correction=0))
    out = normalize(everything)
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(out.var(dim=0, correction=0), torch.ones(3, dtype=torch.float64))


def test_before_anything_is_seen_observations_pass_and_bounds_hold() -> None:
    normalize = Normalize(2, clip=5.0)
    x = torch.tensor([[1.0, -2.0], [7.0, -70.0]])
    assert normalize(x).tolist() == [[1.0, -2.0], [5.0, -5.0]]
    normalize.merge(0, torch.ones(2), torch.ones(2))
    assert normalize.count.item() == 0


def test_a_constant_observation_does_not_divide_by_zero() -> None:
    normalize = Normalize(1)
    normalize.merge(4, torch.tensor([2.0]), torch.tensor([0.0]))
    assert normalize(torch.tensor([[2.0]])).item() == 0
    assert normalize(torch.tensor([[3.0]])).isfinite().all()


def test_squash_reaches_its_bounds_and_no_further() -> None:
    squash = Squash([-1.0, 0.0], [1.0, 4.0])
    assert squash(torch.zeros(1, 2)).tolist() == [[0.0, 2.0]]
    assert squash(torch.full((1, 2), 50.0)).tolist() == [[1.0, 4.0]]
    assert squash(torch.full((1, 2), -50.0)).tolist() == [[-1.0, 0.0]]
    for low, high in ((1.0, 1.0), (0.0, float("inf"))):
        with pytest.raises(ConfigurationError, match=r"low < high|finite bounds"):
            Squash(low, high)


def test_clip_cuts_off_what_is_beyond() -> None:
    clip = Clip([-1.0, 0.0], [1.0, float("inf")])
    assert clip(torch.tensor([[-3.0, -3.0], [0.5, 99.0]])).tolist() == [[-1.0, 0.0], [0.5, 99.0]]
    with pytest.raises(ConfigurationError, match="low < high"):
        Clip(1.0, 0.0)


@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("hidden", [(), (8,)])
def test_a_policy_comes_back_from_its_file(
    tmp_path: Path, hidden: tuple[int, ...], memory: int, squash: bool
) -> None:
    policy = Policy(3, 2, hidden, memory, low=-2.0, high=[1.0, 2.0], squash=squash)
    torch.nn.init.normal_(policy.head.weight)
    policy.normalize.merge(5, torch.ones(3), torch.full((3,), 4.0))
    policy.save(tmp_path / "policy.pt")
    loaded = Policy.load(tmp_path / "policy.pt")
    rng = np.random.default_rng(0)
    for _ in range(4):  # a memory, if any, is carried along
        observation = rng.normal(size=3)
        action = policy.act(observation)
        assert action.shape == (2,)
        np.testing.assert_array_equal(action, loaded.act(observation))
    loaded.begin()
    same = np.array_equal(policy.act(observation), loaded.act(observation))
    assert same == (memory == 0), "begin() forgets"


def test_discrete_actions_are_python_integers() -> None:
    policy = Policy(3, 4, discrete=True)
    with torch.no_grad():
        policy.head.bias[2] = 1
    assert policy.act(np.zeros(3)) == 2
    assert type(policy.act(np.zeros(3))) is int


def test_files_and_bounds_that_are_wrong(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    EGGROLLTrainer(model.parameters(), model, lambda _: 0.0, 2).save(tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="holds no policy"):
        Policy.load(tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Policy.load(tmp_path / "nothing.pt")
    with pytest.raises(ConfigurationError, match="both bounds"):
        Policy(3, 2, low=-1.0)
