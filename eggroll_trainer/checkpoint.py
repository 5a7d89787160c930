"""Checkpoints: all that a run needs to go on, checked before use, written atomically."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .metrics import Best

if TYPE_CHECKING:
    from .base import ESTrainer
    from .callbacks import Callback

FORMAT = "eggroll-trainer checkpoint"
VERSION = 1


def capture(trainer: ESTrainer) -> dict[str, Any]:
    """The trainer's state: tensors and plain values only, a copy."""
    scheduler, best = trainer.lr_scheduler, trainer._best
    state = {
        "format": FORMAT,
        "version": VERSION,
        "trainer": type(trainer).__name__,
        "population_size": trainer.population_size,
        "seed": trainer.seed,
        "generation": trainer.generation,
        "model": dict(trainer.model.state_dict()),
        "masters": {name: master.detach() for name, master in trainer.centre.masters.items()},
        "optimizer": trainer.optimizer.state_dict(),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "history": trainer.history,
        "best": None if best is None else vars(best),
        "data": None if trainer._source is None else trainer._source.state_dict(),
        "evaluator": trainer.evaluator.state_dict(),
        "callbacks": {name: c.state_dict() for name, c in _callbacks(trainer).items()},
    }
    return copy.deepcopy(state)


def restore(trainer: ESTrainer, state: Mapping[str, Any]) -> None:
    """Put a captured state into a trainer, or raise and leave the trainer as it was."""
    _check(trainer, state)
    before = capture(trainer)
    try:
        _apply(trainer, state)
    except Exception as error:
        _apply(trainer, before)
        raise CheckpointError(f"the checkpoint does not fit this trainer: {error}") from error


def _check(trainer: ESTrainer, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError("this is no checkpoint of eggroll-trainer: expected one by save()")
    if state["version"] != VERSION:
        raise CheckpointError(
            f"the checkpoint has version {state['version']}, this library reads {VERSION}: load it "
            "with the version of eggroll-trainer that wrote it"
        )
    for name, own in (
        ("trainer", type(trainer).__name__),
        ("population_size", trainer.population_size),
    ):
        if state[name] != own:
            raise CheckpointError(
                f"the checkpoint was written with {name}={state[name]!r}, not {own!r}; "
                "make the trainer with the arguments of the run"
            )
    saved, model = state["model"], trainer.model.state_dict()
    wrong = sorted(saved.keys() ^ model.keys())
    wrong += [
        f"{name} {tuple(saved[name].shape)} instead of {tuple(value.shape)}"
        for name, value in model.items()
        if name in saved and isinstance(value, Tensor) and saved[name].shape != value.shape
    ]
    if wrong:
        raise CheckpointError(f"the checkpoint is of another model; it differs in {wrong[:4]}")
    for argument, key, own_state in (
        ("lr_scheduler=", "lr_scheduler", trainer.lr_scheduler),
        ("data=", "data", trainer._source),
    ):
        if (state[key] is None) != (own_state is None):
            saved_with, made_with = (
                ("without", "with") if state[key] is None else ("with", "without")
            )
            raise CheckpointError(
                f"the checkpoint was written {saved_with} {argument}, but this trainer was made "
                f"{made_with}; make the trainer with the arguments of the run"
            )


def _callbacks(trainer: ESTrainer) -> dict[str, Callback]:
    """Callbacks by type and place among those of the type."""
    found: dict[str, Callback] = {}
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        found[f"{kind} {sum(name.startswith(f'{kind} ') for name in found)}"] = callback
    return found


def _apply(trainer: ESTrainer, state: Mapping[str, Any]) -> None:
    state = copy.deepcopy(dict(state))
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.load_state_dict(state["lr_scheduler"])
    trainer.model.load_state_dict(state["model"])
    with torch.no_grad():
        for name, master in trainer.centre.masters.items():
            master.copy_(state["masters"][name])
    trainer.evaluator.load_state_dict(state["evaluator"])
    for name, callback in _callbacks(trainer).items():  # callbacks may come and go
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])
    trainer.resume(
        state["seed"],
        state["generation"],
        state["history"],
        None if state["best"] is None else Best(**state["best"]),
        state["data"],
    )


def write(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state beside its place, then move it there, so that it is never half there."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        # A full disk makes torch's writer complain of positions; the reason is behind it.
        reason = error.__context__
        if isinstance(error, RuntimeError) and isinstance(reason, OSError):
            raise OSError(reason.errno, reason.strerror, str(target)) from None
        raise


def read(path: str | os.PathLike[str], device: torch.device) -> Mapping[str, Any]:
    """Read a state from a file of `write`; tensors only, nothing in it is executed."""
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}")
    try:
        state: Mapping[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read as a checkpoint; it is truncated, or something else: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    return state
