"""Settings of the RL examples, one change at a time, on seeds that no report uses.

    python benchmarks/rl_search.py --task Hopper --minutes 4
    python benchmarks/rl_search.py --task Pendulum-v1 --minutes 2

A line for each change is added to `--out`; one that is there is not tried again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "rl"))
import train_gymnasium  # noqa: E402
import train_mujoco  # noqa: E402
from rl_runs import SCENES, SETTINGS  # noqa: E402
from timing import table  # noqa: E402
from training import Clock, Settings  # noqa: E402

from eggroll_trainer import top_directions  # noqa: E402
from eggroll_trainer.integrations.mujoco_tasks import TASKS as SHIPPED  # noqa: E402

SEED = 100
BONUS = "healthy_reward"
NO_ENDING = {BONUS: 0.0, "terminate": False, "control_cost": 0.1}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "linear": {"hidden": ()},
    "32·32": {"hidden": (32, 32)},
    "64·64": {"hidden": (64, 64)},
    "32 members": {"population_size": 32},
    "64 members": {"population_size": 64},
    "128 members": {"population_size": 128},
    "256 members": {"population_size": 256},
    "σ 0.02": {"sigma": 0.02},
    "σ 0.03": {"sigma": 0.03},
    "σ 0.05": {"sigma": 0.05},
    "σ 0.1": {"sigma": 0.1},
    "σ 0.2": {"sigma": 0.2},
    "σ 0.3": {"sigma": 0.3},
    "rate 0.15": {"learning_rate": 0.15},
    "rate 0.6": {"learning_rate": 0.6},
    "rate 1": {"learning_rate": 1.0},
    "rate 2": {"learning_rate": 2.0},
    "ranks": {"shaping": "centered_rank"},
    "z-scores": {"shaping": "standardize"},
    "top half": {"shaping": top_directions(0.5)},
    "top quarter": {"shaping": top_directions(0.25)},
    "no bonus": {"shaped": {BONUS: 0.0}},
    "bonus 0.1": {"shaped": {BONUS: 0.1}},
    "bonus 0.3": {"shaped": {BONUS: 0.3}},
    "bonus 1": {"shaped": {BONUS: 1.0}},
    "cheap motors": {"shaped": {"control_cost": 0.1}},
    "no ending": {"shaped": NO_ENDING},
    "no ending, ranks": {"shaped": NO_ENDING, "shaping": "centered_rank"},
    "no ending, 32·32": {"shaped": NO_ENDING, "hidden": (32, 32)},
    "rate 1, 32 members": {"learning_rate": 1.0, "population_size": 32},
    "rate 2, 32·32": {"learning_rate": 2.0, "hidden": (32, 32)},
    "rate 2, 4 episodes": {"learning_rate": 2.0, "episodes": 4},
    "σ 0.02, no bonus": {"sigma": 0.02, "shaped": {BONUS: 0.0}},
    "64·64, z-scores": {"hidden": (64, 64), "shaping": "standardize"},
    "σ 0.1, rate 1": {"sigma": 0.1, "learning_rate": 1.0},
    "no ending, with its bonus": {"shaped": {"terminate": False}, "steps": (100, 300)},
    "no bonus, rate 1": {"shaped": {BONUS: 0.0}, "learning_rate": 1.0},
    "bonus 1, rate 1": {"shaped": {BONUS: 1.0}, "learning_rate": 1.0},
    "100 steps, growing": {"steps": (100, 1000)},
    "200 steps, growing": {"steps": (200, 1000)},
    "400 steps, growing": {"steps": (400, 1000)},
    "1 episode": {"episodes": 1},
    "2 episodes": {"episodes": 2},
    "8 episodes": {"episodes": 8},
    "own episodes": {"common_seeds": False},
    "own episodes, 1": {"common_seeds": False, "episodes": 1},
    "own episodes, σ 0.03, z-scores": {
        "common_seeds": False,
        "episodes": 1,
        "sigma": 0.03,
        "shaping": "standardize",
    },
}


def run(task: str, settings: Settings, seconds: float) -> tuple[Clock, np.ndarray]:
    """Train a policy as the example does; returns the clock and 20 returns of the policy."""
    if task in train_mujoco.SETTINGS:
        name = task if task in SHIPPED else f"{SCENES}:{task}"
        _, _, clock, returns = train_mujoco.run(name, settings, seconds, SEED)
    else:
        _, clock, returns = train_gymnasium.run(task, settings, seconds, SEED, workers=0)
    return clock, returns


def report(file: Path) -> str:
    """Every try that is there."""
    rows = []
    for line in file.read_text().splitlines():
        run = json.loads(line)
        settings, steps = run["settings"] or "Settings()", f"{run['steps'] / 1e6:.1f} M"
        key = [run["task"], str(run["seed"]), f"{run['minutes']:g}"]
        rows.append([*key, f"`{settings}`", f"{run['return']:,.0f}", steps])
    return table(["task", "seed", "minutes", "settings", "return", "control steps"], sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, choices=tuple(SETTINGS))
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--changes", nargs="+", choices=tuple(CHANGES), default=list(CHANGES))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "images" / "rl" / "search.jsonl"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    tried = [json.loads(line) for line in lines]
    known = {(run["task"], run["minutes"], run["settings"]) for run in tried if run["seed"] == SEED}
    usual = SETTINGS[args.task]
    for change in args.changes:
        shaped = {**usual.shaped, **CHANGES[change].get("shaped", {})}
        settings = replace(usual, **{**CHANGES[change], "shaped": shaped})
        if (args.task, args.minutes, str(settings)) in known:
            continue
        clock, returns = run(args.task, settings, 60 * args.minutes)
        found = {
            "task": args.task,
            "minutes": args.minutes,
            "seed": SEED,
            "settings": str(settings),
            "return": round(float(returns.mean()), 1),
            "curve": [round(point["return"], 1) for point in clock.curve],
            "steps": clock.steps,
        }
        known.add((args.task, args.minutes, str(settings)))
        print(f"{args.task}, {change}: {found['return']:,} after {clock.steps / 1e6:.1f} M steps")
        with args.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
    print(report(args.out))


if __name__ == "__main__":
    main()
