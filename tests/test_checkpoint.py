"""Checkpoints: bit for bit in a new process, atomic, checked before anything is changed."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eggroll_trainer import CheckpointError, EGGROLLTrainer, ESTrainer, VanillaESTrainer

TRAINERS = {"EGGROLLTrainer": EGGROLLTrainer, "VanillaESTrainer": VanillaESTrainer}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.AdamW, weight_decay=0.01),
}


def make(trainer: str = "EGGROLLTrainer", optimizer: str = "adam", **options: Any) -> Any:
    """A run with everything that has a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.1), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    options = {
        "population_size": 16,
        "learning_rate": 0.02,
        "sigma": lambda generation: 0.1 * 0.98**generation,
        "seed": 7,
        "data": batches,
        "optimizer": OPTIMIZERS[optimizer],
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        **options,
    }
    return TRAINERS[trainer](
        model.parameters(), model, lambda m, b: -F.cross_entropy(m(b[0]), b[1]), **options
    )


def outcome(trainer: Any) -> dict[str, Any]:
    best = trainer.get_best_model().state_dict()
    return {
        **{f"centre {k}": v.clone() for k, v in trainer.model.state_dict().items()},
        **{f"best {k}": v for k, v in best.items()},
        "history": torch.tensor(trainer.fitness_history, dtype=torch.float64),
        "rest": torch.tensor([trainer.best_fitness, trainer.generation, trainer.sigma]),
        "rate": torch.tensor(trainer.learning_rate),
    }


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    different = [k for k in one if not torch.equal(one[k], two[k])]
    assert not different, different


def in_new_process(code: str, folder: Path) -> None:
    """Run a snippet beside this file, warnings as errors."""
    setup = f"import sys, torch; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
    setup += "from test_checkpoint import *\n"
    command = [sys.executable, "-W", "error", "-c", setup + code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit_in_a_new_process(
    trainer: str, optimizer: str, tmp_path: Path
) -> None:
    made = make(trainer, optimizer)
    made.train(5, verbose=False)
    made.save(tmp_path / "run.pt")
    torch.load(tmp_path / "run.pt")  # with the defaults: tensors and plain values only
    made.train(6, verbose=False)
    in_new_process(
        f"made = make({trainer!r}, {optimizer!r}, seed=None); made.load('run.pt')\n"
        "made.train(6, verbose=False); torch.save(outcome(made), 'outcome.pt')",
        tmp_path,
    )
    assert_same(outcome(made), torch.load(tmp_path / "outcome.pt"))


def test_a_run_in_bfloat16_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """What the model has rounded away is in the checkpoint."""

    def run() -> EGGROLLTrainer:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 4).bfloat16(), torch.randn(5, 8, dtype=torch.bfloat16)
        return EGGROLLTrainer(
            model.parameters(),
            model,
            lambda m: -(m(x) - 1).square().mean(),
            population_size=16,
            learning_rate=1e-3,
            optimizer=torch.optim.Adam,
            seed=0,
        )

    whole, first, second = run(), run(), run()
    whole.train(40, verbose=False)
    first.train(20, verbose=False)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.train(20, verbose=False)
    assert_same(outcome(whole), outcome(second))


def test_a_run_goes_on_after_a_fallback(tmp_path: Path) -> None:
    """It does not try, and warn, again; and chooses the same chunk."""
    made = make()
    made.train(2, verbose=False)
    other = make()
    other.load_state_dict(made.state_dict())
    assert other.evaluator.chunk_size == made.evaluator.chunk_size is not None
    slow = make()
    slow.fitness_fn = lambda m, b: float(m(b[0]).sum())
    with pytest.warns(UserWarning, match="one after another"):
        slow.step()
    slow.save(tmp_path / "run.pt")
    again = make()
    again.fitness_fn = slow.fitness_fn
    again.load(tmp_path / "run.pt")
    again.step()
    assert again.evaluator.name == "sequential"


def test_a_custom_algorithm_too(tmp_path: Path) -> None:
    class Custom(ESTrainer):
        def sample_perturbations(self, population_size: int) -> Tensor:
            return torch.randn(population_size, len(self.current_params))

        def compute_update(self, perturbations: Tensor, fitnesses: Tensor) -> Tensor:
            return (fitnesses[:, None] * perturbations).mean(0)

    def run() -> Custom:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return Custom(
            model.parameters(),
            model,
            lambda m: m(torch.ones(1, 3)).sum(),
            population_size=6,
            seed=3,
        )

    whole, first, second = run(), run(), run()
    whole.train(6, verbose=False)
    first.train(2, verbose=False)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.train(4, verbose=False)
    assert_same(outcome(whole), outcome(second))


def test_state_dict_is_a_copy_and_shares_nothing() -> None:
    made = make()
    made.train(2, verbose=False)
    state = made.state_dict()
    kept = outcome(made)
    made.train(2, verbose=False)
    other = make()
    other.load_state_dict(state)
    assert_same(outcome(other), kept)
    other.train(2, verbose=False)
    third = make()
    third.load_state_dict(state)
    assert_same(outcome(third), kept)


def test_saving_between_ask_and_tell(tmp_path: Path) -> None:
    made, twin = make(), make()
    made.ask()
    made.save(tmp_path / "run.pt")
    other = make(seed=1)
    other.load(tmp_path / "run.pt")
    twin.train(3, verbose=False)
    other.train(3, verbose=False)
    assert_same(outcome(twin), outcome(other))


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A quota on the size of files plays the disk; the system's own reason is shown."""
    code = (
        "import resource\n"
        "from eggroll_trainer import Checkpoint\n"
        "made = make(callbacks=[Checkpoint('run', every=2)]); made.train(2, verbose=False)\n"
        "[saved] = Path('run').iterdir(); before = saved.read_bytes()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, -1))\n"
        "try: made.train(2, verbose=False)\n"
        "except OSError as error: message = str(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
        "assert 'File too large' in message, message\n"
        "assert made.generation == 4 and saved.read_bytes() == before\n"
        "assert list(Path('run').iterdir()) == [saved]\n"
        "made.train(2, verbose=False); whole = make(); whole.train(6, verbose=False)\n"
        "again = make(); again.load('run/generation-00000006.pt')\n"
        "assert_same(outcome(again), outcome(whole))\n"
    )
    in_new_process(code, tmp_path)


# --- killed while saving --------------------------------------------------------------------------


@pytest.mark.slow
def test_kill_9_during_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Saves as fast as it can, until it is killed: whatever lies there, loads."""
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_checkpoint import make\n"
        "made = make(); made.train(2, verbose=False)\n"
        "made.save('run.pt'); print('saving', flush=True)\n"
        "while True: made.step(); made.save('run.pt')\n"
    )
    for wait in (0.02, 0.11, 0.23):
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "saving\n"
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
            process.wait()
        made = make()
        made.load(tmp_path / "run.pt")
        assert made.generation >= 2
        made.step()


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    made = make()
    made.step()
    made.save(tmp_path / "run.pt")
    before = (tmp_path / "run.pt").read_bytes()
    made.step()

    def full(state: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        made.save(tmp_path / "run.pt")
    assert (tmp_path / "run.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"], "and no litter"


# --- checkpoints that do not fit ------------------------------------------------------------------


def other_model(width: int) -> Any:
    model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))
    return EGGROLLTrainer(model.parameters(), model, lambda m: 0.0, population_size=16)


def write(path: Path, what: str) -> None:
    made = make()
    made.train(1, verbose=False)
    state = made.state_dict()
    if what == "truncated":
        made.save(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "text":
        path.write_text("hello")
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "foreign":
        torch.save({"model": made.model.state_dict()}, path)
    elif what == "list":
        torch.save([1, 2], path)
    elif what == "code":
        torch.save({"format": Path("x")}, path)
    elif what == "older":
        torch.save({**state, "version": 0}, path)
    elif what == "incomplete":
        torch.save({k: v for k, v in state.items() if k != "optimizer"}, path)
    elif what == "other population":
        make(population_size=8).save(path)
    elif what == "other trainer":
        make("VanillaESTrainer").save(path)
    elif what == "other optimizer":
        torch.save({**state, "optimizer": {"state": {}, "param_groups": []}}, path)
    elif what == "no scheduler":
        make(lr_scheduler=None).save(path)
    elif what == "other width":
        other_model(13).save(path)
    elif what == "another model":
        model = nn.Linear(2, 2)
        EGGROLLTrainer(model.parameters(), model, lambda m: 0.0, population_size=16).save(path)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", "cannot be read"),
        ("text", "cannot be read"),
        ("empty", "cannot be read"),
        ("code", "cannot be read"),
        ("foreign", "no checkpoint of eggroll-trainer"),
        ("list", "no checkpoint of eggroll-trainer"),
        ("older", "version 0, this library reads 1"),
        ("incomplete", "optimizer"),
        ("other population", "population_size=8, not 16"),
        ("other trainer", "trainer='VanillaESTrainer', not 'EGGROLLTrainer'"),
        ("other optimizer", "does not fit this trainer"),
        ("no scheduler", "written without lr_scheduler=, but this trainer was made with"),
        ("other width", r"another model; .*0\.weight \(13, 8\) instead of \(12, 8\)"),
        ("another model", r"another model; it differs in \['0\.bias'"),
    ],
)
def test_what_does_not_fit_changes_nothing(what: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "bad.pt", what)
    made, twin = make(), make()
    made.train(2, verbose=False)
    twin.train(4, verbose=False)
    kept = outcome(made)
    with pytest.raises(CheckpointError, match=message):
        made.load(tmp_path / "bad.pt")
    assert_same(outcome(made), kept)
    made.train(2, verbose=False)
    assert_same(outcome(made), outcome(twin))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '.*none\.pt'"):
        make().load(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError):
        make().save(tmp_path / "no folder" / "run.pt")
