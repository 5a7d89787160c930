"""Environments in processes of their own: a few processes, many environments each."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from ..errors import FitnessError
from .episodes import Array, Worlds


class WorkerWorlds(Worlds):
    """Worlds shared out among processes, which start once; world `i` is in process `i % workers`.

    Args:
        make_env: Makes an environment; sent by cloudpickle, so it may be a lambda.
        num_envs: How many in all.
        workers: Processes.
        convert: The policies' outputs → actions, one a row.
    """

    parallel = True

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_envs: int,
        workers: int,
        convert: Callable[[Array], Any],
    ) -> None:
        self.capacity = num_envs
        self.convert = convert
        self.count = min(workers, num_envs)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        made = cloudpickle.dumps(make_env)
        try:
            for worker in range(self.count):
                envs = len(range(worker, num_envs, self.count))
                here, there = multiprocessing.Pipe()
                process = multiprocessing.Process(
                    target=_work, args=(there, made, envs), daemon=True
                )
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
            for worker in range(self.count):
                self._receive(worker)
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each of the first worlds."""
        results = self._ask(
            "reset", [(list(seeds[worker :: self.count]),) for worker in range(self.count)]
        )
        return self._merge(np.arange(len(seeds)), results)[0]

    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step some of the worlds."""
        converted = np.asarray(self.convert(actions))
        parts = [worlds % self.count == worker for worker in range(self.count)]
        results = self._ask(
            "step", [(worlds[part] // self.count, converted[part]) for part in parts]
        )
        observations, rewards, terminated, truncated = self._merge(worlds, results)
        return observations, rewards, terminated, truncated

    def _merge(self, worlds: Array, results: list[Any]) -> list[Array]:
        """The workers' arrays, in the order of the worlds."""
        some = next(result for result in results if result is not None)
        merged = [np.empty((len(worlds), *array.shape[1:]), array.dtype) for array in some]
        for worker, result in enumerate(results):
            if result is not None:
                for whole, part in zip(merged, result, strict=True):
                    whole[worlds % self.count == worker] = part
        return merged

    def _ask(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method in every worker that has something to do."""
        try:
            busy = [worker for worker in range(self.count) if len(arguments[worker][0])]
            for worker in busy:
                with contextlib.suppress(OSError):  # a dead one: receiving says so
                    self.pipes[worker].send((name, arguments[worker]))
            results: list[Any] = [None] * self.count
            for worker in busy:
                results[worker] = self._receive(worker)
            return results
        except BaseException:  # what workers still have to say would answer the next question
            self.close()
            raise

    def _receive(self, worker: int) -> Any:
        try:
            good, result = self.pipes[worker].recv()
        except (EOFError, OSError):
            self.processes[worker].join(timeout=5)
            raise FitnessError(
                f"environment process {worker} of {self.count} died, with the exit code "
                f"{self.processes[worker].exitcode}. If it never started: a program that uses "
                'workers needs the guard `if __name__ == "__main__":`'
            ) from None
        if not good:
            raise FitnessError(f"in environment process {worker}: {result}")
        return result

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()  # they end when there is nobody to answer
        for process in self.processes:
            process.join(timeout=2)
            if process.is_alive():
                process.terminate()
                process.join()
        self.pipes, self.processes = [], []


def _work(pipe: Connection, made: bytes, count: int) -> None:
    """What a process does: answer calls of its worlds' methods until the pipe closes."""
    from .gymnasium import EnvWorlds

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    parent = multiprocessing.parent_process()
    try:
        make_env = cloudpickle.loads(made)
        worlds = EnvWorlds([make_env() for _ in range(count)], convert=lambda actions: actions)
        pipe.send((True, None))
        while True:
            while not pipe.poll(5):  # a killed trainer leaves a pipe that other workers hold open
                if parent is not None and not parent.is_alive():
                    return
            name, arguments = pipe.recv()
            result = getattr(worlds, name)(*arguments)
            pipe.send((True, result if isinstance(result, tuple) else (result,)))
    except EOFError:
        return
    except BaseException as error:
        text = str(error) if isinstance(error, FitnessError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send((False, text))
