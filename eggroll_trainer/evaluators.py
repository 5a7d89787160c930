"""Evaluators: how a function is run for every member. They differ in speed, never in meaning.

`SequentialEvaluator` writes one member after another into the model. `BatchedEvaluator`, in
`batched.py`, runs a chunk of members at once. `AutoEvaluator` tries the second and falls back to
the first, aloud.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .errors import EggrollWarning, FitnessError
from .inputs import Inputs
from .lowrank import Trace
from .noise import keyed_global_rng, seed_global_rng

if TYPE_CHECKING:
    from .batched import BatchedEvaluator
    from .population import Population

# Members whose noise is fetched at once.
SEQUENTIAL_BLOCK = 128


class Evaluator(ABC):
    """Runs a function for every member of a population.

    Attributes:
        name: `"vmap"` or `"sequential"`.
        trace: What the batched passes have seen so far; None where there are none.
        chunk_size: Members in one batched pass; None where that is open, or there are none.
        reason: Why `"auto"` fell back to `"sequential"`; None where it has not.
    """

    name: str
    trace: Trace | None = None
    chunk_size: int | None = None
    reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """What has been chosen, for a run that goes on to choose the same."""
        return {"chunk_size": self.chunk_size, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Choose what another run chose."""
        del state  # nothing to choose

    @abstractmethod
    def map(self, population: Population, function: Callable[..., Any], inputs: Inputs) -> Any:
        """Call `function(model, *arguments)` for every member.

        Returns:
            What it returns, each tensor or number stacked along a leading member axis.
        """


class SequentialEvaluator(Evaluator):
    """Each member's weights written into the model, one after another.

    Args:
        randomness: `"same"` starts every member from the same random state, `"different"` from its
            own.
    """

    name = "sequential"

    def __init__(self, randomness: str) -> None:
        self.randomness = randomness

    def map(self, population: Population, function: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function for every member; the centre is back afterwards, bit for bit."""
        model, perturbations = population.model, population.perturbations
        targets = population.centre()
        centre = {name: parameter.clone() for name, parameter in targets.items()}
        results = []
        with preserved(model) as restore, keyed_global_rng(population.device, 0):
            try:
                for start in range(0, len(population), SEQUENTIAL_BLOCK):
                    stop = min(start + SEQUENTIAL_BLOCK, len(population))
                    chunk = perturbations.chunk(start, stop)
                    write = chunk.writer(centre, population.sigma, targets)
                    for i in range(start, stop):
                        restore()
                        write(i - start)
                        first = 0 if self.randomness == "same" else i
                        seed_global_rng(population.device, population.fitness_seed(first))
                        results.append(_call(i, function, model, *inputs.member(i)))
            finally:
                with uninterrupted():
                    for name, parameter in targets.items():
                        parameter.copy_(centre[name])
        return _stack(results)


def _call(member: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except FitnessError as error:
        raise FitnessError(f"member {member}: {error}") from None


def _stack(results: list[Any]) -> Any:
    """Stack the members' results, leaf by leaf; numbers become float64."""

    def stack(*leaves: Any) -> Tensor:
        if isinstance(leaves[0], Tensor):
            return torch.stack([leaf.detach() for leaf in leaves])
        return torch.tensor(leaves, dtype=torch.float64)

    return tree_map(stack, *results)


class AutoEvaluator(Evaluator):
    """All members at once while that works; one after another from the first time it does not.

    It also goes on one after another, without a warning, where the first generation shows that
    batching does not pay (`BatchedEvaluator.better_alone`).
    """

    def __init__(self, batched: BatchedEvaluator, sequential: SequentialEvaluator) -> None:
        self.batched = batched
        self.sequential = sequential

    @property
    def name(self) -> str:  # type: ignore[override]
        """The evaluator in use."""
        return self.batched.name if self.reason is None else self.sequential.name

    @property
    def trace(self) -> Trace | None:  # type: ignore[override]
        """The batched evaluator's."""
        return self.batched.trace

    @property
    def chunk_size(self) -> int | None:  # type: ignore[override]
        """The batched evaluator's, while it is in use."""
        return self.batched.chunk_size if self.reason is None else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Choose what another run chose."""
        self.reason = state["reason"]
        self.batched.load_state_dict(state)

    def map(self, population: Population, function: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function for every member."""
        if self.reason is not None:
            return self.sequential.map(population, function, inputs)
        try:
            result = self.batched.map(population, function, inputs)
            self.reason = self.batched.better_alone(population)
            return result
        except FitnessError:
            raise  # one after another it would return the same
        except Exception as error:
            reason = explain_refusal(error)
        # A mistake of the user's own raises here again, in plain PyTorch.
        result = self.sequential.map(population, function, inputs)
        self.reason = reason
        warnings.warn(
            f"the members are evaluated one after another, which is slow: {reason} "
            '(evaluation="sequential" chooses this without a warning)',
            EggrollWarning,
            stacklevel=2,
        )
        return result


# What torch says when an operation refuses to be batched → what the user can do about it.
ADVICE = {
    "data-dependent control flow": "choose with torch.where instead of if or while",
    ".item()": "keep the value a tensor (or end in .item(), without float(), int(), round(), "
    "formatting or NumPy)",
    "running_mean": "BatchNorm in training mode writes its statistics: call model.eval()",
    "in-place": "write out-of-place, as in x = x + y",
    "inplace": "write out-of-place, as in x = x + y",
    ".numpy()": "compute the fitness with torch operations instead of NumPy",
    "randomness": 'pass randomness="different" or "same" to the trainer',
    "dynamic shape": "mask instead of selecting: a result's shape must not depend on the numbers",
}


def explain_refusal(error: BaseException) -> str:
    """Name the line of the user's code, the operation that refused, and what to write instead."""
    message = str(error).split("\n")[0].strip().rstrip(".")
    advice = next((text for sign, text in ADVICE.items() if sign in str(error)), None)
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "torch" not in path.parts and Path(__file__).parent not in path.parents:
            where = f"{path.name}:{frame.lineno}: `{frame.line}`: "
            break
    return f"{where}{type(error).__name__}: {message}." + (f" Advice: {advice}." if advice else "")


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Keep a model as it is, apart from its parameters' numbers, whatever is done inside.

    That is its buffers, modes, `requires_grad`, and whatever its modules hold as attributes.

    Yields:
        A function that brings them back at once, for the next member.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def restore() -> None:
        for now, before in attributes:
            if len(now) != len(before) or any(
                now.get(key) is not value for key, value in before.items()
            ):
                now.clear()
                now.update(before)
        for parameter, flag in grads:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for places, name, buffer, value in buffers:
            places[name] = buffer
            buffer.copy_(value)

    try:
        yield restore
    finally:
        with uninterrupted(), torch.no_grad():
            restore()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C to the end of a block that must be done whole."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught and callable(previous):
            previous(*caught[0])
