"""Noise: unit variance, right rank, pairs, independence, and a pure function of its key."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, VanillaESTrainer
from eggroll_trainer.noise import Noise, NoiseSpec, derive_seed
from eggroll_trainer.perturbations import KeyedPerturbations, ParameterNoise

SIGMA = 0.1


def make(seed: int | None = 1, trainer: Any = EGGROLLTrainer, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Conv1d(16, 8, 2))
    options = {"population_size": 256, "sigma": SIGMA, **options}
    return trainer(model.parameters(), model=model, fitness_fn=lambda m: 0.0, seed=seed, **options)


def noise(trainer: Any) -> dict[str, Tensor]:
    """Each member's weights minus the centre's, over σ: `(population_size, *shape)`."""
    population = trainer.ask()
    members = [population.member_weights(i) for i in range(len(population))]
    centre = dict(trainer.model.named_parameters())
    return {
        name: torch.stack([(m[name] - centre[name]) / SIGMA for m in members]).detach()
        for name in members[0]
    }


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs())


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("matricize", [False, True])
def test_unit_variance_at_every_rank(rank: int, matricize: bool) -> None:
    for name, e in noise(make(rank=rank, population_size=2048, matricize=matricize)).items():
        assert abs(float(e.mean())) < 0.02, name
        assert abs(float(e.std()) - 1) < 0.03, name


@pytest.mark.parametrize("rank", [1, 3])
def test_a_member_has_the_rank_asked_for(rank: int) -> None:
    values = torch.linalg.svdvals(noise(make(rank=rank))["0.weight"])
    assert float((values[:, rank] / values[:, 0]).max()) < 1e-4
    assert float((values[:, rank - 1] / values[:, 0]).min()) > 1e-4


def test_dense_noise_has_full_rank() -> None:
    e = noise(make(trainer=VanillaESTrainer))["0.weight"]
    assert abs(float(e.std()) - 1) < 0.03
    assert int(torch.linalg.matrix_rank(e).min()) == 16


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
def test_pairs(trainer: Any) -> None:
    for name, e in noise(make(trainer=trainer)).items():
        torch.testing.assert_close(e[0::2], -e[1::2], atol=1e-5, rtol=1e-4)
        assert correlation(e[0::4], e[2::4]) < 0.1, name
    for name, e in noise(make(trainer=trainer, noise_reuse=0)).items():
        assert correlation(e[0::2], e[1::2]) < 0.1, name


def test_everything_is_independent() -> None:
    """Layers of one shape, a bias and its layer's factor, seeds, neighbours, generations."""
    one, two = noise(make(1, noise_reuse=0)), noise(make(2, noise_reuse=0))
    assert correlation(one["0.weight"], one["1.weight"]) < 0.02
    assert correlation(one["0.bias"], one["1.bias"]) < 0.06
    assert correlation(one["0.weight"], two["0.weight"]) < 0.02
    left, _, right = torch.linalg.svd(one["0.weight"])
    for factor in (left[:, :, 0], right[:, 0]):
        assert float(torch.cosine_similarity(factor, one["0.bias"]).abs().max()) < 0.95
    trainer = make(1, noise_reuse=0)
    before = noise(trainer)["0.weight"]
    trainer.tell(torch.randn(256))
    after = noise(trainer)["0.weight"]
    for shift in (0, 1, 2):  # also against the neighbours' draws of the last generation
        assert correlation(before, after.roll(shift, 0)) < 0.02


def test_generations_never_repeat() -> None:
    """No sum or shift of the key: 2¹⁶ generations, and neighbours, all have their own draw."""
    spec = {"w": NoiseSpec((3,), 1.0, torch.float32, torch.device("cpu"))}
    seen = {
        tuple(Noise(seed, generation, spec, 2, {}).draw(0, 2)["w"].flatten().tolist())
        for seed in (0, 1)
        for generation in [*range(200), *(2**k for k in range(8, 34))]
    }
    assert len(seen) == 2 * (200 + 26)
    keys = [(s, g, name, b) for s in (0, 1) for g in (0, 1) for name in ("a", "b") for b in (0, 1)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert derive_seed("a", "b") != derive_seed("ab")
    assert 2**32 < derive_seed(0, 0) < 2**64


def test_seeds() -> None:
    assert torch.equal(noise(make(0))["0.weight"], noise(make(0))["0.weight"])
    assert not torch.equal(noise(make(None))["0.weight"], noise(make(None))["0.weight"])
    trainer = make(None)  # a run without a seed has one all the same, and can be repeated
    assert torch.equal(noise(trainer)["0.weight"], noise(make(trainer.seed))["0.weight"])


def test_the_same_in_another_process() -> None:
    """No `hash()` of a name, which differs from process to process."""
    code = (
        "import torch; from eggroll_trainer.noise import Noise, NoiseSpec\n"
        "spec = {'layer.weight': NoiseSpec((3,), 1.0, torch.float32, torch.device('cpu'))}\n"
        "print(Noise(1, 2, spec, 2, {}).draw(0, 2)['layer.weight'].tolist())"
    )
    runs = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout}
    runs.add(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert len(runs) == 1


def test_a_pure_function_of_the_key() -> None:
    """Whatever the order, the range, the memory and the number of threads."""
    specs = {
        "a": NoiseSpec((2, 300), 1.0, torch.float32, torch.device("cpu")),
        "b": NoiseSpec((), 0.5, torch.float64, torch.device("cpu")),
    }
    whole = Noise(1, 2, specs, 1000, {}).draw(0, 1000)
    drawn_anew = Noise(1, 2, specs, 1000, {}, memory_budget=0)
    for start, stop in ((990, 1000), (0, 1), (17, 300), (16, 17), (0, 1000)):
        for name, part in drawn_anew.draw(start, stop).items():
            assert torch.equal(part, whole[name][start:stop]), name
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = Noise(1, 2, specs, 1000, {}).draw(0, 1000)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(alone[name], whole[name]) for name in specs)
    fewer = Noise(1, 2, specs, 70, {}).draw(0, 70)
    assert all(torch.equal(fewer[name], whole[name][:70]) for name in specs)


def test_storage_is_written_over_and_not_mixed_up() -> None:
    spec = {"w": NoiseSpec((5,), 1.0, torch.float32, torch.device("cpu"))}
    storage: dict[str, Tensor] = {}
    first = Noise(0, 0, spec, 4, storage).draw(0, 4)["w"].clone()
    second = Noise(0, 1, spec, 4, storage).draw(0, 4)["w"]
    assert not torch.equal(first, second)
    assert torch.equal(Noise(0, 0, spec, 4, storage).draw(0, 4)["w"], first)


def test_the_update_is_made_of_the_noise_that_was_evaluated() -> None:
    """Noise drawn anew for the update under other keys would make it pure noise."""
    parameters = [
        ParameterNoise("w", torch.Size((6, 5)), torch.float64, torch.device("cpu"), rank=2),
        ParameterNoise("b", torch.Size((6,)), torch.float64, torch.device("cpu"), rank=None),
    ]
    perturbations = KeyedPerturbations(parameters, 3, 1, 300, True, {})
    perturbations.noise._kept = (0, 0, {})  # as if it had not fitted into memory
    chunks = [perturbations.chunk(i, i + 2) for i in range(0, 300, 2)]
    weights = torch.randn(300, dtype=torch.float64)
    pair = (weights[0::2] - weights[1::2]) / 300
    mean = perturbations.weighted_mean(weights)
    low = sum(
        c * (chunk.factors["w"][0][0].T @ chunk.factors["w"][1][0])
        for c, chunk in zip(pair, chunks, strict=True)
    )
    torch.testing.assert_close(mean["w"], low)
    full = sum(c * chunk.full["b"][0] for c, chunk in zip(pair, chunks, strict=True))
    torch.testing.assert_close(mean["b"], full)


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_no_global_generator_is_read_or_written(trainer: Any, evaluation: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4)

    def run() -> list[Tensor]:
        made = trainer(
            model.parameters(),
            model,
            lambda m: m(x).mean(),
            population_size=4,
            seed=1,
            evaluation=evaluation,
        )
        made.train(2, verbose=False)
        return [p.detach().clone() for p in model.parameters()]

    start = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = run()
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert states[2] == random.getstate()
    torch.manual_seed(99)
    model.load_state_dict(start)
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
