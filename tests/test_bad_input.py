"""Mistakes: an error says what came, what was expected and what to do, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import (
    ConfigurationError,
    EggrollError,
    EGGROLLTrainer,
    EggrollWarning,
    ESTrainer,
    FitnessError,
    ParameterError,
    PopulationSizeError,
    VanillaESTrainer,
)

X = torch.ones(2, 3)
NAN = float("nan")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def fitness(model: nn.Module) -> Tensor:
    return model(X).sum()


def make(trainer: Any = EGGROLLTrainer, **options: Any) -> Any:
    model = options.pop("model", None)
    model = make_model() if model is None else model
    params = options.pop("params", model.parameters())
    options = {"fitness_fn": fitness, "population_size": 8, "seed": 0, **options}
    return trainer(params, model, options.pop("fitness_fn"), **options)


# Arguments → what the message must say.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "population of none": ({"population_size": 0}, "population_size=0"),
    "population of one": ({"population_size": 1}, "population_size=1"),
    "population of a fraction": ({"population_size": 8.5}, "population_size=8.5"),
    "population True": ({"population_size": True}, "population_size=True"),
    "odd population in pairs": ({"population_size": 7}, "population_size=7"),
    "group that does not divide": (
        {"group_size": 3},
        "group_size=3 does not divide population_size=8",
    ),
    "group of one": ({"group_size": 1}, "group_size=1"),
    "group that splits pairs": ({"group_size": 3, "population_size": 6}, "group_size=3"),
    "negative group": ({"group_size": -2}, "group_size=-2"),
    "negative σ": ({"sigma": -0.1}, "sigma=-0.1"),
    "σ NaN": ({"sigma": NAN}, "sigma=nan"),
    "σ ∞": ({"sigma": float("inf")}, "sigma=inf"),
    "σ text": ({"sigma": "0.1"}, "sigma='0.1'"),
    "σ schedule of nonsense": ({"sigma": lambda generation: None}, "sigma=None"),
    "rate NaN": ({"learning_rate": NAN}, "learning_rate=nan"),
    "negative rate": ({"learning_rate": -1.0}, "learning_rate=-1"),
    "rank 0": ({"rank": 0}, "rank=0"),
    "rank of a fraction": ({"rank": 1.5}, "rank=1.5"),
    "noise reuse": ({"noise_reuse": 3}, "noise_reuse=3"),
    "noise reuse True": ({"noise_reuse": True}, "noise_reuse=True"),
    "seed text": ({"seed": "0"}, "seed='0'"),
    "seed negative": ({"seed": -1}, "seed=-1"),
    "chunk 0": ({"chunk_size": 0}, "chunk_size=0"),
    "evaluation": ({"evaluation": "fast"}, "evaluation='fast'"),
    "randomness": ({"randomness": "none"}, "randomness='none'"),
    "nonfinite": ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
    "shaping": ({"shaping": "rank"}, "shaping='rank'"),
    "shaping number": ({"shaping": 3}, "shaping=3"),
    "fitness": ({"fitness_fn": 3.0}, "fitness_fn=3.0"),
    "optimizer": ({"optimizer": "adam"}, "optimizer='adam'"),
    "optimizer made already": (
        {"optimizer": lambda groups, lr: object()},
        "expected a torch.optim.Optimizer",
    ),
    "optimizer with closures": ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    "data": ({"data": 3}, "data=int"),
    "a dataset without a batch size": (
        {"data": torch.utils.data.TensorDataset(X)},
        "data=TensorDataset has single examples: pass batch_size=",
    ),
    "a batch size without a dataset": ({"batch_size": 3}, "batch_size=3 is for a Dataset"),
    "a batch size of batches": ({"data": [X], "batch_size": 3}, "data is a list: leave it out"),
    "batch size 0": (
        {"data": torch.utils.data.TensorDataset(X), "batch_size": 0},
        "batch_size=0",
    ),
    "params a tensor": ({"params": torch.ones(3)}, "params=Tensor"),
    "params the model": ({"params": make_model()}, "params=Sequential"),
    "device": ({"device": "meta"}, "device='meta', but the model is on 'cpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        make(**arguments)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) > len(message) + 10, "what was expected, and what to do"


@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
def test_limits_that_are_right(trainer: Any) -> None:
    make(trainer, population_size=2).step()
    make(trainer, population_size=3, noise_reuse=0).step()
    make(trainer, population_size=6, noise_reuse=1, group_size=3).step()
    make(trainer, sigma=0.0).step()
    make(trainer, sigma=1, learning_rate=0).step()


def test_a_rank_above_the_width_is_full_noise() -> None:
    trainer = make(rank=3)
    trainer.step()
    assert "full (rank 3 > 1)" in str(trainer.explain())


def test_model_and_params() -> None:
    model, other = make_model(), make_model()
    with pytest.raises(ConfigurationError, match=r"model=function: expected an nn\.Module"):
        EGGROLLTrainer(model.parameters(), fitness, model)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"params\[0\] \(Parameter \(4, 3\)\) is not a param"):
        make(params=other.parameters(), model=model)
    with pytest.raises(ParameterError, match="params is empty"):
        make(params=iter(()), model=model)
    with pytest.raises(ParameterError, match=r"'0\.weight', which params names already"):
        make(params=[model[0].weight, model[0].weight], model=model)
    with pytest.raises(ConfigurationError, match=r"params\[1\]: expected a group"):
        make(params=[{"params": [model[0].weight]}, model[0].bias], model=model)
    with pytest.raises(ConfigurationError, match="sigma=-1"):
        make(params=[{"params": list(model.parameters()), "sigma": -1}], model=model)
    with pytest.raises(ConfigurationError, match="rank=0"):
        make(params=[{"params": list(model.parameters()), "rank": 0}], model=model)
    frozen = make_model().requires_grad_(False)
    with pytest.raises(ParameterError, match="nothing to train"):
        make(params=frozen.parameters(), model=frozen)
    with pytest.raises(ParameterError, match="nothing to train"):
        make(params=[model[0].bias], model=model, freeze_nonlora=True)
    integers = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int64), False)])
    with pytest.raises(ParameterError, match=r"'\d' is torch\.int64: noise can be added to float"):
        make(params=integers.parameters(), model=integers)
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ParameterError, match="several devices"):
        make(params=split.parameters(), model=split)


# What a fitness returns → what the message must say.
RETURNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda m: None, r"returned None \(is a return missing\?\)"),
    "text": (lambda m: "0.5", "returned str '0.5'"),
    "a list": (lambda m: [1.0], r"returned list \[1.0\]"),
    "a vector": (lambda m: m(X).flatten(), r"a tensor of shape \(2,\) and torch.float32"),
    "a one-element matrix": (lambda m: m(X)[:1], r"a tensor of shape \(1, 1\)"),
    "a complex number": (lambda m: m(X).sum() * 1j, "complex"),
    "an array": (lambda m: np.ones(2), "returned ndarray"),
}


@pytest.mark.parametrize("name", RETURNS)
@pytest.mark.parametrize("evaluation", ["auto", "vmap", "sequential"])
def test_a_fitness_that_returns_no_number(name: str, evaluation: str) -> None:
    returns, message = RETURNS[name]
    trainer = make(fitness_fn=returns, evaluation=evaluation)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with pytest.raises(FitnessError, match=message) as caught:
        trainer.step()
    assert "expected one real number" in str(caught.value)
    if evaluation == "sequential":
        assert "member 0" in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())
    assert (trainer.generation, trainer.history) == (0, [])
    trainer.fitness_fn = fitness  # nothing is lost: with another fitness the run goes on
    trainer.step()
    assert trainer.generation == 1


@pytest.mark.parametrize("value", [1, True, 2.5, np.float32(1.5), np.int64(3), torch.tensor(4)])
def test_numbers_of_every_kind(value: Any) -> None:
    trainer = make(fitness_fn=lambda m: value, evaluation="sequential")
    fitnesses = trainer.evaluate(trainer.ask())
    assert fitnesses.dtype == torch.float64
    assert torch.equal(fitnesses, torch.full((8,), float(value), dtype=torch.float64))


def test_all_members_nonfinite() -> None:
    trainer = make(fitness_fn=lambda m: m(X).sum() * NAN, optimizer=torch.optim.Adam)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with pytest.warns(EggrollWarning, match="generation 0: no fitness was finite"):
        metrics = trainer.step()
    assert metrics["nonfinite"] == 1.0
    assert all(torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())
    trainer.fitness_fn = fitness
    assert trainer.step()["nonfinite"] == 0
    assert trainer.best_fitness > -float("inf")


def test_nonfinite_may_raise() -> None:
    trainer = make(nonfinite="raise")
    trainer.ask()
    with pytest.raises(FitnessError, match=r"2 of 8 fitnesses .* the first is member 3's, nan"):
        trainer.tell([0, 1, 2, NAN, 4, 5, float("inf"), 7])
    assert (trainer.generation, trainer.history) == (0, [])
    trainer.tell(list(range(8)))


def test_shapings_of_ones_own_are_checked() -> None:
    trainer = make(shaping=lambda f: f[:3])
    with pytest.raises(PopulationSizeError, match=r"shape \(3,\): expected one weight for each"):
        trainer.step()
    trainer = make(shaping=lambda f: f / 0)
    with pytest.raises(FitnessError, match="not finite"):
        trainer.step()
    assert trainer.generation == 0


class Custom(ESTrainer):
    """A custom algorithm whose hooks can be made to return anything."""

    perturbations: Any = None
    update: Any = None

    def sample_perturbations(self, population_size: int) -> Any:
        if self.perturbations is not None:
            return self.perturbations
        return torch.randn(population_size, len(self.current_params))

    def compute_update(self, perturbations: Any, fitnesses: Tensor) -> Any:
        return self.update


@pytest.mark.parametrize("wrong", [torch.ones(8, 5), torch.ones(7, 21), "noise"])
def test_a_custom_algorithm_that_samples_nonsense(wrong: Any) -> None:
    trainer = make(Custom)
    trainer.perturbations = wrong
    with pytest.raises(ConfigurationError, match=r"expected a tensor of shape \(8, 21\)"):
        trainer.step()


@pytest.mark.parametrize("wrong", [torch.ones(5), torch.ones(1, 21), None, 3.0])
def test_a_custom_algorithm_that_updates_nonsense(wrong: Any) -> None:
    trainer = make(Custom)
    trainer.update = wrong
    with pytest.raises(ConfigurationError, match=r"\(21,\), and came as"):
        trainer.step()
    assert trainer.generation == 0


def test_a_sigma_schedule_that_turns_bad_in_the_middle() -> None:
    trainer = make(sigma=lambda generation: 0.1 if generation < 2 else -1.0)
    with pytest.raises(ConfigurationError, match=r"sigma=-1\.0"):
        trainer.train(5, verbose=False)
    assert trainer.generation == len(trainer.history) == 2


@pytest.mark.parametrize("wrong", [-1, 2.5, "3", True])
def test_train_checks_its_number(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"num_generations={wrong!r}")):
        make().train(wrong)


def test_data_that_runs_dry() -> None:
    trainer = make(fitness_fn=lambda m, b: m(b).sum(), data=iter([X, X]))
    trainer.train(2, verbose=False)
    with pytest.raises(ConfigurationError, match="data yields no batch"):
        trainer.step()
    assert trainer.generation == 2
    with pytest.raises(ConfigurationError, match="data yields no batch"):
        make(fitness_fn=lambda m, b: m(b).sum(), data=[]).step()


def test_groups_whose_batches_differ_in_structure() -> None:
    """Right one after another; the batched pass says what it wants."""
    batches: list[Any] = [(X, 1), X]
    trainer = make(
        fitness_fn=lambda m, b: m(b[0] if isinstance(b, tuple) else b).sum(),
        data=batches,
        group_size=4,
    )
    population = trainer.ask()
    fitnesses = trainer.evaluate(population)
    for i in range(8):
        alone = population.member(i)(X).sum().detach()
        assert float(fitnesses[i]) == pytest.approx(float(alone), abs=1e-6)


def test_a_forgotten_batch_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        make(fitness_fn=lambda m, batch: m(batch).sum()).step()


def test_every_error_is_one_of_ours() -> None:
    for name in ("ConfigurationError", "FitnessError", "ParameterError", "PopulationSizeError"):
        assert issubclass(globals()[name], EggrollError)
