"""Batches: every kind of source, exact resumption, and loaders that fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from eggroll_trainer import ConfigurationError, EGGROLLTrainer, fitness

torch.manual_seed(0)
X, Y = torch.randn(50, 3), torch.randint(0, 2, (50,))


def make(data: Any, fitness_fn: Any = fitness.cross_entropy, **options: Any) -> EGGROLLTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    options = {"population_size": 8, "seed": 0, "learning_rate": 0.1, **options}
    return EGGROLLTrainer(model.parameters(), model, fitness_fn, data=data, **options)


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Noisy(Dataset[Any]):
    """Draws from the global generator, as augmentation does."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i] + 0.1 * torch.randn(3), Y[i]


class Stream(IterableDataset[Any]):
    """Examples without an index."""

    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "list": lambda: {"data": [(X[:25], Y[:25]), (X[25:], Y[25:])]},
    "loader": lambda: {"data": DataLoader(TensorDataset(X, Y), batch_size=16)},
    "shuffled loader": lambda: {"data": DataLoader(TensorDataset(X, Y), 16, shuffle=True)},
    "loader with a generator": lambda: {
        "data": DataLoader(
            TensorDataset(X, Y), 16, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
    },
    "augmentation": lambda: {"data": DataLoader(Noisy(), 16, shuffle=True)},
    "tensors": lambda: {"data": TensorDataset(X, Y), "batch_size": 16},
    "dataset": lambda: {"data": Noisy(), "batch_size": 16},
    "stream": lambda: {"data": DataLoader(Stream(), 16)},
    "groups": lambda: {"data": TensorDataset(X, Y), "batch_size": 16, "group_size": 4},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("first", [3, 4, 5])  # in the middle of a pass, at its end, in the next
def test_a_run_goes_on_bit_for_bit(name: str, first: int, tmp_path: Path) -> None:
    whole, part = make(**SOURCES[name]()), make(**SOURCES[name]())
    state = torch.get_rng_state()
    whole.train(9, verbose=False)
    part.train(first, verbose=False)
    assert torch.equal(torch.get_rng_state(), state), "shuffling is no business of the program's"
    part.save(tmp_path / "run.pt")
    rest = make(**SOURCES[name](), seed=5)
    torch.manual_seed(999)  # another state of the program altogether
    rest.load(tmp_path / "run.pt")
    rest.train(9 - first, verbose=False)
    assert whole.fitness_history == rest.fitness_history
    assert torch.equal(flat(whole), flat(rest))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), 16, shuffle=True, num_workers=2, multiprocessing_context="fork")

    whole, rest = make(loader()), make(loader(), seed=1)
    whole.train(3, verbose=False)
    whole.save(tmp_path / "run.pt")
    rest.load(tmp_path / "run.pt")
    whole.train(3, verbose=False)
    rest.train(3, verbose=False)
    assert whole.fitness_history == rest.fitness_history


def batches_seen(data: Any, generations: int, **options: Any) -> list[Any]:
    seen: list[Any] = []

    def note(model: nn.Module, batch: Any) -> Tensor:
        if not seen or seen[-1] is not batch:
            seen.append(batch)
        return model(X).sum()

    trainer = make(data, note, evaluation="sequential", **options)
    trainer.train(generations, verbose=False)
    return seen


def test_shuffling_sees_everything_once_a_pass() -> None:
    numbers = torch.arange(50)
    for options in (
        {"data": TensorDataset(numbers), "batch_size": 16},
        {"data": DataLoader(TensorDataset(numbers), 16, shuffle=True)},
    ):
        seen = [batch[0] for batch in batches_seen(generations=8, **options)]
        assert [len(batch) for batch in seen] == [16, 16, 16, 2] * 2, "the last may be smaller"
        first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
        assert sorted(first.tolist()) == sorted(second.tolist()) == numbers.tolist()
        assert first.tolist() != second.tolist(), "each pass in an order of its own"
        assert first.tolist() != numbers.tolist()


def test_batches_of_every_form_are_moved() -> None:
    class Own:
        """A batch of somebody's own class, such as transformers' encodings."""

        def __init__(self, x: Tensor, moved: int = 0) -> None:
            self.x, self.moved = x, moved

        def to(self, device: torch.device) -> Own:
            return Own(self.x.to(device), self.moved + 1)

    batch = {"x": X, "more": [Y, (X, "text", 3)], "own": Own(X)}
    (seen,) = batches_seen([batch], 1)
    assert seen["more"][1][1:] == ("text", 3)
    assert seen["own"].moved == 1
    trainer = make([batch], lambda m, b: -F.cross_entropy(m(b["x"]), b["more"][0]))
    trainer.train(2, verbose=False)
    assert trainer.evaluator.name == "vmap"


def test_groups_score_as_computed_by_hand() -> None:
    trainer = make(TensorDataset(X, Y), batch_size=16, group_size=2)
    population = trainer.ask()
    got = trainer.evaluate(population)
    batches = [trainer._inputs.member(i)[0] for i in range(8)]
    assert [len(b[1]) for b in batches] == [16] * 6 + [2] * 2
    for i, batch in enumerate(batches):
        with torch.no_grad():
            alone = fitness.cross_entropy(population.member(i), batch)
        assert float(got[i]) == pytest.approx(float(alone), abs=1e-5)


class Failing:
    """A loader that raises in the middle of its second pass, once."""

    def __init__(self) -> None:
        self.passes, self.broken = 0, True

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for start in range(0, 50, 10):
            if self.passes >= 2 and start == 20 and self.broken:
                self.broken = False
                raise OSError("the disk is gone")
            yield X[start : start + 10], Y[start : start + 10]


@pytest.mark.parametrize("group_size", [0, 4])
def test_a_loader_that_raises_loses_nothing(group_size: int) -> None:
    data, whole = Failing(), Failing()
    whole.broken = False
    trainer, twin = make(data, group_size=group_size), make(whole, group_size=group_size)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train(10, verbose=False)
    assert trainer.generation == len(trainer.history) == (3 if group_size else 7)
    trainer.train(3, verbose=False)
    twin.train(trainer.generation, verbose=False)
    assert trainer.fitness_history == twin.fitness_history, "not a batch left out, none twice"


def test_empty_sources() -> None:
    for options in (
        {"data": []},
        {"data": DataLoader(TensorDataset(X, Y), batch_size=99, drop_last=True)},
        {"data": iter([])},
    ):
        with pytest.raises(ConfigurationError, match="data yields no batch"):
            make(**options).step()


def test_reset_begins_the_data_again() -> None:
    numbers = [torch.tensor(i) for i in range(5)]
    seen: list[int] = []

    def note(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(int(batch))
        return model(X).sum()

    trainer = make(numbers, note, evaluation="sequential", population_size=2)
    trainer.train(3, verbose=False)
    trainer.reset()
    trainer.train(2, verbose=False)
    assert seen[::2] == [0, 1, 2, 0, 1]


# --- ready-made fitnesses -------------------------------------------------------------------------


def test_fitnesses_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 0])
    model = nn.Identity()
    assert float(fitness.accuracy(model, (logits, labels))) == 0.5
    assert float(fitness.mse(model, (logits, torch.zeros(2, 2)))) == -(4 + 1) / 4
    expected = -F.cross_entropy(logits / 2, labels)
    torch.testing.assert_close(fitness.cross_entropy(model, (logits, labels), 2.0), expected)


@pytest.mark.parametrize(
    "score",
    [
        fitness.cross_entropy,
        functools.partial(fitness.cross_entropy, temperature=2.0),
        fitness.accuracy,
    ],
)
def test_fitnesses_are_batched_and_learn(score: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = (x[:, 0] > x[:, 1]).long()
    trainer = make(TensorDataset(x, y), score, batch_size=100, population_size=64, sigma=0.2)
    trainer.train(40, verbose=False)
    assert trainer.evaluator.name == "vmap"
    assert float(fitness.accuracy(trainer.model, (x, y))) > 0.95
