"""An MLP, a CNN and a Transformer on MNIST, each by EGGROLL, dense ES, SGD and Adam, in equal time.

Writes one table and one figure. Every learning rate is swept first, on a part of the training set.

    python examples/run_all_comparisons.py --seconds 60 --data-dir FOLDER
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comparison_framework import Budget, Comparison, Task, compare, sweep
from matplotlib.figure import Figure
from methods import BASELINES, Evolution
from models import PatchTransformer, cnn, mlp, size
from utils import (
    Data,
    averaged,
    load_images,
    parser,
    save_figure,
    save_results,
    upright,
)

from eggroll_trainer import VanillaESTrainer

# Batches are small: with thousands of parameters to a member the noise of the perturbations
# outweighs the noise of the batch, and more generations beat more examples.
EGGROLL = {
    "MLP": Evolution(population_size=1024, batch_size=64),
    "CNN": Evolution(population_size=1024, batch_size=32, options={"matricize": True}),
    "Transformer": Evolution(population_size=512, batch_size=16, sigma=0.02),
}
METHODS = ("EGGROLL", "Vanilla ES", *BASELINES)
COMPILED = ("MLP", "Transformer")  # where compiling makes the dense trainer faster, too
# Where the sweeps of both begin. A step of noise is larger than one of signal in most directions:
# the more parameters and the longer the run, the less it may be.
ES_RATES = {
    "MLP": (0.007, 0.02, 0.06),
    "CNN": (0.007, 0.02, 0.06),
    "Transformer": (0.003, 0.01, 0.03),
}


def make_tasks(images: Data) -> list[Task]:
    """Networks of 10,000 to 50,000 parameters, on digits made upright, of 14×14 pixels."""
    pixels = averaged(upright(images))
    return [
        Task("MLP", lambda: mlp(196, 256, 10), pixels),
        Task("CNN", lambda: cnn(16), pixels),
        Task("Transformer", lambda: PatchTransformer(width=64), pixels),
    ]


def strategies(network: str, compiled: bool) -> dict[str, Any]:
    """EGGROLL and dense ES, alike but for their noise, and the learning rates to begin with."""
    eggroll = EGGROLL[network]
    dense = {"compile": compiled and network in COMPILED}
    return {
        "EGGROLL": (
            replace(eggroll, options={**eggroll.options, "compile": compiled}),
            ES_RATES[network],
        ),
        "Vanilla ES": (
            replace(eggroll, trainer=VanillaESTrainer, options=dense),
            ES_RATES[network],
        ),
    }


def main() -> None:
    options = parser(__doc__, seconds=60, out="run_all_comparisons")
    options.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    options.add_argument("--only", choices=tuple(EGGROLL), help="one of the networks")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="some")
    options.add_argument(
        "--compile", action="store_true", help="twice as fast; needs a C++ compiler"
    )
    args = options.parse_args()
    tasks = make_tasks(load_images(args.dataset, args.data_dir))
    tasks = [task for task in tasks if args.only in (None, task.name)]
    budget = Budget(seconds=args.seconds)
    seeds = range(args.seed, args.seed + args.seeds)
    runs, sweeps = [], {}
    for task in tasks:
        print(f"{task.name}: {size(task.model(0)):,} parameters; {task.data}")
        methods: dict[str, Any] = {}
        evolution = strategies(task.name, args.compile)
        candidates = evolution | BASELINES
        for name in args.methods:
            method, begin = candidates[name]
            methods[name], found = sweep(task, name, method, budget / 4, begin)
            sweeps[f"{task.name}, {name}"] = found
        runs += compare([task], methods, budget, seeds).runs
    comparison = Comparison(budget, runs)
    print(f"\n{comparison.table()}\n")

    save_results(args.out, {"sweeps": sweeps, **comparison.numbers()})
    figure = Figure(figsize=(4.3 * len(tasks), 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        comparison.plot(axes, task.name)
    save_figure(figure, args.out / "comparisons.png")


if __name__ == "__main__":
    main()
