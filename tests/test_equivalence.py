"""The evaluators differ in speed, never in meaning: over the zoo, all equal plain modules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, make, readout

from eggroll_trainer import EGGROLLTrainer, EggrollWarning, VanillaESTrainer

N = 6
# float64 shows a wrong term, the others a wrong type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def scores(
    model: nn.Module, fitness: Any, trainer: Any = EGGROLLTrainer, **options: Any
) -> tuple[Tensor, Any]:
    """Raw fitnesses of a first generation."""
    options = {"population_size": N, "sigma": 0.2, "seed": 4, **options}
    made = trainer(model.parameters(), model=model, fitness_fn=fitness, **options)
    return made.evaluate(made.ask()), made


def alone(trainer: Any, fitness: Any) -> Tensor:
    """Each member as a plain module of its own, scored by plain PyTorch."""
    population = trainer.ask()
    with torch.no_grad():
        return torch.stack([fitness(population.member(i)).double() for i in range(N)])


def assert_equal(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("rank", [1, 3])
def test_batched_equals_plain_modules(name: str, rank: int) -> None:
    for matricize in (False, True):
        model, args = make(name, torch.float64)
        fitness = readout(args)
        options: dict[str, Any] = {"rank": rank, "matricize": matricize}
        batched, trainer = scores(model, fitness, evaluation="vmap", **options)
        wanted = alone(trainer, fitness)
        assert wanted.std() > 1e-4, "members hardly differ: the test would see nothing"
        assert_equal(batched, wanted, torch.float64)
        sequential, _ = scores(model, fitness, evaluation="sequential", **options)
        assert_equal(sequential, wanted, torch.float64)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    model, args = make(name, dtype)
    fitness = readout(args)
    batched, trainer = scores(model, fitness, evaluation="vmap", rank=2)
    wanted = alone(trainer, fitness)
    assert_equal(batched, wanted, dtype)
    kept = {p.dtype for p in trainer.model.parameters()}
    trainer.tell(batched)
    assert {p.dtype for p in trainer.model.parameters()} == kept == {dtype}


@pytest.mark.parametrize(
    "name",
    ["mlp", "convnet", "tied", "attention_causal", "encoder_eval", "gru", "lstm", "embedding"],
)
def test_autocast(name: str) -> None:
    model, args = make(name)
    plain = readout(args)

    def fitness(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(m)

    batched, trainer = scores(model, fitness, evaluation="vmap", rank=2, matricize=True)
    assert_equal(batched, alone(trainer, fitness), torch.bfloat16)


@pytest.mark.parametrize("name", ZOO)
def test_dense_noise(name: str) -> None:
    model, args = make(name, torch.float64)
    fitness = readout(args)
    batched, trainer = scores(model, fitness, VanillaESTrainer, evaluation="vmap")
    assert_equal(batched, alone(trainer, fitness), torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 5, 6, 100])
@pytest.mark.parametrize("noise_reuse", [0, 2])
def test_chunks(chunk_size: int | None, noise_reuse: int) -> None:
    for name in ("mlp", "convnet", "lstm", "encoder_eval", "embedding"):
        model, args = make(name, torch.float64)
        fitness = readout(args)
        options: dict[str, Any] = {"noise_reuse": noise_reuse, "matricize": True, "rank": 2}
        whole, _ = scores(model, fitness, evaluation="vmap", chunk_size=N, **options)
        parts, _ = scores(model, fitness, evaluation="vmap", chunk_size=chunk_size, **options)
        assert_equal(parts, whole, torch.float64)


@pytest.mark.parametrize("name", ["mlp", "tied", "convnet", "lstm", "encoder_eval", "algebra"])
def test_item(name: str) -> None:
    """A fitness that ends in `.item()`, as most people write it, is batched all the same."""
    model, args = make(name, torch.float64)
    plain = readout(args)

    def fitness(m: nn.Module) -> Any:
        total = 0.0
        for _ in range(2):
            total += plain(m).item()
        return 0.5 - total / 2 + 0.1 * plain(m).abs().item() ** 2

    batched, trainer = scores(model, fitness, evaluation="vmap")
    population = trainer.ask()
    wanted = torch.tensor([fitness(population.member(i)) for i in range(N)], dtype=torch.float64)
    assert_equal(batched, wanted, torch.float64)


class Noisy(nn.Module):
    """Dropout, and random numbers of the fitness's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.1 * torch.randn_like(x))


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness(evaluation: str, randomness: str) -> None:
    """With σ = 0 members differ by their random numbers alone."""
    model, x = Noisy(), torch.randn(4, 8)
    state = torch.get_rng_state()
    options = {"evaluation": evaluation, "randomness": randomness, "chunk_size": 4, "sigma": 0.0}
    first, _ = scores(model, lambda m: m(x).mean(), **options)
    second, trainer = scores(model, lambda m: m(x).mean(), **options)
    assert torch.equal(first, second), "the same seed must draw the same random numbers"
    assert len(first.unique()) == (1 if randomness == "same" else N)
    trainer.tell(second)
    assert not torch.equal(trainer.evaluate(trainer.ask()), first), "each generation its own"
    assert torch.equal(torch.get_rng_state(), state), "the global generator is as it was"


def test_same_randomness_is_one_meaning() -> None:
    """Common random numbers are the same numbers in every evaluator and chunk."""
    model, x = Noisy(), torch.randn(4, 8)
    results = [
        scores(model, lambda m: m(x).mean(), randomness="same", **options)[0]
        for options in (
            {"evaluation": "vmap", "chunk_size": 2},
            {"evaluation": "vmap", "chunk_size": N},
            {"evaluation": "sequential"},
        )
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


def refused(fitness: Any, model: nn.Module | None = None) -> str:
    """Evaluate by "auto": the one warning it gives; the fitnesses must be the loop's."""
    model = model or nn.Linear(8, 3)
    with pytest.warns(EggrollWarning) as caught:
        auto, trainer = scores(model, fitness)
    caught = [w for w in caught if w.category is EggrollWarning]
    assert len(caught) == 1
    assert trainer.evaluator.name == "sequential"
    sequential, _ = scores(model, fitness, evaluation="sequential")
    assert torch.equal(auto, sequential)
    trainer.tell(auto)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step()  # warned once, never again
    assert str(trainer.evaluator.reason) in str(caught[0].message)
    return str(caught[0].message)


X = torch.ones(4, 8)


def branching(m: nn.Module) -> Tensor:
    out = m(X).sum()
    if out > 0:
        return out
    return 2 * out


def selecting(m: nn.Module) -> Tensor:
    out = m(X)
    return out[out > 0].sum()


@pytest.mark.parametrize(
    ("fitness", "operation", "advice"),
    [
        (branching, "if out > 0", "torch.where"),
        (lambda m: float(m(X).sum()), "float(", ".item()"),
        (lambda m: round(m(X).sum().item(), 3), "round(", ".item()"),
        (lambda m: float(f"{m(X).sum().item():.3f}"), ":.3f", ".item()"),
        (lambda m: m(X).numpy().sum(), ".numpy()", "torch operations"),
        (selecting, "out[out > 0]", "mask"),
        (lambda m: m.weight.add_(0.1).sum(), "add_", ""),
    ],
    ids=["if", "float", "round", "format", "numpy", "select", "in-place"],
)
def test_refusals_name_the_line_and_the_way_out(fitness: Any, operation: str, advice: str) -> None:
    message = refused(fitness)
    assert "test_equivalence.py:" in message
    assert operation in message
    assert advice in message


def test_batchnorm_in_training_mode_falls_back() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert "model.eval()" in refused(lambda m: m(X).sum() + m[1].running_mean.sum(), model)
    model.load_state_dict(before)
    scores(model, lambda m: m(X).sum(), evaluation="sequential")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()), "buffers leaked"
    assert model.training


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, about its kernels
def test_an_lstm_with_projections_falls_back() -> None:
    x = torch.randn(3, 5, 8)
    message = refused(lambda m: m(x)[0].square().mean(), nn.LSTM(8, 6, proj_size=4))
    assert "proj_size" in message


def test_operations_that_torch_loops_over_are_right_and_reported() -> None:
    model = nn.Linear(8, 4)
    fitness = lambda m: torch.histc(m(X).sum() + m.weight, bins=4).square().sum()  # noqa: E731
    batched, trainer = scores(model, fitness, evaluation="vmap")
    assert_equal(batched, alone(trainer, fitness), torch.float64)
    assert "aten::histc" in str(trainer.explain())


def test_a_fitness_that_ignores_the_model_falls_back() -> None:
    """One batched pass would give every member the same "random" number."""
    message = refused(lambda m: torch.randn(1).item())
    assert "no operation used" in message
    with pytest.warns(EggrollWarning):
        fitnesses, _ = scores(nn.Linear(2, 2), lambda m: torch.randn(1).item())
    assert len(fitnesses.unique()) == N


def test_vmap_raises_where_auto_falls_back() -> None:
    with pytest.raises(RuntimeError):
        scores(nn.Linear(8, 3), branching, evaluation="vmap")


def test_mistakes_of_the_user_raise_as_they_are() -> None:
    def broken(m: nn.Module) -> Tensor:
        return m(torch.ones(4, 9)).sum()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        scores(nn.Linear(8, 3), broken)
    with pytest.raises(ZeroDivisionError):
        scores(nn.Linear(8, 3), lambda m: 1 / 0)


def test_activation_heavy_members_go_one_after_another_without_a_warning() -> None:
    model = nn.Linear(4, 64)
    x = torch.randn(20_000, 4)
    _, trainer = scores(model, lambda m: m(x).square().mean())
    assert trainer.evaluator.name == "sequential"
    assert "batching would not pay" in str(trainer.evaluator.reason)
    assert "one after another because" in str(trainer.explain())
