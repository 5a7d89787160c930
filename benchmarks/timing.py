"""Fair timing on a shared machine: the contestants take turns, and medians are compared."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def medians(
    contestants: Mapping[str, Callable[[], object]], seconds: float = 2.0, least: int = 5
) -> dict[str, float]:
    """Median seconds of each contestant; all run in turn, for about `seconds` each.

    A contestant that is slow against the others gets fewer turns, but at least one warm one.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    while True:
        waiting = [
            name
            for name, own in times.items()
            if not own or (sum(own) < seconds and len(own) < 200) or len(own) < least
            if not own or sum(own) < 3 * seconds
        ]
        if not waiting:
            return {name: statistics.median(own) for name, own in times.items()}
        for name in waiting:
            start = time.perf_counter()
            contestants[name]()
            times[name].append(time.perf_counter() - start)


def hardware() -> str:
    """The machine in a line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    flags = info.read_text() if info.exists() else ""
    simd = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return f"{cpu} ({simd}), torch {torch.__version__}, Python {platform.python_version()}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in [header, ["-" * w for w in widths], *rows]
    ]
    return "\n".join(lines)
