"""Peak memory of two generations against the population's size, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from generation import mlp
from timing import table

from eggroll_trainer import EGGROLLTrainer

WIDTHS = (784, 128, 10)  # 101,770 parameters
SIZES = (1_000, 10_000, 100_000)


def peak() -> float:
    """Peak resident memory of this process so far, in MiB.

    From /proc: `getrusage` would count what the parent process had when it started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def measure(population_size: int) -> None:
    """Print the memory that two generations take above the model and its data, and their time."""
    torch.manual_seed(0)
    model = mlp(WIDTHS)
    x, y = torch.randn(64, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (64,))
    model(x)
    before = peak()
    trainer = EGGROLLTrainer(
        model.parameters(), model, lambda m: -F.cross_entropy(m(x), y), population_size, seed=0
    )
    trainer.step()
    metrics = trainer.step()
    print(peak() - before, metrics["members_per_second"], trainer.evaluator.chunk_size)


def report() -> str:
    """The table of this file, as Markdown."""
    rows = []
    for size in SIZES:
        command = [sys.executable, __file__, str(size)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        mib, rate, chunk = out.split()
        rows.append([f"{size:,}", f"{float(mib):,.0f}", chunk, f"{float(rate):,.0f}"])
    title = (
        "Memory above the model, 784·128·10 (101,770 parameters), 64 rows shared; asked: a "
        "population of 100,000 in under 2,048 MiB:\n\n"
    )
    return title + table(["members", "MiB", "chunk", "members/s"], rows)


if __name__ == "__main__":
    measure(int(sys.argv[1]))
