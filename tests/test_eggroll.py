"""`EGGROLLTrainer`: its arguments one by one, as the description of the package gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from eggroll_trainer import EGGROLLTrainer, EggrollWarning, ESTrainer, VanillaESTrainer


class SimpleModel(nn.Module):
    """The model of the package's description."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.fc2 = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def make(trainer: Any = EGGROLLTrainer, fitness_fn: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model, x = SimpleModel(), torch.randn(16, 10)
    target = torch.sin(x.sum(dim=1, keepdim=True))
    score = fitness_fn or (lambda m: -F.mse_loss(m(x), target))
    options = {"population_size": 64, "seed": 42, **options}
    return trainer(model.parameters(), model=model, fitness_fn=score, **options)


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_the_description_runs_unchanged() -> None:
    """A fitness that ignores the model included: scored one after another, with a warning."""

    def fitness_fn(model: nn.Module) -> float:
        return torch.randn(1).item()

    model = SimpleModel()
    trainer = EGGROLLTrainer(
        model.parameters(),
        model=model,
        fitness_fn=fitness_fn,
        population_size=256,
        learning_rate=0.01,
        sigma=0.1,
        rank=1,
        noise_reuse=0,
        group_size=0,
        freeze_nonlora=False,
        seed=42,
    )
    with pytest.warns(EggrollWarning, match="no operation used any of the perturbed parameters"):
        result = trainer.train(num_generations=3)
    assert result["generation"] == 3
    assert 2 < trainer.best_fitness < 5, "the best of 768 normal numbers"


def test_the_custom_trainer_of_the_description() -> None:
    class MyESTrainer(ESTrainer):
        def sample_perturbations(self, population_size):  # type: ignore[no-untyped-def]
            param_dim = self.current_params.shape[0]
            return torch.randn(population_size, param_dim, device=self.device)

        def compute_update(self, perturbations, fitnesses):  # type: ignore[no-untyped-def]
            weights = (fitnesses - fitnesses.mean()) / fitnesses.std()
            return (weights[:, None] * perturbations).mean(dim=0)

    trainer = make(MyESTrainer, learning_rate=0.2)
    result = trainer.train(num_generations=40, verbose=False)
    assert result["fitness_history"][-1] > result["fitness_history"][0] + 0.05
    assert torch.equal(flat(trainer), flat_after(MyESTrainer, 40, learning_rate=0.2))


def flat_after(trainer: Any, generations: int, **options: Any) -> Tensor:
    made = make(trainer, **options)
    made.train(generations, verbose=False)
    return flat(made)


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise_reuse": 0},
        {"group_size": 16},
        {"shaping": "centered_rank"},
        {"optimizer": torch.optim.Adam, "learning_rate": 0.02},
        {"evaluation": "sequential"},
        {"evaluation": "vmap", "chunk_size": 10},
        {"sigma": lambda generation: 0.1 * 0.99**generation},
    ],
    ids=str,
)
def test_every_way_of_training_learns(trainer: Any, options: dict[str, Any]) -> None:
    made = make(trainer, **{"learning_rate": 0.2, **options})
    history = made.train(60, verbose=False)["fitness_history"]
    assert history[-1] > 0.5 * history[0], "the error has halved"


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_every_rank_learns(rank: int) -> None:
    history = make(rank=rank, learning_rate=0.2).train(60, verbose=False)["fitness_history"]
    assert history[-1] > 0.5 * history[0]


def test_learning_rate_zero_does_nothing() -> None:
    made = make(learning_rate=0.0)
    before = flat(made)
    made.train(3, verbose=False)
    assert torch.equal(flat(made), before)


def test_the_seed_decides_everything() -> None:
    one, two, other = (flat_after(EGGROLLTrainer, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_seed_0_is_a_seed() -> None:
    assert torch.equal(flat_after(EGGROLLTrainer, 2, seed=0), flat_after(EGGROLLTrainer, 2, seed=0))


def test_a_step_moves_along_the_better_members() -> None:
    """Fitness −|θ|²: from far away, every step brings the weights nearer."""
    made = make(fitness_fn=lambda m: -sum(p.square().sum() for p in m.parameters()))
    lengths = [float(flat(made).norm())]
    for _ in range(10):
        made.train(10, verbose=False)
        lengths.append(float(flat(made).norm()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.7 * lengths[0]


def test_explain_before_and_after() -> None:
    made = make(rank=2)
    report = made.explain()
    assert made.generation == 0, "looking changes nothing"
    assert str(report) == repr(report)
    text = str(report)
    for expected in (
        *("fc1.weight", "20×10", "low-rank 2", "F.linear", "fc1.bias", "full"),
        *("full (rank 2 > 1)", "evaluation: vmap", "MiB of noise", "the multiplications of inf"),
    ):
        assert expected in text
    rows = {row.name: row for row in report.rows}
    assert rows["fc1.weight"].noise == 2 * (20 + 10)
    assert rows["fc2.weight"].noise == 20
    made.model.fc1.bias.requires_grad_(False)
    assert "frozen" in str(made.explain())


def test_explain_lists_what_was_formed() -> None:
    x = torch.ones(3, 10)
    made = make(fitness_fn=lambda m: (m(x) + m.fc1.weight.tanh().sum()).sum())
    text = str(made.explain())
    assert "tanh (dense)" in text
    assert "so each member's weight is formed" in text
    assert made.explain().cost > 1.1


def test_devices_and_attributes() -> None:
    made = make(device="cpu")
    assert made.device == torch.device("cpu")
    assert (made.sigma, made.learning_rate, made.population_size) == (0.1, 0.05, 64)
    assert made.lr_scheduler is None
    assert isinstance(made.optimizer, torch.optim.SGD)
    assert made.best_fitness == -float("inf")
    assert made.generator.device == made.device
