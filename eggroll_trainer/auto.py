"""Which evaluator a trainer uses: the one asked for, or whichever works."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .batched import BatchedEvaluator
from .checks import check_choice, check_integer
from .compiled import CompiledEvaluator
from .errors import ConfigurationError, EggrollWarning, FitnessError
from .evaluators import Evaluator, SequentialEvaluator
from .inputs import Inputs
from .lowrank import Trace

if TYPE_CHECKING:
    from .population import Population


def make_evaluator(
    evaluation: str, chunk_size: int | None, randomness: str, compile: bool
) -> Evaluator:
    """The evaluator that the constructor's arguments describe."""
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, at_least=1)
    check_choice("randomness", randomness, ("different", "same"))
    if not isinstance(compile, bool):
        raise ConfigurationError(f"compile={compile!r}: expected True or False")
    batched = (CompiledEvaluator if compile else BatchedEvaluator)(chunk_size, randomness)
    sequential = SequentialEvaluator(randomness)
    choices: dict[str, Evaluator] = {
        "auto": AutoEvaluator(batched, sequential),
        "vmap": batched,
        "sequential": sequential,
    }
    return choices[check_choice("evaluation", evaluation, tuple(choices))]


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
        self._fall_back(reason)
        return result

    def fold(
        self, population: Population, members: Sequence[int], checked: bool
    ) -> Callable[..., Any]:
        """All members at once, and one after another from the first time that fails."""
        batched = self.batched.fold(population, members, checked)
        alone: Callable[..., Any] | None = None

        def run(*args: Any) -> Any:
            nonlocal alone
            reason = None
            if self.reason is None:
                try:
                    return batched(*args)
                except Exception as error:
                    reason = explain_refusal(error)
            if alone is None:
                alone = self.sequential.fold(population, members, checked)
            result = alone(*args)  # a mistake of the user's own raises here again
            if reason is not None:
                self._fall_back(reason)
            return result

        return run

    def _fall_back(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(
            f"the members are evaluated one after another, which is slow: {reason} "
            '(evaluation="sequential" chooses this without a warning)',
            EggrollWarning,
            stacklevel=3,
        )


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
