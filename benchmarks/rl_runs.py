"""Every MuJoCo task, several seeds, so many minutes each: the table of `examples/rl/README.md`.

Hours of compute. It may be stopped and started again: runs whose numbers are there stay.

    python benchmarks/rl_runs.py --minutes 15 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from timing import hardware, table

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "examples" / "rl" / "train_mujoco.py"
# What is asked of 15 minutes on two cores, in gymnasium's own reward.
ASKED = {
    "HalfCheetah": 4500,
    "Swimmer": 340,
    "Hopper": 2500,
    "Walker2d": 2000,
    "Ant": 1500,
    "Humanoid": 800,
    "Reacher": -6,
    "InvertedPendulum": 1000,
    "InvertedDoublePendulum": 9000,
}
BRIEF = {"InvertedPendulum": 2.0, "InvertedDoublePendulum": 5.0}  # minutes that are enough


def train(task: str, seed: int, minutes: float, folder: Path) -> dict[str, float]:
    """One run's numbers, made now unless they are there."""
    out = folder / task / f"seed_{seed}"
    if not (out / "results.json").exists():
        limit = min(minutes, BRIEF.get(task, minutes))
        options = ["--task", task, "--minutes", str(limit), "--seed", str(seed), "--out", str(out)]
        subprocess.run([sys.executable, str(PROGRAM), *options], check=True)
    found: dict[str, float] = json.loads((out / "results.json").read_text())
    return found


def report(folder: Path, tasks: list[str], seeds: int) -> str:
    """Medians over the seeds that are there."""
    rows = []
    for task in tasks:
        files = [folder / task / f"seed_{seed}" / "results.json" for seed in range(seeds)]
        runs = [json.loads(file.read_text()) for file in files if file.exists()]
        if not runs:
            continue
        returns = sorted(run["return"] for run in runs)
        minutes = runs[0]["curve"][-1]["seconds"] / 60
        steps = statistics.median(run["steps"] for run in runs)
        rows.append(
            [
                task,
                f"{ASKED[task]:,}",
                f"{statistics.median(returns):,.0f}",
                ", ".join(f"{r:,.0f}" for r in returns),
                f"{minutes:.0f}",
                f"{steps / 1e6:.1f} M",
            ]
        )
    return table(["task", "asked", "median", "each seed", "minutes", "control steps"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=tuple(ASKED), default=list(ASKED))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "rl")
    args = parser.parse_args()
    for seed in range(args.seeds):
        for task in args.tasks:
            found = train(task, seed, args.minutes, args.out)
            print(f"{task}, seed {seed}: {found['return']:,.0f}", flush=True)
    text = f"On {hardware()}.\n\n{report(args.out, args.tasks, args.seeds)}\n"
    print(text)
    (args.out / "table.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
