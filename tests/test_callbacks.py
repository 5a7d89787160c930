"""Callbacks: each alone, all together, and what happens when one fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import (
    Callback,
    Checkpoint,
    CheckpointError,
    ConfigurationError,
    CSVLogger,
    EarlyStopping,
    EGGROLLTrainer,
    EggrollWarning,
    Evaluate,
    JSONLogger,
    Logger,
    ProgressBar,
    TensorBoardLogger,
    WandbLogger,
    fitness,
)

X = torch.linspace(-1, 1, 12).view(4, 3)


def make(*callbacks: Callback, **options: Any) -> EGGROLLTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    options = {"population_size": 8, "seed": 0, "optimizer": torch.optim.Adam, **options}
    return EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: -(m(X) - 1).square().mean(),
        callbacks=callbacks,
        **options,
    )


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Recorder(Callback):
    """Writes down what is called."""

    def __init__(self, calls: list[str], name: str = "") -> None:
        self.calls, self.name = calls, name

    def on_train_start(self, trainer: Any) -> None:
        self.calls.append(f"{self.name}start {trainer.generation}")

    def on_generation_end(self, trainer: Any, metrics: Any) -> None:
        self.calls.append(f"{self.name}{metrics['generation']} of {trainer.generation}")

    def on_train_end(self, trainer: Any) -> None:
        self.calls.append(f"{self.name}end {trainer.generation}")


def test_the_order_of_things() -> None:
    calls: list[str] = []
    trainer = make(Recorder(calls, "a "), Recorder(calls, "b "))
    trainer.train(2, verbose=False)
    assert calls == [
        *("a start 0", "b start 0", "a 0 of 1", "b 0 of 1", "a 1 of 2", "b 1 of 2"),
        *("a end 2", "b end 2"),
    ]
    trainer.step()  # the loop in one's own hands has no callbacks
    assert len(calls) == 8


def test_callbacks_do_not_change_the_run(tmp_path: Path) -> None:
    plain = make()
    plain.train(6, verbose=False)
    watched = make(
        Evaluate(lambda m: torch.randn(1), every=2),
        EarlyStopping(patience=50),
        Checkpoint(tmp_path, every=2),
        CSVLogger(tmp_path / "log.csv"),
    )
    watched.train(6)
    assert torch.equal(flat(plain), flat(watched))


def test_metrics_of_a_generation() -> None:
    trainer = make(sigma=0.2, learning_rate=0.03)
    centre, population = flat(trainer).norm(), trainer.ask()
    fitnesses = trainer.evaluate(population)
    weights = ((fitnesses - fitnesses.mean()) / fitnesses.std(correction=0)).float()
    update = trainer.compute_update(population.perturbations, weights)
    metrics = trainer.step()
    assert metrics["centre_norm"] == pytest.approx(float(centre), rel=1e-5)
    expected = torch.cat([u.flatten() for u in update.values()]).norm()
    assert metrics["update_norm"] == pytest.approx(float(expected), rel=1e-5)
    assert (metrics["sigma"], metrics["learning_rate"]) == (0.2, 0.03)
    assert metrics.keys() >= {"ask_seconds", "evaluate_seconds", "tell_seconds"}
    assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_evaluate_scores_the_centre() -> None:
    seen: list[Tensor] = []

    def held_out(model: nn.Module) -> float:
        assert not torch.is_grad_enabled()
        model.eval()
        seen.append(torch.cat([p.flatten() for p in model.parameters()]).clone())
        return 7

    trainer = make(Evaluate(held_out, every=3, name="test"), Evaluate(lambda m: {"a": 1, "b": 2}))
    trainer.train(7, verbose=False)
    assert [m.get("test") for m in trainer.history] == [None, None, 7, None, None, 7, 7]
    assert trainer.history[-1]["evaluation/b"] == 2.0
    assert torch.equal(seen[-1], flat(trainer)), "the centre, after the step"
    assert trainer.model.training, "and its mode is as it was"


def test_early_stopping() -> None:
    trainer = make(EarlyStopping("mean_fitness", patience=3), learning_rate=0.0, sigma=0.0)
    result = trainer.train(50, verbose=False)
    assert result["generation"] == 4, "the first is the best, and three more are no better"
    assert trainer.train(1, verbose=False)["generation"] == 5, "a new train() trains"

    trainer = make(EarlyStopping("mean_fitness", target=-0.3), learning_rate=0.1)
    trainer.train(500, verbose=False)
    assert trainer.history[-1]["mean_fitness"] >= -0.3 > trainer.history[-2]["mean_fitness"]

    falling = iter([5.0, 4.0, 3.9, 3.8, 3.7, 3.6])
    trainer = make(
        Evaluate(lambda m: next(falling), every=1, name="loss"),
        EarlyStopping("loss", patience=2, min_delta=0.5, mode="min"),
    )
    assert trainer.train(50, verbose=False)["generation"] == 4


def test_early_stopping_on_a_metric_that_never_comes() -> None:
    trainer = make(EarlyStopping("accuracy"))
    with pytest.raises(ConfigurationError, match=r"monitor='accuracy'.*mean_fitness"):
        trainer.train(2, verbose=False)
    assert trainer.generation == 2


def test_checkpoints_and_resuming(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = make()
    whole.train(10, verbose=False)
    first = make(Checkpoint(folder, every=2, keep=2))
    first.train(7, verbose=False, resume_from=folder)  # nothing there yet: from the beginning
    assert sorted(p.name for p in folder.iterdir()) == [
        "generation-00000006.pt",
        "generation-00000007.pt",
    ]
    second = make(Checkpoint(folder, every=2, keep=2), seed=99)
    result = second.train(10, verbose=False, resume_from=folder)
    assert result["generation"] == 10, "in all"
    assert torch.equal(flat(whole), flat(second))
    assert whole.fitness_history == second.fitness_history
    third = make()
    assert third.train(8, verbose=False, resume_from=folder)["generation"] == 10, "done already"
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        third.train(8, resume_from=tmp_path / "nothing.pt")


def test_the_best_checkpoint(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 2.0, 2.5])
    trainer = make(
        Evaluate(lambda m: next(values), every=1, name="test"),
        Checkpoint(tmp_path, every=100, monitor="test"),
    )
    trainer.train(4, verbose=False)
    best = make()
    best.load(tmp_path / "best.pt")
    assert best.generation == 2
    assert best.history[-1]["test"] == 3.0


def test_an_interrupt_is_saved(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_generation_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.generation == 3:
                raise KeyboardInterrupt

    trainer = make(Interrupt(), Checkpoint(tmp_path, every=100))
    result = trainer.train(10, verbose=False)
    assert result["generation"] == 3
    assert trainer.interrupted
    assert [p.name for p in tmp_path.iterdir()] == ["generation-00000003.pt"]


def test_early_stopping_goes_on_as_it_would_have(tmp_path: Path) -> None:
    def run() -> EGGROLLTrainer:
        return make(
            Checkpoint(tmp_path, every=1),  # named first, and saves last all the same
            EarlyStopping(patience=4),
            learning_rate=0.0,
            sigma=0.0,
        )

    run().train(3, verbose=False)
    resumed = run()
    assert resumed.train(50, verbose=False, resume_from=tmp_path)["generation"] == 5


def test_files_of_loggers(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [
            Evaluate(lambda m: 0.5, every=2, name="test"),
            CSVLogger(tmp_path / "logs" / "run.csv"),
            JSONLogger(tmp_path / "logs" / "run.jsonl"),
        ]

    def check(trainer: EGGROLLTrainer) -> None:
        with (tmp_path / "logs" / "run.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        lines = (tmp_path / "logs" / "run.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == trainer.history
        assert len(rows) == trainer.generation
        for row, metrics in zip(rows, trainer.history, strict=True):
            assert {k: float(v) for k, v in row.items() if v} == metrics

    first = make(*callbacks())
    first.train(3, verbose=False)
    check(first)
    first.save(tmp_path / "run.pt")
    first.train(3, verbose=False)
    check(first)
    second = make(*callbacks())
    second.train(5, verbose=False, resume_from=tmp_path / "run.pt")
    check(second)  # the three generations beyond the checkpoint are gone from the files too


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make(TensorBoardLogger(tmp_path))
    trainer.train(4, verbose=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    logged = events.Scalars("mean_fitness")
    assert [event.step for event in logged] == [0, 1, 2, 3]
    assert [event.value for event in logged] == pytest.approx(trainer.fitness_history, rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_together_through_an_interruption(tmp_path: Path) -> None:
    """A shuffled loader, early stopping, every logger and checkpoints: resumed, nothing differs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(folder: Path) -> EGGROLLTrainer:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
        return EGGROLLTrainer(
            model.parameters(),
            model,
            fitness.cross_entropy,
            population_size=8,
            seed=0,
            data=torch.utils.data.DataLoader(data, batch_size=6, shuffle=True),
            callbacks=[
                Checkpoint(folder / "saved", every=3, monitor="accuracy"),
                Evaluate(lambda m: fitness.accuracy(m, data.tensors), every=2, name="accuracy"),
                EarlyStopping("accuracy", patience=4, min_delta=0.5),
                CSVLogger(folder / "log.csv"),
                JSONLogger(folder / "log.jsonl"),
                TensorBoardLogger(folder / "board"),
            ],
        )

    def logged(folder: Path) -> list[Any]:
        events = EventAccumulator(str(folder / "board"))
        events.Reload()
        board = [(event.step, event.value) for event in events.Scalars("mean_fitness")]
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        with (folder / "log.csv").open() as file:
            table = [(row["mean_fitness"], row["accuracy"]) for row in csv.DictReader(file)]
        return [board, [(row["mean_fitness"], row.get("accuracy")) for row in lines], table]

    whole = run(tmp_path / "whole")
    whole.train(100, verbose=False)
    assert whole.generation == 10, "4 evaluations without an improvement, after the first"
    run(tmp_path / "parts").train(4, verbose=False)
    run(tmp_path / "parts").train(8, verbose=False, resume_from=tmp_path / "parts" / "saved")
    last = run(tmp_path / "parts")
    last.train(100, verbose=False, resume_from=tmp_path / "parts" / "saved")
    assert last.generation == whole.generation
    assert torch.equal(flat(last), flat(whole))
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    assert [step for step, _ in logged(tmp_path / "parts")[0]] == list(range(10))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = make(WandbLogger(project="test", mode="offline", dir=str(tmp_path)))
    trainer.train(3, verbose=False)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


class Broken(Logger):
    """Fails in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def open(self, trainer: Any) -> None:
        if self.where == "open":
            raise OSError("no space left on device")

    def log(self, trainer: Any, metrics: Any) -> None:
        if self.where == "log":
            raise OSError("no space left on device")

    def close(self) -> None:
        if self.where == "close":
            raise OSError("no space left on device")


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_logger_that_fails_costs_nothing(where: str, tmp_path: Path) -> None:
    trainer = make(Broken(where), JSONLogger(tmp_path / "log.jsonl"))
    with pytest.warns(EggrollWarning, match="Broken failed .*OSError: no space left") as caught:
        trainer.train(4, verbose=False)
    assert len(caught) == 1, "reported once"
    assert trainer.generation == 4
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def test_a_callback_that_fails_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    class Bad(Callback):
        def on_generation_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.generation == 3:
                raise ZeroDivisionError

    calls: list[str] = []
    trainer = make(Recorder(calls), Bad(), Checkpoint(tmp_path, every=100))
    with pytest.raises(ZeroDivisionError):
        trainer.train(10, verbose=False)
    assert calls[-1] == "end 3", "all are ended"
    again = make()
    again.load(tmp_path / "generation-00000003.pt")
    assert torch.equal(flat(again), flat(trainer))


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = make(Checkpoint(tmp_path, every=2))

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    trainer.train(2, verbose=False)
    before = (tmp_path / "generation-00000002.pt").read_bytes()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        trainer.train(10, verbose=False)
    assert trainer.generation == 4, "it trained up to there"
    assert (tmp_path / "generation-00000002.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["generation-00000002.pt"]


def test_mistakes() -> None:
    model, bar = nn.Linear(1, 1), ProgressBar()
    with pytest.raises(ConfigurationError, match=r"callbacks=ProgressBar: expected a list"):
        EGGROLLTrainer(model.parameters(), model, len, callbacks=bar)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="callbacks holds a function"):
        make(lambda trainer: None)  # type: ignore[arg-type]
    for wrong in (
        lambda: Evaluate("f"),  # type: ignore[arg-type]
        lambda: Evaluate(len, every=0),
        lambda: EarlyStopping(patience=0),
        lambda: EarlyStopping(mode="best"),
        lambda: Checkpoint("x", every=-1),
        lambda: Checkpoint("x", keep=0),
    ):
        with pytest.raises(ConfigurationError):
            wrong()
