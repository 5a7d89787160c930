"""`make bench`: every table of the README, measured here and now, printed and kept."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import generation
import memory
import modules
from timing import hardware


def main() -> None:
    """Measure, print, and write `benchmarks/results.md`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contestant")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.md")
    arguments = parser.parse_args()
    threads = tuple(range(1, min(2, os.cpu_count() or 1) + 1))
    parts = [
        f"# Benchmark\n\nBy `make bench`, on {hardware()}; {os.cpu_count()} cores. Contestants "
        "take turns in one process; ratios of medians.",
        *(make() for make in (
            lambda: generation.report(threads, arguments.seconds),
            lambda: modules.over_inference(threads, arguments.seconds),
            lambda: modules.precisions(threads, arguments.seconds),
            memory.report,
            lambda: modules.auto_over_sequential(threads, arguments.seconds / 5),
        )),
    ]  # fmt: skip
    print(*parts, sep="\n\n")
    arguments.output.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
