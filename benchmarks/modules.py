"""Other modules, and other precisions, over inference; the zoo, batched over looped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from generation import inference, mlp
from timing import medians, table
from torch import Tensor, nn
from zoo import Case, trainer, zoo

from eggroll_trainer import EGGROLLTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import models


def cnn() -> nn.Sequential:
    """A small conv net for 28×28 images, 21 k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class Encoder(nn.Module):
    """One encoder layer of width 256 and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 256) → (B, 10)."""
        return self.head(self.layer(x).mean(dim=1))


def over_inference(threads: tuple[int, ...], seconds: float) -> str:
    """A generation of larger modules as a multiple of inference."""
    works: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...], int], ...] = (
        ("conv net (matricize), 256 members × 32 images", cnn, (32, 1, 28, 28), 256),
        ("encoder layer of width 256, 64 members × 4 × 64", Encoder, (4, 64, 256), 64),
        ("the examples' CNN, 256 members × 128 images", models.cnn, (128, 1, 14, 14), 256),
        ("the examples' Transformer, 256 × 64", models.PatchTransformer, (64, 1, 14, 14), 256),
    )
    kinds: dict[str, dict[str, Any]] = {
        **{name: {"evaluation": name} for name in ("auto", "vmap", "sequential")},
        "compile=True": {"evaluation": "vmap", "compile": True},
    }
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        for title, make, shape, members in works:
            torch.manual_seed(0)
            x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
            every = torch.randn(members * shape[0], *shape[1:])

            def fitness(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
                return -F.cross_entropy(model(x), y)

            runs: dict[str, Callable[[], object]] = {"pure": inference(make(), every)}
            for name, options in kinds.items():
                model = make()
                runs[name] = EGGROLLTrainer(
                    model.parameters(), model, fitness, members, seed=0, matricize=True, **options
                ).step
            took = medians(runs, seconds)
            rows.append(
                [title, str(count), f"{1e3 * took['pure']:.1f}"]
                + [f"{took[name] / took['pure']:.2f}" for name in kinds]
            )
    header = ["module", "threads", "pure, ms", *kinds]
    return "A whole generation, as a multiple of pure inference:\n\n" + table(header, rows)


def precisions(threads: tuple[int, ...], seconds: float) -> str:
    """A generation of two MLPs in bfloat16, and compiled, against float32 as it is."""
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        for widths, members in (((28, 64, 10), 2048), ((784, 256, 256, 10), 256)):
            took = medians(_precision_runs(widths, members), seconds)
            shares = [f"{took[name] / took['float32']:.2f}" for name in list(took)[1:]]
            title = f"{'·'.join(map(str, widths))}, {members} × 128"
            rows.append([title, str(count), f"{1e3 * took['float32']:.0f}", *shares])
    header = ["widths, members × rows", "threads", "float32, ms", "autocast to bfloat16"]
    header += ["bfloat16 model", "torch.compile(model)", "compile=True"]
    return "A generation as a multiple of float32's:\n\n" + table(header, rows)


def _precision_runs(widths: tuple[int, ...], members: int) -> dict[str, Callable[[], object]]:
    x, y = torch.randn(128, widths[0]), torch.randint(0, 10, (128,))

    def fitness(model: nn.Module) -> Tensor:
        return -F.cross_entropy(model(x), y)

    def autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fitness(model)

    def bfloat16(model: nn.Module) -> Tensor:
        return -F.cross_entropy(model(x.bfloat16()).float(), y)

    runs: dict[str, Callable[[], object]] = {}
    for title, score, prepare, compile in (
        ("float32", fitness, nn.Module.float, False),
        ("autocast", autocast, nn.Module.float, False),
        ("bfloat16 model", bfloat16, nn.Module.bfloat16, False),
        ("torch.compile", fitness, torch.compile, False),
        ("compile=True", fitness, nn.Module.float, True),
    ):
        torch.manual_seed(0)
        model: nn.Module = prepare(mlp(widths))
        runs[title] = EGGROLLTrainer(
            model.parameters(), model, score, members, seed=0, evaluation="vmap", compile=compile
        ).step
    return runs


def speed_ups(case: Case, matricize: bool, seconds: float) -> tuple[str, float]:
    """What `auto` chose for a module, and how much faster than `sequential` it evaluates."""
    contestants = {
        evaluation: trainer(case, evaluation, matricize, population_size=64)
        for evaluation in ("auto", "sequential")
    }
    runs: dict[str, Callable[[], object]] = {
        evaluation: functools.partial(contestant.evaluate, contestant.ask())
        for evaluation, contestant in contestants.items()
    }
    took = medians(runs, seconds)
    return contestants["auto"].evaluator.name, took["sequential"] / took["auto"]


def auto_over_sequential(threads: tuple[int, ...], seconds: float) -> str:
    """How much faster `auto` evaluates a population than `sequential`, for every kind of module."""
    rows = []
    for name, case in zoo().items():
        kernels = any(p.dim() > 2 for p in case[0].parameters())
        for matricize in (False, True) if kernels else (False,):
            row = [name + (", matricize" if matricize else "")]
            for count in threads:
                torch.set_num_threads(count)
                chosen, speed_up = speed_ups(case, matricize, seconds)
                row += [chosen, f"{speed_up:.2f}"]
            rows.append(row)
    header = [
        "module",
        *(f"{x}, {n} thread(s)" for n in threads for x in ("auto chose", "speed-up")),
    ]
    title = "`auto` against `sequential`, 64 members; 1.0 is equal:\n\n"
    return title + table(header, rows)


if __name__ == "__main__":
    print(over_inference((1, 2), 3.0), auto_over_sequential((1, 2), 0.5), sep="\n\n")
