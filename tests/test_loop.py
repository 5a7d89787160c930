"""The loop: ask, evaluate, tell; results, best member, data, progress, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import (
    AskTellError,
    EGGROLLTrainer,
    EggrollWarning,
    ESTrainer,
    PopulationSizeError,
    VanillaESTrainer,
    population_fitness,
)

X = torch.linspace(-1, 1, 12).view(4, 3)


def fitness(model: nn.Module) -> Tensor:
    return -(model(X) - 1).square().mean()


def make(fitness_fn: Any = fitness, trainer: Any = EGGROLLTrainer, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    options = {"population_size": 8, "seed": 0, **options}
    return trainer(model.parameters(), model, fitness_fn, **options)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# --- results --------------------------------------------------------------------------------------


def test_step_and_train_report() -> None:
    trainer = make()
    metrics = trainer.step()
    assert {"generation", "mean_fitness", "best_fitness", "std_fitness"} <= metrics.keys()
    assert metrics["generation"] == 0
    result = trainer.train(num_generations=4, verbose=False)
    assert result["generation"] == trainer.generation == 5
    assert len(result["fitness_history"]) == 5
    assert result["best_fitness"] == max(m["max_fitness"] for m in trainer.history)
    bests = [m["best_fitness"] for m in trainer.history]
    assert bests == sorted(bests)
    assert trainer.train(num_generations=0, verbose=False)["generation"] == 5


def test_step_is_ask_evaluate_tell() -> None:
    one, two = make(), make()
    for _ in range(3):
        one.step()
        two.tell(two.evaluate(two.ask()))
    assert torch.equal(flat(one.model), flat(two.model))


def test_the_best_model_scores_its_fitness_again() -> None:
    """It is the best *member*, not the centre after the update."""
    trainer = make()
    trainer.train(6, verbose=False)
    best = trainer.get_best_model()
    assert float(fitness(best).detach()) == pytest.approx(trainer.best_fitness, abs=1e-6)
    assert best is not trainer.model
    before = flat(best)
    trainer.train(2, verbose=False)
    assert torch.equal(flat(best), before)
    with torch.no_grad():
        best[0].weight.zero_()
    assert not torch.equal(flat(trainer.get_best_model()), flat(best))


def test_the_best_is_of_raw_fitnesses() -> None:
    trainer = make(lambda m: 1e6 + 0 * m(X).sum())
    trainer.ask()
    trainer.tell([3.0, 9.0, 1.0, 4.0, 5.0, 2.0, 7.0, 8.0])
    assert trainer.best_fitness == 9.0
    trainer.ask()
    expected = trainer.ask().member(4)
    trainer.tell([0, 0, 0, 0, 10.0, 0, 0, 0])
    assert trainer.best_fitness == 10.0
    assert torch.equal(flat(trainer.get_best_model()), flat(expected))


def test_members_start_from_the_centre() -> None:
    """And are no random walk: pairs lie symmetrically about the centre, in every generation."""
    trainer = make(population_size=6, sigma=0.3)
    for _ in range(3):
        population, centre = trainer.ask(), flat(trainer.model)
        members = [flat(population.member(i)) - centre for i in range(6)]
        for plus, minus in zip(members[0::2], members[1::2], strict=True):
            torch.testing.assert_close(plus, -minus, atol=1e-6, rtol=1e-5)
            assert 0.05 < float(plus.std()) < 0.8
        trainer.step()


def test_reset_begins_again_from_the_present_weights() -> None:
    trainer = make(optimizer=torch.optim.Adam)
    trainer.train(3, verbose=False)
    kept = flat(trainer.model)
    trainer.reset()
    assert torch.equal(flat(trainer.model), kept)
    assert (trainer.generation, trainer.fitness_history) == (0, [])
    assert not trainer.optimizer.state
    with pytest.raises(AskTellError, match="before the first generation"):
        trainer.get_best_model()
    trainer.train(3, verbose=False)


def test_weights_that_the_user_loads_are_used() -> None:
    """No cached centre."""
    trainer = make(learning_rate=0.0)
    trainer.step()
    with torch.no_grad():
        trainer.model[0].weight.fill_(7.0)
    assert float(trainer.ask().member(0)[0].weight.detach().mean()) == pytest.approx(7, abs=0.5)
    trainer.step()
    assert torch.equal(trainer.model[0].weight, torch.full((5, 3), 7.0))


def test_schedulers_and_param_groups_work_as_usual() -> None:
    trainer = make(
        learning_rate=0.4,
        sigma=lambda generation: 0.1 / (generation + 1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
    rates, sigmas = [], []
    for _ in range(4):
        population = trainer.ask()
        rates.append(trainer.learning_rate)
        sigmas.append(next(iter(population.sigma.values())))
        trainer.tell(trainer.evaluate(population))
    assert rates == [0.4, 0.4, 0.2, 0.2]
    assert sigmas == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    before = flat(trainer.model)
    trainer.step()
    assert torch.equal(flat(trainer.model), before)
    fixed = make(sigma=0.1)
    fixed.optimizer.param_groups[0]["sigma"] = 0.0
    population = fixed.ask()
    assert torch.equal(flat(population.member(3)), flat(fixed.model))


def test_a_custom_algorithm() -> None:
    """The two hooks of the base class, on raw fitnesses."""

    class RandomSearch(ESTrainer):
        def sample_perturbations(self, population_size: int) -> Tensor:
            shape = (population_size, self.current_params.numel())
            return torch.randn(shape, generator=self.generator)

        def compute_update(self, perturbations: Tensor, fitnesses: Tensor) -> Tensor:
            return perturbations[fitnesses.argmax()]

    trainer = make(trainer=RandomSearch, learning_rate=0.1, sigma=0.1)
    population = trainer.ask()
    winner = int(trainer.evaluate(population).argmax())
    expected = flat(population.member(winner))
    trainer.step()
    torch.testing.assert_close(flat(trainer.model), expected)
    first = trainer.train(30, verbose=False)["fitness_history"]
    assert first[-1] > first[0]
    again = make(trainer=RandomSearch, learning_rate=0.1, sigma=0.1)
    assert again.train(31, verbose=False)["fitness_history"] == first
    vector = torch.arange(float(len(trainer.current_params)))
    storage = [p.data_ptr() for p in trainer.model.parameters()]
    trainer._set_flat_params(vector)
    assert torch.equal(trainer._get_flat_params(), vector)
    assert storage == [p.data_ptr() for p in trainer.model.parameters()]


# --- ask and tell ---------------------------------------------------------------------------------


def test_ask_and_tell_out_of_order() -> None:
    trainer = make()
    with pytest.raises(AskTellError, match=r"call ask\(\) first"):
        trainer.tell([0.0] * 8)
    population = trainer.ask()
    assert trainer.ask() is population, "the same one until tell"
    trainer.tell(trainer.evaluate(population))
    with pytest.raises(AskTellError, match=r"call ask\(\) first"):
        trainer.tell([0.0] * 8)
    with pytest.raises(AskTellError, match=r"ask\(\) returned last"):
        trainer.evaluate(population)
    for use in (lambda: population.member(0), lambda: population(X), lambda: population.centre()):
        with pytest.raises(AskTellError, match="generation 0, which tell"):
            use()


@pytest.mark.parametrize("values", [[1.0] * 7, [[1.0] * 8], torch.zeros(8, 1), 3.0])
def test_tell_another_number(values: Any) -> None:
    trainer = make()
    trainer.ask()
    before = flat(trainer.model)
    with pytest.raises(PopulationSizeError, match=r"one real number for each member, shape \(8,\)"):
        trainer.tell(values)
    assert (trainer.generation, trainer.history) == (0, [])
    assert torch.equal(flat(trainer.model), before)
    trainer.tell([float(i) for i in range(8)])  # the population still waits


def test_population_runs_and_shows_its_members() -> None:
    trainer = make()
    population = trainer.ask()
    outputs = population(X)
    own_inputs = torch.randn(8, 4, 3)
    own = population(own_inputs, in_dims=0)
    last = population(own_inputs.movedim(0, -1), in_dims=-1)
    assert outputs.shape == own.shape == (8, 4, 2)
    for i in range(8):
        member = population.member(i)
        torch.testing.assert_close(outputs[i], member(X))
        torch.testing.assert_close(own[i], member(own_inputs[i]))
    torch.testing.assert_close(last, own)
    with pytest.raises(PopulationSizeError, match="8"):
        population(torch.randn(7, 4, 3), in_dims=0)
    with pytest.raises(IndexError, match="member 8 of a population of 8"):
        population.member(8)


@pytest.mark.parametrize("evaluation", ["auto", "vmap", "sequential"])
def test_a_population_fitness_is_the_same_fitness(evaluation: str) -> None:
    @population_fitness
    def together(population: Any) -> Tensor:
        """Documented."""
        return -(population(X) - 1).square().mean(dim=(1, 2))

    assert together.__doc__ == "Documented."
    one, two = make(), make(together, evaluation=evaluation)
    torch.testing.assert_close(one.evaluate(one.ask()), two.evaluate(two.ask()))
    one.train(3, verbose=False)
    two.train(3, verbose=False)
    torch.testing.assert_close(flat(one.model), flat(two.model))


# --- data -----------------------------------------------------------------------------------------


def test_every_member_of_a_generation_sees_the_same_batch() -> None:
    batches = [(torch.full((4, 3), float(i)), i) for i in range(3)]
    seen: list[int] = []

    def scored(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[1])
        return model(batch[0]).sum()

    trainer = make(scored, data=batches, evaluation="sequential")
    trainer.train(5, verbose=False)
    assert seen == [i for i in (0, 1, 2, 0, 1) for _ in range(8)], "and begins again at the end"


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_each_group_sees_its_own_batch(evaluation: str) -> None:
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(6)]

    def scored(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return -(model(x) - y).square().mean()

    trainer = make(scored, data=batches, group_size=4, evaluation=evaluation)
    for generation in range(2):
        population = trainer.ask()
        got = trainer.evaluate(population)
        for i in range(8):
            batch = batches[2 * generation + i // 4]
            alone = scored(population.member(i), batch).detach()
            assert float(got[i]) == pytest.approx(float(alone), abs=1e-5)
        trainer.tell(got)


def test_groups_with_batches_of_several_sizes() -> None:
    batches = [torch.randn(n, 3) for n in (4, 2, 5)]
    trainer = make(lambda m, b: m(b).sum(), data=batches, group_size=2, evaluation="vmap")
    population = trainer.ask()
    got = trainer.evaluate(population)
    for i in range(8):
        alone = population.member(i)(batches[i // 2 % 3]).sum().detach()
        assert float(got[i]) == pytest.approx(float(alone), abs=1e-5)


# --- what is left alone ---------------------------------------------------------------------------


def snapshot(model: nn.Module) -> list[Any]:
    """Everything about a model that training must not change, beside the trained weights."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [
            (n, id(t), t.data_ptr(), t.stride(), t.dtype, t.requires_grad, t.grad)
            for n, t in tensors
        ],
        [(name, module.training) for name, module in model.named_modules()],
        [(name, buffer.tolist()) for name, buffer in model.named_buffers()],
        sorted(vars(model)),
    ]


def rich_model() -> nn.Module:
    """A mode of its own in every part, buffers, channels_last, frozen and tied parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 16, bias=False),
    )
    model[6].weight = model[4].weight
    model[1].eval()
    model[4].bias.requires_grad_(False)
    model.register_buffer("count", torch.tensor(3))
    return model


IMAGES = torch.randn(2, 3, 4, 4)


class Boom(Exception):
    """What a fitness may raise."""


@pytest.mark.parametrize("evaluation", ["vmap", "sequential", "auto"])
@pytest.mark.parametrize("raising", [None, Boom, KeyboardInterrupt, SystemExit])
def test_the_model_is_what_it_was(evaluation: str, raising: Any) -> None:
    """Whatever the fitness does to it, and however it ends: bit for bit."""
    model, calls = rich_model(), itertools.count()

    def nasty(m: nn.Module) -> Tensor:
        out = m(IMAGES).square().mean()
        m.eval()
        m[1].running_mean = m[1].running_mean + 1
        if evaluation == "sequential":
            m[4].bias.requires_grad_(True)
        if next(calls) >= 1 + 2 * (evaluation == "sequential") and raising:
            raise raising
        return out

    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        nasty,
        population_size=4,
        seed=0,
        evaluation=evaluation,
        chunk_size=2,
    )
    before, weights, rng = snapshot(model), flat(model), torch.get_rng_state()
    if raising is None:
        trainer.evaluate(trainer.ask())
    else:
        with pytest.raises(raising):
            trainer.step()
    assert snapshot(model) == before
    assert torch.equal(flat(model), weights)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (trainer.generation, trainer.history) == (0, [])


class Remembers(nn.Module):
    """Keeps what it computed last as an attribute, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.calls = nn.Linear(3, 3), None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.layer(x)
        self.last = out if self.last is None else out + self.last
        return self.last


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_what_a_module_remembers_leaks_nowhere(evaluation: str) -> None:
    """Neither from member to member, nor out of the evaluation."""
    model = Remembers()
    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: (m(X) + m(2 * X)).sum(),
        population_size=6,
        seed=0,
        evaluation=evaluation,
    )
    population = trainer.ask()
    got = trainer.evaluate(population)
    for i in range(6):
        alone = trainer.fitness_fn(population.member(i)).detach()
        assert float(got[i]) == pytest.approx(float(alone), abs=1e-4)
    assert model.last is None
    assert model.calls == 0
    trainer.train(2, verbose=False)
    trainer.get_best_model()


def test_a_trainer_can_be_copied() -> None:
    trainer = make(optimizer=torch.optim.Adam)
    trainer.train(2, verbose=False)
    twin = copy.deepcopy(trainer)
    trainer.train(2, verbose=False)
    twin.train(2, verbose=False)
    assert torch.equal(flat(trainer.model), flat(twin.model))
    assert twin.model is not trainer.model


def test_training_changes_only_what_it_was_given() -> None:
    model = rich_model()
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    params = [model[0].weight, model[4].weight, model[4].bias]
    trainer = EGGROLLTrainer(
        params, model, lambda m: m(IMAGES).square().mean(), population_size=4, seed=0
    )
    trainer.train(3, verbose=False)
    assert snapshot(model) == before
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, state[k])}
    assert moved == {"0.weight", "4.weight", "6.weight"}, "not the frozen bias, nor the others"


def test_freezing_in_the_middle_of_a_run() -> None:
    trainer = make()
    trainer.step()
    trainer.model[0].weight.requires_grad_(False)
    kept = trainer.model[0].weight.detach().clone()
    trainer.train(2, verbose=False)
    assert torch.equal(trainer.model[0].weight, kept)


def test_freeze_nonlora() -> None:
    trainer = make(freeze_nonlora=True)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train(2, verbose=False)
    moved = {k for k, v in trainer.model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"0.weight", "2.weight"}


def test_an_unused_parameter_is_a_warning_once() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    trainer = EGGROLLTrainer(
        model.parameters(), model, lambda m: m["used"](X).sum(), population_size=4, seed=0
    )
    with pytest.warns(EggrollWarning, match=r"no operation used unused\.weight, unused\.bias"):
        trainer.step()
    trainer.step()  # warnings are errors: none now
    assert "low-rank 1, unused" in str(trainer.explain())


def test_training_shared_memory_is_seen_by_all() -> None:
    """In place: a model in shared memory, or one whose tensors others hold, stays one."""
    trainer = make()
    view = trainer.model[0].weight.detach()
    trainer.step()
    assert torch.equal(view, trainer.model[0].weight)


# --- long runs, progress, interrupts --------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("trainer", [EGGROLLTrainer, VanillaESTrainer])
def test_memory_does_not_grow_over_2000_generations(trainer: Any) -> None:
    made = make(trainer=trainer, population_size=4, optimizer=torch.optim.Adam)
    made.train(100, verbose=False)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    before, start = tensors(), resident()
    made.train(2000, verbose=False)
    assert tensors() <= before + 2
    assert resident() - start < 8 * 2**20, "history is numbers: a kilobyte a generation"


def test_progress_in_a_terminal_is_one_bar(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    make().train(3)
    shown = screen.getvalue()
    assert "3/3" in shown
    for word in ("best", "mean", "±", "members/s"):
        assert word in shown
    assert shown.count("\n") == 1


def test_progress_elsewhere_is_plain_lines(capsys: Any) -> None:
    make().train(30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("generation 1 (1/30): best ")
    assert lines[-1].startswith("generation 30 (30/30): best ")
    assert len(lines) < 5


def test_no_progress_when_not_wanted(capsys: Any) -> None:
    make().train(3, verbose=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.fixture
def ctrl_c_works() -> Iterator[None]:
    """As in a terminal: a process that a script starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_works")
@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_ctrl_c_ends_the_run_with_everything_intact(evaluation: str, capsys: Any) -> None:
    trainer = make(evaluation=evaluation)
    twin = make(evaluation=evaluation)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    result = trainer.train(100_000)
    timer.join()
    done = result["generation"]
    assert 0 < done < 100_000
    assert len(result["fitness_history"]) == len(trainer.history) == trainer.generation == done
    assert f"interrupted after generation {done}" in capsys.readouterr().err
    twin.train(done, verbose=False)
    assert torch.equal(flat(trainer.model), flat(twin.model)), "the centre, bit for bit"
    trainer.train(3, verbose=False)
    twin.train(3, verbose=False)
    assert torch.equal(flat(trainer.model), flat(twin.model)), "and the run goes on as ever"
