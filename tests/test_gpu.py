"""The same code on a GPU; skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO, make, readout

from eggroll_trainer import EGGROLLTrainer, ParameterError, VanillaESTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ZOO)
def test_batched_equals_plain_modules(name: str) -> None:
    model, args = make(name)
    model, args = model.cuda(), tuple(a.cuda() for a in args)

    fitness = readout(args)
    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        fitness,
        population_size=6,
        sigma=0.2,
        seed=4,
        rank=2,
        evaluation="vmap",
    )
    population = trainer.ask()
    batched = trainer.evaluate(population)
    with torch.no_grad():
        alone = torch.stack([fitness(population.member(i)) for i in range(6)])
    torch.testing.assert_close(batched, alone, rtol=1e-3, atol=1e-4)


def problem(trainer: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3)).cuda()
    x, y = torch.randn(64, 8, device="cuda"), torch.randint(0, 3, (64,), device="cuda")
    options = {"population_size": 128, "device": "cuda", "seed": 0, **options}
    return trainer(model.parameters(), model, lambda m: -F.cross_entropy(m(x), y), **options)


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
def test_training(trainer: Any, tmp_path: Any) -> None:
    made, state = problem(trainer, optimizer=torch.optim.Adam), torch.cuda.get_rng_state()
    history = made.train(20, verbose=False)["fitness_history"]
    assert history[-1] > history[0]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    made.save(tmp_path / "run.pt")
    again = problem(trainer, optimizer=torch.optim.Adam)
    again.load(tmp_path / "run.pt")
    made.train(5, verbose=False)
    again.train(5, verbose=False)
    assert made.fitness_history == again.fitness_history


def test_no_synchronisation_inside_evaluation_and_update() -> None:
    """One transfer a generation, for its metrics."""
    made = problem(EGGROLLTrainer, evaluation="vmap")
    made.train(2, verbose=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        population = made.ask()
        fitnesses = made.evaluate(population)
        weights = (fitnesses - fitnesses.mean()).float()
        made.centre.step(made.compute_update(population.perturbations, weights))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_device_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ParameterError, match=r"model\.to\('cuda'\)"):
        EGGROLLTrainer(model.parameters(), model, lambda m: 0.0, device="cuda")
