"""Which settings train best on MNIST: one changed at a time, scored on held-out training images.

    python benchmarks/mnist_search.py --data-dir FOLDER --seconds 30

Every run has the same budget of seconds, so that a larger population or a larger network pays for
itself or loses. The test set is never looked at. Writes the table of `docs/choosing.md` to
`benchmarks/mnist_search.md`, and its figure.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from timing import hardware, table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from comparison_framework import Budget, Run, Task, run
from methods import Evolution
from models import mlp, size
from utils import (
    Data,
    averaged,
    centred,
    load_images,
    principal_components,
    save_figure,
    tidy,
    upright,
)

from eggroll_trainer import fitness

COMPONENTS, WHITENING, HIDDEN = 28, 0.25, 64
BASE = Evolution()

# What is changed → setting → change: of the method's fields, or of how the task is made.
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "learning rate": {f"{x:g}": {"learning_rate": x} for x in (0.005, 0.01, 0.04, 0.08)},
    "σ": {f"{x:g}": {"sigma": x} for x in (0.01, 0.02, 0.1, 0.2)},
    "σ at the end, of σ": {f"{x:g}": {"final_sigma": x} for x in (0.1, 1.0)},
    "population × batch": {
        f"{n} × {b}": {"population_size": n, "batch_size": b}
        for n, b in ((256, 128), (512, 512), (1024, 256), (4096, 64), (8192, 128))
    },
    "rank": {f"{r}": {"options": {"rank": r}} for r in (2, 4)},
    "shaping": {"centered_rank": {"options": {"shaping": "centered_rank"}}},
    "noise_reuse": {"1 (no pairs)": {"options": {"noise_reuse": 1}}},
    "temperature": {
        f"{t:g}": {"fitness": functools.partial(fitness.cross_entropy, temperature=t)}
        for t in (0.5, 2.0)
    },
    "fitness": {"accuracy": {"fitness": fitness.accuracy}},
}
INPUTS: dict[str, Callable[[Data], Data]] = {
    "784 pixels, as they are": lambda images: images,
    "784 pixels, mean taken off": centred,
    "196, averaged 2×2, mean taken off": averaged,
    "28 components, not upright": lambda images: components(images, 28, 0.25),
    "784 pixels, upright, mean taken off": lambda images: centred(upright(images)),
    **{
        f"{n} components, whitening {w:g}": lambda images, n=n, w=w: components(
            upright(images), n, w
        )
        for n, w in ((16, 0.25), (48, 0.25), (28, 0.0), (28, 0.5))
    },
}
HIDDENS = {"32": (32,), "128": (128,), "64·64": (64, 64)}


def components(images: Data, count: int, whitening: float) -> Data:
    """Principal components."""
    return principal_components(images, count, whitening)[0]


def task(data: Data, hidden: tuple[int, ...]) -> Task:
    """An MLP for these inputs."""
    width = data.train.x[0].numel()
    return Task("MNIST", functools.partial(mlp, width, *hidden, 10), data)


def candidates(images: Data) -> list[tuple[str, str, Task, Evolution]]:
    """What is changed, to what, and what is run for it; the first changes nothing."""
    inputs = components(upright(images), COMPONENTS, WHITENING)
    base = task(inputs, (HIDDEN,))
    found = [("–", "–", base, BASE)]
    for changed, settings in METHODS.items():
        found += [(changed, name, base, replace(BASE, **s)) for name, s in settings.items()]
    for name, prepare in INPUTS.items():
        found.append(("inputs", name, task(prepare(images), (HIDDEN,)), BASE))
    for name, hidden in HIDDENS.items():
        found.append(("hidden", name, task(inputs, hidden), BASE))
    return found


def plot(rows: list[tuple[str, str, Run]], path: Path) -> None:
    """Error of every setting, beside the one that nothing was changed in."""
    base = 100 * (1 - rows[0][2].accuracy)
    figure = Figure(figsize=(8, 0.24 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    errors = [100 * (1 - result.accuracy) for *_, result in rows[1:]]
    labels = [f"{changed}: {setting}" for changed, setting, _ in rows[1:]]
    colours = ["#66a182" if error < base else "#d1495b" for error in errors]
    axes.barh(labels, errors, color=colours)
    axes.axvline(base, color="black", lw=1)
    axes.text(base, -1.1, f"base: {base:.1f} %", ha="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="error on the held-out part after an equal time, %")
    axes.tick_params(axis="y", labelsize=8)
    tidy(axes)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=30, help="budget of each run")
    args = parser.parse_args()
    images = load_images("mnist", args.data_dir).held_out()
    budget = Budget(seconds=args.seconds)
    rows = [
        (changed, setting, run(made, f"{changed} {setting}", method, budget, seed=0))
        for changed, setting, made, method in candidates(images)
    ]
    lines = [
        [
            changed,
            setting,
            f"{size(result.model):,}",
            f"{result.curve[-1]['steps']:,}",
            f"{result.accuracy:.2%}",
        ]
        for changed, setting, result in rows
    ]
    header = ["changed", "to", "parameters", "generations", "accuracy"]
    text = (
        f"# Settings on MNIST, {budget} each\n\n{hardware()}\n{images.source}\n\n"
        f"Base: upright images, {COMPONENTS} components (whitening {WHITENING:g}), {HIDDEN} hidden "
        f"units, population {BASE.population_size}, batch {BASE.batch_size}, learning rate "
        f"{BASE.learning_rate:g}, σ {BASE.sigma:g} falling to {BASE.final_sigma:g} of it, rank 1."
        "\n\n"
        f"{table(header, lines)}\n"
    )
    (Path(__file__).parent / "mnist_search.md").write_text(text)
    print(text)
    plot(rows, Path(__file__).parent.parent / "docs" / "images" / "choosing.png")


if __name__ == "__main__":
    main()
