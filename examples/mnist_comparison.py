"""EGGROLL against SGD and Adam on MNIST: how far scores alone get, and what was learnt.

All train the same network on the same inputs: principal components of the digits, made upright.
The learning rates of SGD and Adam are swept first, on a part of the training set. Writes the
learning curves, a picture of what the networks do, and the numbers.

    python examples/mnist_comparison.py --seconds 60 --data-dir FOLDER
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comparison_framework import Budget, Comparison, Run, Task, compare, sweep
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from methods import BASELINES, Evolution
from models import mlp, size
from torch import Tensor
from utils import (
    COLOURS,
    Data,
    Projection,
    load_images,
    logits,
    parser,
    principal_components,
    save_figure,
    save_results,
    tidy,
    upright,
)

COMPONENTS = 28
WHITENING = 0.25
EGGROLL = Evolution(learning_rate=0.02, sigma=0.05, population_size=2048, batch_size=128)


def swept(task: Task, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    """SGD and Adam at their best learning rates, and what the sweeps found."""
    methods, found = {}, {}
    for name, (method, rates) in BASELINES.items():
        methods[name], found[name] = sweep(task, name, method, budget, rates)
        print(f"{name}: best at a learning rate of {methods[name].learning_rate:g}")
    return methods, found


def plot_curves(comparison: Comparison, task: str, path: Path) -> None:
    """Error over seconds and over samples; σ and the update's norm of EGGROLL over generations."""
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    errors, samples, sigma, norm = figure.subplots(1, 4)
    comparison.plot(errors, task, "seconds")
    comparison.plot(samples, task, "samples")
    samples.get_legend().remove()
    history = comparison.of(task, "EGGROLL")[0].returned
    for axes, key, title in (
        (sigma, "sigma", "EGGROLL: σ, in units of the weights"),
        (norm, "update_norm", "EGGROLL: norm of the update"),
    ):
        axes.plot([metrics[key] for metrics in history], color=COLOURS["EGGROLL"], lw=0.8)
        axes.set(title=title, xlabel="generations")
        tidy(axes)
    save_figure(figure, path)


def show(axes: Axes, image: Tensor, title: str, **options: Any) -> None:
    """One small picture."""
    axes.imshow(image.reshape(28, 28).numpy(), **{"cmap": "gray_r", **options})
    axes.set_title(title, fontsize=8)
    axes.axis("off")


def plot_filters(figure: Any, run: Run, project: Projection) -> None:
    """The first layer's sixteen largest filters, as they act on pixels."""
    layer = next(m for m in run.model.modules() if isinstance(m, torch.nn.Linear))
    filters = project.filters(layer.weight.detach())
    largest = filters.norm(dim=1).argsort(descending=True)[:16]
    figure.suptitle(f"first layer, {run.method}", fontsize=10)
    figure.subplots(2, 8)
    for axes in figure.axes:
        axes.axis("off")
    for axes, row in zip(figure.axes, filters[largest], strict=False):
        bound = row.abs().max().item()
        show(axes, row, "", cmap="RdBu_r", vmin=-bound, vmax=bound)


def plot_confusion(axes: Axes, truth: Tensor, guess: Tensor) -> None:
    """How often each digit is taken for each other; the diagonal is left out."""
    counts = torch.zeros(10, 10, dtype=torch.int64)
    counts.index_put_((truth, guess), torch.ones_like(truth), accumulate=True)
    counts.fill_diagonal_(0)
    axes.imshow(counts.numpy(), cmap="Reds")
    for i, j in counts.nonzero().tolist():
        axes.text(j, i, str(int(counts[i, j])), ha="center", va="center", fontsize=7)
    axes.set(xticks=range(10), yticks=range(10), xlabel="taken for", ylabel="digit")
    axes.set_title("EGGROLL: mistakes on the test set", fontsize=10)


def plot_networks(runs: list[Run], data: Data, test_x: Tensor, project: Any, path: Path) -> None:
    """Filters of the networks; EGGROLL's confusions, and the mistakes it is surest of."""
    truth, out = data.test.y, logits(runs[0].model, test_x)
    guess, sure = out.argmax(dim=1), out.softmax(dim=1).amax(dim=1)
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1.15, 0.9, 0.95))
    for part, run in zip(left.subfigures(2, 1), runs[:2], strict=True):
        plot_filters(part, run, project)
    plot_confusion(middle.subplots(), truth, guess)
    wrong = (guess != truth).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True)][:20].tolist()
    right.suptitle("EGGROLL: the mistakes it is surest of", fontsize=10)
    right.subplots(4, 5)
    for axes in right.axes:
        axes.axis("off")
    for axes, index in zip(right.axes, worst, strict=False):
        title = f"{truth[index]}, not {guess[index]}"
        show(axes, data.test.x[index], title)
    save_figure(figure, path)


def main() -> None:
    options = parser(__doc__, seconds=60, out="mnist_comparison")
    options.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    options.add_argument(
        "--baseline-seconds", type=float, help="budget of SGD and Adam, if another than --seconds"
    )
    options.add_argument("--hidden", type=int, default=64, help="units; 128 for minutes and more")
    options.add_argument(
        "--compile", action="store_true", help="twice as fast; needs a C++ compiler"
    )
    args = options.parse_args()
    images = load_images(args.dataset, args.data_dir)
    data, project = principal_components(upright(images), COMPONENTS, WHITENING)
    task = Task(args.dataset, functools.partial(mlp, COMPONENTS, args.hidden, 10), data)
    print(data)
    print(f"a {COMPONENTS}·{args.hidden}·10 network of {size(task.model(0)):,} parameters")

    seeds = range(args.seed, args.seed + args.seeds)
    seconds = args.baseline_seconds or args.seconds
    baselines, found = swept(task, Budget(seconds=seconds) / 6)
    method = replace(EGGROLL, options={"compile": args.compile})
    eggroll = compare([task], {"EGGROLL": method}, Budget(seconds=args.seconds), seeds)
    others = compare([task], baselines, Budget(seconds=seconds), seeds)
    comparison = Comparison(eggroll.budget, eggroll.runs + others.runs)
    print(f"\n{comparison.table()}\n")

    middle = [comparison.middle(task.name, name) for name in ("EGGROLL", "SGD", "Adam")]
    history = middle[0].returned
    some = history[:: max(1, len(history) // 200)]
    kept = {key: [round(m[key], 6) for m in some] for key in ("sigma", "update_norm")}
    save_results(
        args.out,
        {
            "data": data.source,
            "settings": {k: getattr(v, "__name__", v) for k, v in vars(method).items()},
            "sweeps": found,
            "eggroll_test_accuracy": comparison.accuracy(task.name, "EGGROLL"),
            **comparison.numbers(),
            "eggroll_history": kept,
        },
    )
    plot_curves(comparison, task.name, args.out / "curves.png")
    plot_networks(middle, images, data.test.x, project, args.out / "networks.png")


if __name__ == "__main__":
    main()
