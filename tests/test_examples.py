"""The examples' own claims, on a small budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import basic_example
import custom_algorithm


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
