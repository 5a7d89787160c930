"""How the size of a chunk moves the speed of an evaluation: what `CHUNK_BYTES` rests on."""

from __future__ import annotations

import functools

import torch
from timing import medians, table
from zoo import trainer, zoo

from eggroll_trainer import batched

MEBIBYTES = (1, 2, 4, 8, 16, 32)


def report(seconds: float = 0.5, population_size: int = 128) -> str:
    """The table of this file, as Markdown: milliseconds by the largest tensor of a chunk."""
    torch.set_num_threads(1)
    rows = []
    for name, case in zoo().items():
        runs = {}
        for size in MEBIBYTES:
            batched.CHUNK_BYTES["cpu"] = size * 2**20
            contestant = trainer(case, "vmap", True, population_size)
            population = contestant.ask()
            contestant.evaluate(population)  # chooses the chunk
            runs[str(size)] = functools.partial(contestant.evaluate, population)
        took = medians(runs, seconds)
        rows.append([name, *(f"{1e3 * took[str(size)]:.1f}" for size in MEBIBYTES)])
    return table(["module, ms", *(f"{size} MiB" for size in MEBIBYTES)], rows)


if __name__ == "__main__":
    print(report())
