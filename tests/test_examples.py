"""The examples' own claims, on a small budget."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "rl"))
import basic_example
import comparison_framework
import custom_algorithm
import mnist_comparison
import nondifferentiable
import run_all_comparisons
import train_gymnasium
import train_mujoco
import training
import utils

from eggroll_trainer import EGGROLLTrainer, top_directions
from eggroll_trainer.integrations.mujoco import MujocoReturn
from eggroll_trainer.policies import Policy

SCENES = Path(__file__).parent.parent / "examples" / "animals_3d" / "scenes.py"


def test_snes_behaves_as_published() -> None:
    """A constant rate on the sphere, hardly another one on the ellipsoid, none when rotated."""
    matrices = custom_algorithm.landscapes(seed=0)
    losses = {
        name: custom_algorithm.run("SNES", matrix, 600, 60.0, seed=0)
        for name, matrix in matrices.items()
    }
    assert losses["sphere"][-1] < custom_algorithm.TARGET
    assert losses["ellipsoid"][-1] < custom_algorithm.TARGET
    assert len(losses["ellipsoid"]) < 3 * len(losses["sphere"])
    assert losses["rotated ellipsoid"][-1] > 1.0


def test_snes_resumes_with_its_step_sizes(tmp_path: Path) -> None:
    def make() -> Any:
        point = custom_algorithm.Point()
        score = lambda m: -m().square().sum()  # noqa: E731
        return custom_algorithm.SNES(
            point.parameters(), point, score, 12, learning_rate=1.0, sigma=1.0, seed=0
        )

    whole, first, second = make(), make(), make()
    whole.train(20, verbose=False)
    first.train(10, verbose=False)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.train(10, verbose=False)
    assert torch.equal(whole.current_params, second.current_params)


@pytest.mark.slow
def test_the_first_example_as_a_program(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    program = ["basic_example.py", "--seconds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", program)
    basic_example.main()
    shown = capsys.readouterr().out
    assert "untrained" in shown
    assert "dense ES, equal generations" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"digits.png", "results.json"}


PROGRAMS = {
    "mnist_comparison": (mnist_comparison, "--seconds 1 --hidden 8", "curves.png networks.png"),
    "comparison_framework": (
        comparison_framework, "--forward-passes 1e6 --seeds 2", "comparison.png",
    ),
    "nondifferentiable": (nondifferentiable, "--seconds 0.6", "nondifferentiable.png"),
    "run_all_comparisons": (run_all_comparisons, "--seconds 0.6", "comparisons.png"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_others_as_programs(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    program, options, figures = PROGRAMS[name]
    # The small set, whether there is a network or not.
    monkeypatch.setattr(utils, "_from_openml", lambda name: (_ for _ in ()).throw(OSError))
    monkeypatch.setattr(sys, "argv", [name, *options.split(), "--out", str(tmp_path)])
    program.main()
    assert "EGGROLL" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", *figures.split()}
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert all(0.0 <= run["curve"][-1]["accuracy"] <= 1.0 for run in runs)
    best = max(run["curve"][-1]["accuracy"] for run in runs)
    assert best > 0.5, "gradients, at least, learn something in this time"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # gymnasium's models
@pytest.mark.parametrize(
    ("program", "options", "files"),
    [
        (train_gymnasium, "--env Pendulum-v1", ""),
        (train_mujoco, "--task Swimmer --population 8", "film.webp strip.png"),
        (train_mujoco, f"--task {SCENES}:Fish --population 8", "film.webp strip.png"),
    ],
)
def test_policies_as_programs(
    program: Any, options: str, files: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "run"
    given = f"program --minutes 0.02 --out {out} {options}"
    monkeypatch.setattr(sys, "argv", given.split())
    program.main()
    assert "unseen episodes" in capsys.readouterr().out
    expected = {"policy.pt", "results.json", "curve.png", *files.split()}
    assert {p.name for p in out.iterdir()} == expected
    assert json.loads((out / "results.json").read_text())["steps"] > 0
    Policy.load(out / "policy.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # gymnasium's models
def test_pictures_of_a_saved_policy(tmp_path: Path, monkeypatch: Any) -> None:
    task = train_mujoco.load_task("Reacher")
    Policy(task.observation_size, task.action_size, ()).save(tmp_path / "policy.pt")
    given = f"program --task Reacher --policy {tmp_path / 'policy.pt'} --out {tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", given.split())
    train_mujoco.main()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"film.webp", "strip.png"}


@pytest.mark.slow
def test_without_a_way_to_draw_all_but_the_pictures_is_there(tmp_path: Path) -> None:
    options = f"--task Swimmer --population 8 --minutes 0.02 --out {tmp_path}"
    without = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    done = subprocess.run(
        [sys.executable, train_mujoco.__file__, *options.split()],
        env={**without, "MUJOCO_GL": "glfw"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no pictures: MuJoCo cannot draw here" in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"policy.pt", "results.json", "curve.png"}


@pytest.mark.parametrize("name", train_mujoco.SETTINGS)
def test_settings_change_what_a_task_has(name: str) -> None:
    settings = train_mujoco.SETTINGS[name]
    shipped = name in train_mujoco.TASKS
    task = train_mujoco.load_task(name if shipped else f"{SCENES}:{name}", **settings.arguments)
    train_mujoco.change(task, settings.shaped)
    for path, value in settings.shaped.items():
        assert operator.attrgetter(path)(task) == value


def test_a_setting_that_a_task_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="helthy"):
        train_mujoco.change(train_mujoco.load_task("Hopper"), {"helthy_reward": 0.0})


def test_settings_are_written_down_without_addresses_and_told_apart() -> None:
    half, quarter = (
        str(training.Settings(shaping=top_directions(share), episodes=2)) for share in (0.5, 0.25)
    )
    assert half == "shaping=top_directions(0.5), episodes=2"
    assert quarter == "shaping=top_directions(0.25), episodes=2"


@pytest.mark.slow
def test_a_scene_that_is_shipped_is_learnt() -> None:
    """Six legs, from standing to walking."""
    fitness = MujocoReturn(train_mujoco.load_task(f"{SCENES}:Hexapod"), max_steps=100)
    low, high = fitness.task.action_range
    policy = Policy(
        fitness.task.observation_size,
        fitness.task.action_size,
        (),
        low=low,
        high=high,
        squash=False,
    )
    untrained = fitness.evaluate(policy, 8, max_steps=100).returns.mean()
    trainer = EGGROLLTrainer(
        policy.parameters(), policy, fitness, 64, learning_rate=0.3, sigma=0.1, seed=0
    )
    trainer.train(15, verbose=False)
    assert untrained < 2
    assert fitness.evaluate(policy, 8, max_steps=100).returns.mean() > 15
    fitness.close()
