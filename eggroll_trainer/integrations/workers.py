"""Environments in a process of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from ..errors import FitnessError
from .episodes import Array, Worlds


class WorkerWorlds(Worlds):
    """Environments in a process of their own, which starts once.

    Args:
        make_env: Makes an environment; sent by cloudpickle, so it may be a lambda.
        count: How many.
        convert: The policies' outputs → actions, one a row.
    """

    def __init__(
        self, make_env: Callable[[], Any], count: int, convert: Callable[[Array], Any]
    ) -> None:
        self.capacity = count
        self.convert = convert
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(
            target=_work, args=(there, cloudpickle.dumps(make_env), count), daemon=True
        )
        self.process.start()
        there.close()

    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each of the first worlds."""
        observations: Array = self._ask("reset", list(seeds))
        return observations

    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step some of the worlds."""
        observations, rewards, terminated, truncated = self._ask(
            "step", worlds, np.asarray(self.convert(actions))
        )
        return observations, rewards, terminated, truncated

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the `EnvWorlds` there."""
        with contextlib.suppress(OSError):  # a dead process: receiving says so
            self.pipe.send((name, arguments))
        try:
            good, result = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(timeout=5)
            raise FitnessError(
                f"the environment process {self.process.name} died, with the exit code "
                f"{self.process.exitcode}. If it never started: a program that uses "
                'workers needs the guard `if __name__ == "__main__":`'
            ) from None
        if not good:
            raise FitnessError(f"in {self.process.name}: {result}")
        return result

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self.pipe.send(("close", ()))
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _work(pipe: Connection, made: bytes, count: int) -> None:
    """What a process does: answer calls of its worlds' methods, the last of which is `close`."""
    from .gymnasium import EnvWorlds

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    try:
        make_env = cloudpickle.loads(made)
        worlds = EnvWorlds([make_env() for _ in range(count)], convert=lambda actions: actions)
        while True:
            name, arguments = pipe.recv()
            pipe.send((True, getattr(worlds, name)(*arguments)))
            if name == "close":
                return
    except EOFError:
        return
    except BaseException as error:
        text = str(error) if isinstance(error, FitnessError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send((False, text))


def _end_with_trainer() -> None:
    """A killed trainer leaves a pipe that other workers hold open: its process says it is gone."""
    if (trainer := multiprocessing.parent_process()) is not None:
        trainer.join()
        os._exit(1)
