"""Networks that backpropagation cannot train as they are: sign activations, and spikes.

The derivative of a sign or of a spike is zero almost everywhere. EGGROLL trains such networks on
scores: the cross-entropy, or the accuracy itself. Adam is given three chances: the network as it
is, where only the layer after the last step learns; with the usual surrogate derivative; and, on
an ordinary ReLU network beside them, everything.

    python examples/nondifferentiable.py --seconds 30 --data-dir FOLDER
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from comparison_framework import Budget, Comparison, Task, compare, sweep
from matplotlib.figure import Figure
from methods import BASELINES, Evolution
from models import mlp
from torch import Tensor, nn
from utils import (
    load_images,
    parser,
    principal_components,
    save_figure,
    save_results,
    upright,
)

from eggroll_trainer import fitness

COMPONENTS = 28
WHITENING = 0.25
HIDDEN = 64
EGGROLL = Evolution(learning_rate=0.02, sigma=0.05, population_size=2048, batch_size=128)
ADAM, ADAM_RATES = BASELINES["Adam"]
TIME_STEPS = 8  # of the spiking network
DECAY = 0.8  # of a neuron's potential, in a step


class Sign(nn.Module):
    """−1 or 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, -1.0, 1.0)


class StraightThroughSign(Sign):
    """The same, but its derivative is that of a clipped identity (Courbariaux and others, 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        soft = F.hardtanh(x)
        return soft + (super().forward(x) - soft).detach()


class Spike(nn.Module):
    """1 where a neuron's potential is above its threshold, 1, else 0."""

    def forward(self, potential: Tensor) -> Tensor:
        return torch.where(potential > 1.0, 1.0, 0.0)


class SurrogateSpike(Spike):
    """The same, but its derivative is that of a steep sigmoid (Neftci and others, 2019)."""

    def forward(self, potential: Tensor) -> Tensor:
        soft = torch.sigmoid(4 * (potential - 1.0))
        return soft + (super().forward(potential) - soft).detach()


class LeakyNeurons(nn.Module):
    """Leaky integrate-and-fire neurons under a constant current: how often they spike."""

    def __init__(self, spike: nn.Module) -> None:
        super().__init__()
        self.spike = spike

    def forward(self, current: Tensor) -> Tensor:
        potential, spikes = torch.zeros_like(current), torch.zeros_like(current)
        for _ in range(TIME_STEPS):
            potential = DECAY * potential + current
            fired = self.spike(potential)
            potential = potential - fired  # a spike takes the threshold off
            spikes = spikes + fired
        return spikes / TIME_STEPS


# Network → Adam's chances → activation. EGGROLL trains the first, the network as it is.
NETWORKS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "sign": {"Adam, as it is": Sign, "Adam, surrogate": StraightThroughSign},
    "spiking": {
        "Adam, as it is": lambda: LeakyNeurons(Spike()),
        "Adam, surrogate": lambda: LeakyNeurons(SurrogateSpike()),
    },
    "ReLU": {"Adam": nn.ReLU},
}
BY_SCORES = {
    "EGGROLL, cross-entropy": EGGROLL,
    "EGGROLL, accuracy": replace(EGGROLL, fitness=fitness.accuracy),
}


def main() -> None:
    args = parser(__doc__, seconds=30, out="nondifferentiable").parse_args()
    images = load_images(args.dataset, args.data_dir)
    data, _ = principal_components(upright(images), COMPONENTS, WHITENING)
    print(data)
    budget, seeds = Budget(seconds=args.seconds), [args.seed]
    runs, sweeps = [], {}
    for name, chances in NETWORKS.items():
        tasks = {
            title: Task(name, functools.partial(mlp, COMPONENTS, HIDDEN, 10, activation=a), data)
            for title, a in chances.items()
        }
        runs += compare([next(iter(tasks.values()))], BY_SCORES, budget, seeds).runs
        for title, task in tasks.items():
            adam, sweeps[f"{name}, {title}"] = sweep(task, title, ADAM, budget / 6, ADAM_RATES)
            runs += compare([task], {title: adam}, budget, seeds).runs
    comparison = Comparison(budget, runs)
    print(f"\n{comparison.table()}\n")
    save_results(args.out, {"data": data.source, "sweeps": sweeps, **comparison.numbers()})
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), NETWORKS, strict=True):
        comparison.plot(axes, name)
    figure.suptitle(f"{COMPONENTS}·{HIDDEN}·10 networks, {budget}")
    save_figure(figure, args.out / "nondifferentiable.png")


if __name__ == "__main__":
    main()
