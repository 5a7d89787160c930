"""End to end, as users do it: recurrent nets, attention, binary nets, schedules, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, VanillaESTrainer, population_fitness


def test_xor_from_hits_alone() -> None:
    """A fitness that counts: no gradient exists."""
    torch.manual_seed(0)
    x = torch.rand(256, 2) * 2 - 1
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def hits(m: nn.Module) -> float:
        return (m(x).argmax(dim=1) == y).float().mean().item()

    trainer = EGGROLLTrainer(
        model.parameters(),
        model=model,
        fitness_fn=hits,
        population_size=256,
        learning_rate=0.05,
        sigma=0.2,
        optimizer=torch.optim.Adam,
        seed=0,
    )
    assert hits(model) < 0.7
    trainer.train(150, verbose=False)
    assert trainer.evaluator.name == "vmap", "a comparison and .item() are batched"
    assert hits(model) > 0.95


def test_a_binary_network_that_backprop_cannot_train() -> None:
    """Signs as activations: the gradient is zero everywhere."""
    torch.manual_seed(0)
    x = torch.randn(128, 12).sign()
    y = (x[:, :3].sum(dim=1) > 0).long()

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(12, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x).sign())

    model = Binary()
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, model.hidden.weight)
    assert not gradient.any()
    before = float((model(x).argmax(1) == y).float().mean())
    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: -F.cross_entropy(m(x), y),
        population_size=256,
        learning_rate=0.2,
        sigma=0.2,
        seed=0,
    )
    trainer.train(80, verbose=False)
    accuracy = float((model(x).argmax(1) == y).float().mean())
    assert accuracy > max(0.95, before)


def test_a_recurrent_network_remembers() -> None:
    """The first symbol of a sequence, named at its end."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 4, (64, 6))

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 8)
            self.gru, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.gru(self.embed(tokens))[0][:, -1])

    model = Memory()
    trainer = EGGROLLTrainer(
        model.parameters(),
        model=model,
        fitness_fn=lambda m: -F.cross_entropy(m(tokens), tokens[:, 0]),
        population_size=256,
        learning_rate=0.03,
        sigma=0.1,
        optimizer=torch.optim.Adam,
        seed=0,
    )
    history = trainer.train(120, verbose=False)["fitness_history"]
    assert trainer.evaluator.name == "vmap"
    assert history[0] < -1.3
    assert history[-1] > -0.4
    assert float((model(tokens).argmax(1) == tokens[:, 0]).float().mean()) > 0.9


def test_a_transformer_with_dropout_learns_to_sort_by_attention() -> None:
    """Which token of a sequence is the largest: dropout on, a mask for each member."""
    torch.manual_seed(0)
    x = torch.randn(64, 5, 1)
    y = x[..., 0].argmax(dim=1)

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.05, batch_first=True)
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.embed(x)))[..., 0]

    model = Largest()
    trainer = VanillaESTrainer(
        model.parameters(),
        model=model,
        fitness_fn=lambda m: -F.cross_entropy(m(x), y),
        population_size=128,
        learning_rate=0.02,
        sigma=0.05,
        optimizer=torch.optim.Adam,
        seed=0,
        evaluation="vmap",
    )
    trainer.train(60, verbose=False)
    assert model.training
    with torch.no_grad():
        assert float((model.eval()(x).argmax(1) == y).float().mean()) > 0.85


def test_a_simulator_for_the_whole_population() -> None:
    """A point mass that all members steer at once, each with inputs of its own."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    @population_fitness
    def steer(population: Any) -> Tensor:
        position = torch.ones(len(population))
        speed, cost = torch.zeros(len(population)), torch.zeros(len(population))
        for _ in range(20):
            seen = torch.stack([position, speed], dim=-1)[:, None]  # (N, 1, 2)
            force = population(seen, in_dims=0)[:, 0, 0]
            speed = speed + 0.3 * force.clamp(-1, 1)
            position = position + 0.3 * speed
            cost = cost + position.square() + 0.1 * speed.square()
        return -cost

    trainer = EGGROLLTrainer(
        policy.parameters(),
        model=policy,
        fitness_fn=steer,
        population_size=128,
        learning_rate=0.2,
        sigma=0.2,
        seed=0,
    )
    history = trainer.train(40, verbose=False)["fitness_history"]
    assert history[0] < -50
    assert history[-1] > -12


def test_a_black_box_program_scores_members_one_by_one(tmp_path: Path) -> None:
    """What no batch can do: save the member, load it elsewhere, call NumPy."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(32, 4)
    target = (x @ torch.randn(4, 2)).numpy()

    def black_box(m: nn.Module) -> float:
        torch.save(m.state_dict(), tmp_path / "member.pt")
        other = nn.Linear(4, 2)
        other.load_state_dict(torch.load(tmp_path / "member.pt"))
        return -float(((other(x).detach().numpy() - target) ** 2).mean())

    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        black_box,
        population_size=32,
        learning_rate=0.3,
        evaluation="sequential",
        seed=0,
    )
    history = trainer.train(40, verbose=False)["fitness_history"]
    assert history[-1] > 0.2 * history[0]


def test_a_whole_project(tmp_path: Path) -> None:
    """Groups, schedules, batches, a checkpoint half way, the best member at the end."""
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], dim=1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=False
    )

    def make() -> EGGROLLTrainer:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        return EGGROLLTrainer(
            [
                {"params": model[0].parameters(), "sigma": 0.05},
                {"params": model[2].parameters(), "lr": 0.02, "rank": 2},
            ],
            model=model,
            fitness_fn=lambda m, batch: -F.mse_loss(m(batch[0]), batch[1]),
            population_size=128,
            learning_rate=0.01,
            sigma=lambda generation: 0.1 / (1 + generation / 50),
            optimizer=torch.optim.AdamW,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 252),
            data=loader,
            seed=5,
        )

    first = make()
    first.train(125, verbose=False)
    first.save(tmp_path / "half.pt")
    trainer = make()
    trainer.load(tmp_path / "half.pt")
    history = trainer.train(125, verbose=False)["fitness_history"]
    first.train(125, verbose=False)
    assert history == first.fitness_history
    assert len(history) == 250
    assert history[-1] > 0.4 * history[0]
    best = trainer.get_best_model()
    assert isinstance(best, nn.Sequential)
    torch.save(best.state_dict(), tmp_path / "best.pt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = torch.randn(32, 4, dtype=dtype)
    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: -(m(x) - 1).square().mean(),
        population_size=64,
        learning_rate=0.3,
        seed=0,
    )
    history = trainer.train(40, verbose=False)["fitness_history"]
    assert history[-1] > 0.5 * history[0]
    assert model[0].weight.dtype == dtype
