"""Every task of the RL examples, several seeds: the table and curves of `examples/rl/README.md`.

Hours of compute. It may be stopped and started again: a run that is there is not repeated, unless
the settings of its task have changed since.

    pip install "eggroll-trainer[rl,examples,box2d]"        # Box2D for LunarLander
    python benchmarks/rl_runs.py
    python benchmarks/rl_runs.py --tasks Hopper Walker2d --seeds 0 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from timing import hardware, table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "rl"))
import train_gymnasium  # noqa: E402
import train_mujoco  # noqa: E402

SETTINGS = {**train_mujoco.SETTINGS, **train_gymnasium.SETTINGS}
SCENES = "examples/animals_3d/scenes.py"


@dataclass(frozen=True)
class Goal:
    """What is asked of a task, in its own reward, and what it is given for that.

    Args:
        asked: Mean return of 20 unseen episodes; None where nothing was.
        minutes: Of training on two cores.
        seeds: How many runs.
        program: Which of the examples trains it.
        name: As that program calls the task.
    """

    asked: float | None
    minutes: float = 15
    seeds: int = 3
    program: str = "train_mujoco.py --task"
    name: str | None = None


def ours(name: str, minutes: float) -> Goal:
    return Goal(None, minutes, seeds=1, name=f"{SCENES}:{name}")


def gymnasium(name: str, asked: float | None, minutes: float) -> Goal:
    return Goal(asked, minutes, program="train_gymnasium.py --env", name=name)


GOALS = {
    "HalfCheetah": Goal(4500),
    "Swimmer": Goal(340, minutes=5),
    "Hopper": Goal(2500, minutes=5),
    "Walker2d": Goal(2000, minutes=5),
    "Ant": Goal(1500, seeds=1),
    "Humanoid": Goal(800, seeds=1),
    "Reacher": Goal(-6, minutes=5),
    "InvertedPendulum": Goal(1000, minutes=2),
    "InvertedDoublePendulum": Goal(9000, minutes=5),
    "CartPole": gymnasium("CartPole-v1", 500, minutes=2),
    "Pendulum": gymnasium("Pendulum-v1", -200, minutes=2),
    "LunarLander": gymnasium("LunarLander-v3", None, minutes=5),
    "Dog": ours("Dog", minutes=5),
    "Hexapod": ours("Hexapod", minutes=5),
    "Fish": ours("Fish", minutes=5),
}


def train(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run's numbers, made now unless they are there; the first seed's with pictures."""
    out, goal = folder / task / f"seed_{seed}", GOALS[task]
    file, name = out / "results.json", goal.name or task
    settings = str(SETTINGS[name.rpartition(":")[2]])
    if not file.exists() or _read(file)["settings"] != settings:
        program, option = goal.program.split()
        command = [sys.executable, f"examples/rl/{program}", option, name]
        command += ["--minutes", str(goal.minutes), "--seed", str(seed), "--out", str(out)]
        if seed > 0 and program == "train_mujoco.py":
            command.append("--no-pictures")
        subprocess.run(command, check=True, cwd=ROOT)
    return _read(file)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def known(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs that are there, of each task."""
    found = {}
    for task in GOALS:
        files = sorted(folder.glob(f"{task}/seed_*/results.json"))
        if files:
            found[task] = [_read(file) for file in files]
    return found


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the seeds that are there."""
    rows = []
    for task, runs in found.items():
        goal, returns = GOALS[task], [run["return"] for run in runs]
        steps = statistics.median(run["steps"] for run in runs)
        minutes = statistics.median(run["curve"][-1]["seconds"] / 60 for run in runs)
        rows.append(
            [
                task,
                "" if goal.asked is None else f"{goal.asked:,}",
                f"**{_short(statistics.median(returns))}**",
                ", ".join(_short(r) for r in returns),
                f"{minutes:.0f}",
                f"{steps / 1e6:.1f} M",
            ]
        )
    header = ["task", "asked", "median", "each seed", "minutes", "control steps"]
    return table(header, rows)


def _short(score: float) -> str:
    return f"{score:,.0f}" if abs(score) >= 100 else f"{score:.1f}"


def draw(found: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """The curves of every task, and what was asked."""
    columns = 5
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(3 * columns, 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[len(found) :]:
        ax.set_axis_off()
    for ax, (task, runs) in zip(axes, found.items(), strict=False):
        for run in runs:
            minutes = [point["seconds"] / 60 for point in run["curve"]]
            ax.plot(minutes, [point["return"] for point in run["curve"]], color="#d1495b", lw=1.2)
        asked = GOALS[task].asked
        if asked is not None:
            ax.axhline(asked, color="#555555", lw=0.8, ls="--")
        ax.set_title(task, fontsize=10)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("minutes")
    figure.supylabel("return of the centre")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=tuple(GOALS), default=list(GOALS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "rl")
    args = parser.parse_args()
    folder = args.out.resolve()
    for seed in args.seeds:
        for task in args.tasks:
            if seed < GOALS[task].seeds:
                run = train(task, seed, folder)
                print(f"{task}, seed {seed}: {run['return']:,.0f}", flush=True)
    found = known(folder)
    text = f"On {hardware()}.\n\n{report(found)}\n"
    print(text)
    (folder / "table.md").write_text(text, encoding="utf-8")
    draw(found, folder / "curves.png")


if __name__ == "__main__":
    main()
