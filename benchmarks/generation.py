"""A whole generation as a multiple of inference: EGGROLL, dense ES and the loop, same work."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timing import medians, table
from torch import Tensor, nn

from eggroll_trainer import EGGROLLTrainer, ESTrainer, VanillaESTrainer


@dataclass(frozen=True)
class Work:
    """A population's work: an MLP's widths, members, rows that all members share."""

    widths: tuple[int, ...]
    members: int
    rows: int
    asked: float | None

    @property
    def title(self) -> str:
        """For the table."""
        return f"{'·'.join(map(str, self.widths))}, {self.members} × {self.rows}"


WORKS = (
    Work((256, 256, 256, 256, 8), 1024, 1, asked=8),
    Work((256, 1024, 1024, 8), 256, 16, asked=1.4),
    Work((784, 256, 256, 10), 256, 128, asked=1.1),
    Work((1024, 1024, 1024, 1024), 1024, 1, asked=None),
)


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inference(model: nn.Module, rows: Tensor) -> Callable[[], None]:
    """The unperturbed model on as many rows as the whole population sees."""

    @torch.no_grad()
    def run() -> None:
        model(rows)

    return run


def hand_written(
    model: nn.Module, fitness: Callable[..., Tensor], members: int
) -> Callable[[], None]:
    """The loop that a careful person writes: swap weights, call, restore; one generation."""
    parameters = list(model.parameters())
    centre = [p.detach().clone() for p in parameters]
    factors = [
        (torch.randn(members // 2, p.shape[0], 1), torch.randn(members // 2, 1, p.shape[1]))
        if p.dim() == 2
        else (torch.randn(members // 2, *p.shape),)
        for p in parameters
    ]

    @torch.no_grad()
    def run() -> None:
        scores = []
        for i in range(members):
            k, sign = i // 2, 0.1 - 0.2 * (i % 2)
            for p, c, noise in zip(parameters, centre, factors, strict=True):
                if len(noise) == 2:
                    p.copy_(torch.addmm(c, noise[0][k], noise[1][k], alpha=sign))
                else:
                    p.copy_(torch.add(c, noise[0][k], alpha=sign))
            scores.append(fitness(model))
        for p, c in zip(parameters, centre, strict=True):
            p.copy_(c)
        torch.stack(scores)

    return run


def trainers(work: Work) -> tuple[dict[str, ESTrainer], nn.Module, Callable[..., Tensor], Tensor]:
    """The contestants on one work, each with a model of its own."""
    torch.manual_seed(0)
    x = torch.randn(work.rows, work.widths[0])
    y = torch.randint(0, work.widths[-1], (work.rows,))

    def fitness(model: nn.Module) -> Tensor:
        return -F.cross_entropy(model(x), y)

    def make(kind: type[EGGROLLTrainer] | type[VanillaESTrainer], evaluation: str) -> ESTrainer:
        model = mlp(work.widths)
        return kind(model.parameters(), model, fitness, work.members, seed=0, evaluation=evaluation)

    contestants = {
        "EGGROLL": make(EGGROLLTrainer, "auto"),
        "EGGROLL, sequential": make(EGGROLLTrainer, "sequential"),
        "dense ES": make(VanillaESTrainer, "auto"),
        "dense ES, sequential": make(VanillaESTrainer, "sequential"),
    }
    return (
        contestants,
        mlp(work.widths),
        fitness,
        torch.randn(work.members * work.rows, work.widths[0]),
    )


def report(threads: tuple[int, ...] = (1, 2), seconds: float = 3.0) -> str:
    """The tables of this file, as Markdown."""
    header = [
        *("widths, members × rows", "threads", "pure, ms", "EGGROLL", "asked", "sequential"),
        *("loop by hand", "dense ES", "dense, sequential", "EGGROLL over dense ES"),
    ]
    rows, shares = [], []
    for count in threads:
        torch.set_num_threads(count)
        for work in WORKS:
            contestants, model, fitness, inputs = trainers(work)
            runs: dict[str, Callable[[], object]] = {
                name: trainer.step for name, trainer in contestants.items()
            }
            runs["pure"] = inference(model, inputs)
            runs["hand"] = hand_written(mlp(work.widths), fitness, work.members)
            took = medians(runs, seconds)
            pure = took["pure"]
            rows.append(
                [work.title, str(count), f"{1e3 * pure:.2f}", f"**{took['EGGROLL'] / pure:.2f}**"]
                + ["–" if work.asked is None else f"≤ {work.asked}"]
                + [f"{took[name] / pure:.1f}" for name in ("EGGROLL, sequential", "hand")]
                + [f"{took[name] / pure:.1f}" for name in ("dense ES", "dense ES, sequential")]
                + [f"{took['dense ES'] / took['EGGROLL']:.0f}×"]
            )
            history = contestants["EGGROLL"].history[5:]
            phases = [
                statistics.median(h[f"{phase}_seconds"] for h in history) / pure
                for phase in ("ask", "evaluate", "tell")
            ]
            shares.append([work.title, str(count), *(f"{share:.2f}" for share in phases)])
    phase_header = ["widths, members × rows", "threads", "draw", "evaluate", "update and step"]
    return (
        "A whole generation, as a multiple of pure inference on the same number of rows:\n\n"
        + table(header, rows)
        + "\n\nEGGROLL's generation by phase, in the same unit:\n\n"
        + table(phase_header, shares)
    )


if __name__ == "__main__":
    print(report())
