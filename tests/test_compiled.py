"""`compile=True`: the same meaning, faster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_equivalence import TOLERANCE, alone, assert_equal, scores
from torch import Tensor, nn
from zoo import make, readout

from eggroll_trainer import (
    ConfigurationError,
    EGGROLLTrainer,
    FitnessError,
    NotBatchableError,
    VanillaESTrainer,
    population_fitness,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler"),
    # torch's compiler uses what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

KINDS = ["mlp", "convnet", "encoder_eval"]


@pytest.mark.parametrize("name", KINDS)
def test_compiled_equals_plain_modules(name: str) -> None:
    model, args = make(name)
    fitness = readout(args)
    options: dict[str, Any] = {"rank": 2, "matricize": True, "chunk_size": 4}  # 4 + 2 members
    compiled, trainer = scores(model, fitness, evaluation="vmap", compile=True, **options)
    assert trainer.evaluator.name == "vmap, compiled"
    assert_equal(compiled, alone(trainer, fitness), torch.float32)


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 70).view(14, 5)
Y = torch.arange(14) % 3
BATCHES = [(X[:6], Y[:6]), (X[6:12], Y[6:12]), (X[12:], Y[12:])]  # two shapes


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return -F.cross_entropy(model(batch[0]), batch[1])


def trainer(kind: Any = EGGROLLTrainer, **options: Any) -> Any:
    model = classifier(options.pop("dropout", 0.0))
    options = {"population_size": 8, "seed": 0, "data": BATCHES, "evaluation": "vmap", **options}
    options.setdefault("fitness_fn", cross_entropy)
    return kind(model.parameters(), model, optimizer=torch.optim.Adam, **options)


def weights(made: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@pytest.mark.parametrize("kind", [EGGROLLTrainer, VanillaESTrainer])
def test_a_run_is_the_same(kind: Any) -> None:
    """Two shapes of batches, and a schedule of σ."""
    options = {"sigma": lambda g: 0.2 * 0.9**g}
    plain, compiled = (trainer(kind, compile=c, **options) for c in (False, True))
    for made in (plain, compiled):
        made.train(8, verbose=False)
    assert plain.fitness_history == pytest.approx(compiled.fitness_history, rel=1e-4)
    torch.testing.assert_close(weights(plain), weights(compiled), rtol=1e-3, atol=1e-4)


def test_a_graph_for_each_shape_and_mode() -> None:
    made = trainer(compile=True, chunk_size=6, dropout=0.5)  # 6 members, and 2 as they are
    made.train(6, verbose=False)
    assert len(made.evaluator._compiled) == 2
    made.model.eval()
    made.step()
    assert len(made.evaluator._compiled) == 3
    made.fitness_fn = lambda m, batch: -m(batch[0]).square().mean()
    assert made.step()["mean_fitness"] != pytest.approx(made.history[-2]["mean_fitness"], rel=0.01)
    assert len(made.evaluator._compiled) == 1, "those of another function are gone"


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_a_run_with_dropout_resumes_bit_for_bit(randomness: str, tmp_path: Path) -> None:
    options = {"dropout": 0.5, "compile": True, "randomness": randomness, "chunk_size": 4}
    whole, first, second = (trainer(**options) for _ in range(3))
    whole.train(6, verbose=False)
    first.train(3, verbose=False)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.train(3, verbose=False)
    assert torch.equal(weights(whole), weights(second))


def test_population_fitness() -> None:
    each = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(2))

    @population_fitness
    def score(population: Any) -> Tensor:
        shared = population(X)
        return -shared.square().mean(dim=(1, 2)) - population(each, in_dims=0).abs().mean(
            dim=(1, 2)
        )

    results = []
    for compile in (False, True):
        made = trainer(compile=compile, fitness_fn=score, data=None, chunk_size=8)
        results.append(made.evaluate(made.ask()))
        made.train(2, verbose=False)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_compiled_says_so() -> None:
    def branching(m: nn.Module, batch: Any) -> Tensor:
        out = m(batch[0]).mean()
        return out if out > 0 else -out

    for wrong, error in (
        (branching, RuntimeError),
        (lambda m, batch: m(batch[0]), FitnessError),
        (lambda m, batch: torch.tensor(1.0), NotBatchableError),
    ):
        made = trainer(compile=True, fitness_fn=wrong, chunk_size=8)
        before = weights(made)
        with pytest.raises(error):
            made.step()
        assert torch.equal(weights(made), before)
    with pytest.raises(ConfigurationError, match="compile='yes': expected True or False"):
        trainer(compile="yes")


def test_bfloat16() -> None:
    def score(m: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(m, (batch[0].bfloat16(), batch[1])).float()

    results = []
    for compile in (False, True):
        model = classifier().bfloat16()
        made = EGGROLLTrainer(
            model.parameters(), model, score, 8, data=BATCHES, seed=0, chunk_size=8,
            compile=compile, evaluation="vmap",
        )  # fmt: skip
        results.append(made.evaluate(made.ask()))
    torch.testing.assert_close(*results, rtol=TOLERANCE[torch.bfloat16], atol=3e-2)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers(randomness: str) -> None:
    """Of their own for each member and generation, unless they are to be the same."""
    made = trainer(
        compile=True, fitness_fn=lambda m, batch: torch.rand(()) + 0 * m(batch[0]).mean(),
        randomness=randomness, chunk_size=4, data=[BATCHES[0]],
    )  # fmt: skip
    drawn = []
    for _ in range(2):
        drawn += made.evaluate(made.ask()).tolist()
        made.tell(range(8))
    assert len(set(drawn)) == (16 if randomness == "different" else 2)


def test_tensors_that_the_fitness_holds_are_read_anew() -> None:
    factor = torch.ones(())
    made = trainer(
        compile=True, fitness_fn=lambda m, batch: factor * cross_entropy(m, batch),
        chunk_size=8, data=[BATCHES[0]], learning_rate=0.0, sigma=1e-4,
    )  # fmt: skip
    before = made.step()["mean_fitness"]
    factor.fill_(3.0)
    assert made.step()["mean_fitness"] == pytest.approx(3 * before, rel=1e-2)


def test_a_model_that_torch_compiled() -> None:
    """A batched pass evaluates the model that it wraps; its parameters have names of their own."""
    fitness = lambda m: cross_entropy(m, BATCHES[0])  # noqa: E731
    results = []
    for evaluation in ("vmap", "sequential"):
        model = torch.compile(classifier())
        made = EGGROLLTrainer(model.parameters(), model, fitness, 6, seed=4, evaluation=evaluation)
        results.append(made.evaluate(made.ask()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
