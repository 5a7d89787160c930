"""`Population.folded`: each row meets its own member's weights, whoever is left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import (
    AskTellError,
    EGGROLLTrainer,
    EggrollWarning,
    NotBatchableError,
    Population,
    PopulationSizeError,
    VanillaESTrainer,
)
from eggroll_trainer.graphs import split, trace


class Memory(nn.Module):
    """A recurrent model: `(rows, 4)` and a state to `(rows, 2)` and the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        hidden = self.cell(x, *state)
        return self.head(hidden), (hidden,)


class Branching(nn.Module):
    """Its control flow depends on its numbers: nothing that can be batched."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool(self.layer(x).sum() > 0) else -self.layer(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 2)
    ),
}


def asked(model: nn.Module, trainer: Any = EGGROLLTrainer, **options: Any) -> Population:
    made = trainer(
        model.parameters(), model, lambda _: 0.0, population_size=8, sigma=0.3, seed=1, **options
    )
    population: Population = made.ask()
    return population


def one_by_one(population: Population, members: Any, *args: Tensor) -> Tensor:
    rows = len(args[0]) // len(members)
    with torch.no_grad():
        return torch.cat(
            [
                population.member(m)(*(x[i * rows : (i + 1) * rows] for x in args))
                for i, m in enumerate(members)
            ]
        )


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_meet_their_own_member(name: str, rows: int, rank: int) -> None:
    torch.manual_seed(0)
    population = asked(MODELS[name](), rank=rank, evaluation="vmap")
    x = torch.randn(8 * rows, 4)
    with population.folded() as folded:
        found = folded(x)
        again = folded(x + 1)
        few = folded.subset([6, 1, 3])(x[: 3 * rows])
    torch.testing.assert_close(found, one_by_one(population, range(8), x))
    torch.testing.assert_close(again, one_by_one(population, range(8), x + 1))
    torch.testing.assert_close(few, one_by_one(population, [6, 1, 3], x[: 3 * rows]))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (VanillaESTrainer, {"evaluation": "vmap"}),
        (EGGROLLTrainer, {"noise_reuse": 0}),
        (EGGROLLTrainer, {"evaluation": "sequential"}),
    ],
)
def test_for_every_kind_of_noise_and_one_after_another(trainer: Any, options: Any) -> None:
    population = asked(MODELS["mlp"](), trainer, **options)
    x = torch.randn(16, 4)
    with population.folded() as folded:
        torch.testing.assert_close(folded(x), one_by_one(population, range(8), x))
        part = folded.subset([2, 7])
        torch.testing.assert_close(part(x[:4]), one_by_one(population, [2, 7], x[:4]))


def test_a_state_stays_with_its_row() -> None:
    population = asked(Memory())
    xs, rows = torch.randn(5, 16, 4), 2
    with population.folded() as folded:
        state: Any = (torch.zeros(16, 6),)
        for x in xs:
            found, state = folded(x, state)
    for m in range(8):
        own, mine = (torch.zeros(rows, 6),), slice(m * rows, (m + 1) * rows)
        member = population.member(m)
        for x in xs:
            with torch.no_grad():
                expected, own = member(x[mine], own)
        torch.testing.assert_close(found[mine], expected)


def test_members_that_are_left_out_change_no_bit_of_the_others() -> None:
    """From eight rows on, the same kernels run: so results do not depend on who plays on."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    made = EGGROLLTrainer(
        model.parameters(), model, lambda _: 0.0, population_size=32, sigma=0.3, seed=1
    )
    x = torch.randn(32, 4)
    kept = [1, 2, 3, 5, 8, 13, 21, 30, 31]
    with made.ask().folded() as folded:
        assert torch.equal(folded.subset(kept)(x[kept]), folded(x)[kept])


def test_graphs_outlive_a_generation_and_take_its_weights() -> None:
    model = MODELS["mlp"]()
    x = torch.randn(8, 4)
    made = EGGROLLTrainer(
        model.parameters(), model, lambda _: 0.0, population_size=8, seed=0, evaluation="vmap"
    )
    for _ in range(3):
        population = made.ask()
        with population.folded() as folded:
            torch.testing.assert_close(folded(x), one_by_one(population, range(8), x))
        made.tell(torch.arange(8.0))
    (graphs,) = made.evaluator.graphs.values()  # type: ignore[attr-defined]
    assert len(graphs) == 1


class Noisy(nn.Module):
    """Drops weights, whatever the rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ nn.functional.dropout(self.layer.weight).T


def test_what_is_computed_once_is_never_random() -> None:
    population, x = asked(Noisy()), torch.ones(8, 4)
    with population.folded(checked=False) as folded:
        assert not torch.equal(folded(x), folded(x))


def test_split_graphs_do_what_the_whole_did() -> None:
    """Also where it writes into what the first inputs are: then nothing is computed once."""

    def scaled(weight: Tensor, count: Tensor, x: Tensor) -> Tensor:
        return x @ weight.exp().T + count.mul(2)

    def counting(weight: Tensor, count: Tensor, x: Tensor) -> Tensor:
        count.add_(1)
        return scaled(weight, count, x)

    x, weight = torch.randn(5, 3), torch.randn(2, 3)
    for function, computes in ((scaled, True), (counting, False)):
        early, late = split(trace(function, weight, torch.zeros(()), x), 2)
        assert any(node.op == "call_function" for node in early.graph.nodes) == computes
        mine, theirs = torch.zeros(()), torch.zeros(())
        values = early(weight, mine)
        for _ in range(3):
            torch.testing.assert_close(late(*values, x), function(weight, theirs, x))


def test_the_modes_of_modules_belong_to_a_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    made = EGGROLLTrainer(model.parameters(), model, lambda _: 0.0, population_size=8, seed=0)
    model.eval()
    x = torch.randn(8, 4)
    with made.ask().folded() as folded:
        whole = folded(x)
    model.train()
    with made.ask().folded(checked=False) as folded:
        assert (folded(x) == 0).any()
        assert not (whole == 0).any()


def test_what_cannot_be_batched_goes_one_after_another_aloud() -> None:
    population, x = asked(Branching()), torch.randn(8, 4)
    with pytest.warns(EggrollWarning, match="one after another"), population.folded() as folded:
        found = folded(x)
    torch.testing.assert_close(found, one_by_one(population, range(8), x))
    with warnings.catch_warnings(), population.folded() as folded:
        warnings.simplefilter("error")
        torch.testing.assert_close(folded(x), found)


def test_whoever_was_folded_before_the_failure_goes_on_too() -> None:
    population, x = asked(Branching()), torch.randn(8, 4)
    with population.folded() as folded:
        some = folded.subset([1, 2])
        with pytest.warns(EggrollWarning, match="one after another"):
            folded(x)
        torch.testing.assert_close(some(x[:2]), one_by_one(population, [1, 2], x[:2]))


def test_a_model_of_integers() -> None:
    class Choosing(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y.argmax(dim=1), y > 0

    population, x = asked(Choosing(nn.Linear(4, 3)), evaluation="vmap"), torch.randn(8, 4)
    with population.folded() as folded:
        choice, positive = folded(x)
    assert choice.tolist() == [population.member(i)(x[i : i + 1])[0].item() for i in range(8)]
    assert positive.dtype is torch.bool


def test_a_model_that_keeps_count_of_its_calls_is_found_out() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # a state that the members share
            return self.layer(x) * self.calls

    with (
        asked(Counting(), evaluation="vmap").folded() as folded,
        pytest.raises(NotBatchableError, match="alone"),
    ):
        folded(torch.randn(8, 4))


def test_rows_that_do_not_fit_the_members() -> None:
    with (
        asked(nn.Linear(4, 2)).folded() as folded,
        pytest.raises(PopulationSizeError, match=r"\(9, 4\).*8 members"),
    ):
        folded(torch.randn(9, 4))


def test_a_population_that_has_ended() -> None:
    model = nn.Linear(4, 2)
    made = EGGROLLTrainer(model.parameters(), model, lambda _: 0.0, population_size=8, seed=0)
    population = made.ask()
    made.tell(torch.zeros(8))
    with pytest.raises(AskTellError), population.folded():
        pass
