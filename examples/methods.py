"""Ways of training a network, for `comparison_framework.py`: by gradients, and by evolution."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from utils import Split

from eggroll_trainer import Callback, EGGROLLTrainer, ESTrainer, fitness

if TYPE_CHECKING:
    from comparison_framework import Meter


def cosine(progress: float, final: float = 0.0) -> float:
    """From 1 to `final`, as half a cosine."""
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Gradient:
    """Backpropagation through the fitness; the learning rate falls to 0 as half a cosine."""

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    learning_rate: float = 3e-3
    batch_size: int = 128
    fitness: Callable[..., Tensor] = fitness.cross_entropy

    def __call__(self, model: nn.Module, train: Split, meter: Meter, seed: int) -> None:
        """Train; a forward and a backward pass cost three forward passes."""
        optimizer = self.optimizer(model.parameters(), lr=self.learning_rate)
        for batch in self._batches(train, seed):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * cosine(meter.progress)
            optimizer.zero_grad()
            (-self.fitness(model, batch)).backward()
            optimizer.step()
            if not meter.tick(len(batch[1]), 3 * len(batch[1])):
                return

    def _batches(self, train: Split, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(train), generator=generator)
            for batch in order.split(self.batch_size):
                yield train.x[batch], train.y[batch]


@dataclass(frozen=True)
class Evolution:
    """An evolution strategy; learning rate and σ fall as half a cosine.

    Why these defaults: `docs/choosing.md`.
    """

    trainer: type[ESTrainer] = EGGROLLTrainer
    learning_rate: float = 0.02  # Adam's; falls to 0
    sigma: float = 0.05  # in units of the weights; falls to `final_sigma` of it
    final_sigma: float = 0.3
    population_size: int = 2048
    batch_size: int = 128
    fitness: Callable[..., Tensor] = fitness.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict)  # the trainer's own

    def __call__(
        self, model: nn.Module, train: Split, meter: Meter, seed: int
    ) -> list[dict[str, float]]:
        """Train; returns the metrics of each generation."""
        trainer = self.trainer(
            model.parameters(),
            model=model,
            fitness_fn=self.fitness,
            population_size=self.population_size,
            learning_rate=self.learning_rate,
            sigma=lambda _: self.sigma * cosine(meter.progress, self.final_sigma),
            seed=seed,
            data=torch.utils.data.TensorDataset(train.x, train.y),
            batch_size=self.batch_size,
            optimizer=torch.optim.Adam,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda _: cosine(meter.progress)
            ),
            callbacks=[_Ticks(meter, len(train), self.batch_size)],
            **self.options,
        )
        trainer.train(10**9, verbose=False)
        return trainer.history


class _Ticks(Callback):
    """Counts generations, and ends the run when the budget is spent."""

    def __init__(self, meter: Meter, examples: int, batch_size: int) -> None:
        self.meter = meter
        self.sizes = [min(batch_size, examples - i) for i in range(0, examples, batch_size)]

    def on_generation_end(self, trainer: ESTrainer, metrics: dict[str, float]) -> None:
        samples = self.sizes[int(metrics["generation"]) % len(self.sizes)]
        if not self.meter.tick(samples, samples * trainer.population_size):
            trainer.stop()


# With momentum, and at learning rates to sweep: a comparison needs its baselines at their best.
BASELINES = {
    "SGD": (Gradient(functools.partial(torch.optim.SGD, momentum=0.9)), (0.03, 0.1, 0.3)),
    "Adam": (Gradient(torch.optim.Adam), (1e-3, 3e-3, 1e-2)),
}
