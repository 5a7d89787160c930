"""Evaluators: how a function is run for every member. They differ in speed, never in meaning.

`SequentialEvaluator` writes one member after another into the model. `BatchedEvaluator`, in
`batched.py`, runs a chunk of members at once, and `CompiledEvaluator` compiles that.
`AutoEvaluator`, in `auto.py`, tries these and falls back to the first, aloud.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .errors import FitnessError
from .folded import in_turn
from .inputs import Inputs
from .lowrank import Trace
from .noise import keyed_global_rng, seed_global_rng

if TYPE_CHECKING:
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

    @abstractmethod
    def fold(
        self, population: Population, members: Sequence[int], checked: bool
    ) -> Callable[..., Any]:
        """The model as a function of rows, member after member in the batch axis: see `Folded`."""


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

    def fold(
        self, population: Population, members: Sequence[int], checked: bool
    ) -> Callable[..., Any]:
        """The members' copies of the model, in turn."""
        return in_turn(population, members)


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
