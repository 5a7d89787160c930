"""Each equation against a few lines of dense arithmetic, and what theory says of the estimate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, VanillaESTrainer
from eggroll_trainer.perturbations import KeyedPerturbations, ParameterNoise

BOTH = pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])


def make(trainer: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    options = {"population_size": 12, "sigma": 0.1, "learning_rate": 0.3, "seed": 2, **options}
    x = torch.randn(7, 5, dtype=torch.float64)
    return trainer(model.parameters(), model, lambda m: -m(x).square().mean(), **options)


def deviations(trainer: Any) -> dict[str, Tensor]:
    """σ E_i, read off the members."""
    population, centre = trainer.ask(), dict(trainer.model.named_parameters())
    members = [population.member_weights(i) for i in range(len(population))]
    return {k: torch.stack([m[k] - centre[k] for m in members]).detach() for k in centre}


@BOTH
@pytest.mark.parametrize("noise_reuse", [0, 2])
@pytest.mark.parametrize("group_size", [0, 4])
def test_a_step_is_the_formula(trainer: Any, noise_reuse: int, group_size: int) -> None:
    """θ ← θ + lr · √N · mean_i(w_i σ E_i), w = (f − mean of group) / std of all."""
    own = {"rank": 2} if trainer is EGGROLLTrainer else {}
    made = make(trainer, noise_reuse=noise_reuse, group_size=group_size, **own)
    deviation = deviations(made)
    f = torch.randn(12, dtype=torch.float64)
    groups = f.view(-1, group_size or 12)
    w = (groups - groups.mean(1, keepdim=True)).flatten() / f.std(correction=0)
    before = {k: p.detach().clone() for k, p in made.model.named_parameters()}
    made.tell(f)
    for name, p in made.model.named_parameters():
        update = math.sqrt(12) * torch.einsum("i,i...->...", w, deviation[name]) / 12
        torch.testing.assert_close(p.detach(), before[name] + 0.3 * update, rtol=1e-6, atol=1e-8)


def test_weighted_mean_is_the_mean_of_dense_matrices() -> None:
    """And not (Σ w A)(Σ w B)ᵀ, which is another matrix."""
    spec = ParameterNoise("w", torch.Size((4, 6)), torch.float64, torch.device("cpu"), rank=3)
    perturbations = KeyedPerturbations([spec], 1, 0, 10, False, {})
    w = torch.randn(10, dtype=torch.float64)
    a, b = perturbations.chunk(0, 10).factors["w"]
    dense = torch.einsum("krm,krn->kmn", a, b)
    mean = perturbations.weighted_mean(w)["w"]
    torch.testing.assert_close(mean, torch.einsum("k,kmn->mn", w, dense) / 10)
    assert int(torch.linalg.matrix_rank(mean)) == 4, "the mean of rank-3 matrices has full rank"


@BOTH
@pytest.mark.parametrize("population_size", [64, 1024])
def test_in_pure_noise_a_step_is_learning_rate_times_sigma(
    trainer: Any, population_size: int
) -> None:
    """So the learning rate is the fraction of σ per generation, whatever N and the rank are."""
    model = nn.Linear(40, 40)
    made = trainer(
        model.parameters(),
        model,
        lambda m: 0.0,
        population_size=population_size,
        sigma=0.2,
        learning_rate=0.1,
        seed=0,
    )
    before = model.weight.detach().clone()
    made.ask()
    made.tell(torch.randn(population_size))
    moved = float((model.weight.detach() - before).std())
    assert moved == pytest.approx(0.1 * 0.2, rel=0.2)


def true_gradient(made: Any) -> Tensor:
    made.fitness_fn(made.model).backward()
    gradient = torch.cat([p.grad.flatten() for p in made.model.parameters()])
    for p in made.model.parameters():
        p.grad = None
    return gradient


@BOTH
def test_the_estimate_turns_towards_the_gradient_as_theory_says(trainer: Any) -> None:
    r"""With antithetic pairs of a nearly linear fitness, cos ≈ √(K / (K + D)) for K directions.

    Dense noise: the projections on K random directions of D. Low-rank noise has heavier tails, so
    it is somewhat below; both must follow the curve.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    x, y = torch.randn(64, 12, dtype=torch.float64), torch.randint(0, 4, (64,))
    d = sum(p.numel() for p in model.parameters())
    cosines = {}
    for n in (64, 512, 4096):
        values = []
        for seed in range(4):
            made = trainer(
                model.parameters(),
                model,
                lambda m: -F.cross_entropy(m(x), y),
                population_size=n,
                sigma=1e-3,
                seed=seed,
            )
            gradient = true_gradient(made)
            fitnesses = made.evaluate(made.ask())
            update = made.compute_update(
                made.ask().perturbations, (fitnesses - fitnesses.mean()) / fitnesses.std()
            )
            flat = torch.cat([update[k].flatten() for k, _ in model.named_parameters()])
            values.append(float(F.cosine_similarity(flat, gradient, dim=0)))
        cosines[n] = sum(values) / len(values)
        assert cosines[n] == pytest.approx(math.sqrt(n / 2 / (n / 2 + d)), abs=0.08), cosines
    assert cosines[64] < cosines[512] < cosines[4096]


@BOTH
def test_adam_and_weight_decay_are_torchs_own(trainer: Any) -> None:
    """The optimizer is handed −g as a gradient, and nothing else happens."""
    made = make(trainer, optimizer=torch.optim.AdamW, learning_rate=0.01)
    reference = [p.detach().clone().requires_grad_() for p in made.model.parameters()]
    adam = torch.optim.AdamW(reference, lr=0.01)
    for _ in range(3):
        deviation, f = deviations(made), torch.randn(12, dtype=torch.float64)
        w = ((f - f.mean()) / f.std(correction=0)).float().double()
        made.tell(f)
        for p, name in zip(reference, deviation, strict=True):
            p.grad = -math.sqrt(12) * torch.einsum("i,i...->...", w, deviation[name]) / 12
        adam.step()
    for p, q in zip(made.model.parameters(), reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_decay_reaches_the_weights() -> None:
    model = nn.Linear(3, 3)
    made = EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: 0.0,
        optimizer=lambda groups, lr: torch.optim.SGD(groups, lr=lr, weight_decay=0.5),
        learning_rate=0.1,
        population_size=4,
        seed=0,
    )
    before = model.weight.detach().clone()
    made.ask()
    made.tell(torch.zeros(4))  # equal fitnesses: decay alone
    torch.testing.assert_close(model.weight.detach(), before * 0.95)


def test_tied_weights_are_one_parameter() -> None:
    """One draw, used at both places; one update."""
    body = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = body.weight
    x = torch.randn(3, 4)
    made = EGGROLLTrainer(
        model.parameters(), model, lambda m: m(x).sum(), population_size=6, sigma=0.3, seed=0
    )
    fitnesses = made.evaluate(made.ask())
    for i in range(6):
        w = made.ask().member_weights(i)
        assert list(w) == ["0.weight"]
        expected = (torch.tanh(x @ w["0.weight"].T) @ w["0.weight"].T).sum()
        assert float(fitnesses[i]) == pytest.approx(float(expected), abs=1e-4)
    made.tell(fitnesses)
    assert model[0].weight is model[2].weight


def test_groups_have_their_own_sigma_rank_and_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False))
    made = EGGROLLTrainer(
        [
            {"params": model[0].parameters(), "lr": 0.1, "sigma": 0.5, "rank": 4},
            {"params": [model[1].weight], "lr": 0.0},
        ],
        model,
        lambda m: m(torch.ones(1, 20)).sum(),
        population_size=512,
        sigma=0.01,
        seed=0,
        evaluation="vmap",
    )
    deviation = deviations(made)
    assert float(deviation["0.weight"].std()) == pytest.approx(0.5, rel=0.05)
    assert float(deviation["1.weight"].std()) == pytest.approx(0.01, rel=0.05)
    assert int(torch.linalg.matrix_rank(deviation["0.weight"][0], atol=1e-3)) == 4
    assert int(torch.linalg.matrix_rank(deviation["1.weight"][0], atol=1e-4)) == 1
    before = [p.detach().clone() for p in model.parameters()]
    made.step()
    assert not torch.equal(before[0], model[0].weight)
    assert torch.equal(before[1], model[1].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_accumulate_in_low_precision_as_in_float32(dtype: torch.dtype) -> None:
    """A step of 1e-4 σ is far below what bfloat16 can add to a weight; a thousand are not."""

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(dtype)
        made = EGGROLLTrainer(
            model.parameters(),
            model,
            lambda m: 0.0,
            population_size=8,
            learning_rate=1e-3,
            sigma=0.1,
            seed=0,
        )
        before = model.weight.detach().float().clone()
        generator = torch.Generator().manual_seed(1)
        for _ in range(1000):
            made.ask()
            made.tell(torch.randn(8, generator=generator))
        assert model.weight.dtype == dtype
        return model.weight.detach().float() - before, before

    moved, weights = run(dtype)
    expected, _ = run(torch.float32)
    assert float(expected.abs().mean()) > 1e-3
    rounding = torch.finfo(dtype).eps * float(weights.abs().max())
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=2 * rounding)


def test_weights_loaded_into_a_low_precision_model_are_used() -> None:
    model = nn.Linear(4, 4).bfloat16()
    made = EGGROLLTrainer(model.parameters(), model, lambda m: 0.0, population_size=4, seed=0)
    made.ask()
    made.tell([0.0, 1.0, 2.0, 3.0])
    with torch.no_grad():
        model.weight.fill_(5.0)
    made.ask()
    made.tell([0.0, 1.0, 2.0, 3.0])
    assert float((model.weight.detach() - 5).abs().max()) < 0.5
