"""A generation in numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import EggrollWarning, FitnessError

Metrics = dict[str, float]


@dataclass(frozen=True)
class Best:
    """The best member seen: its fitness, when and which it was, and its weights by name."""

    fitness: float
    generation: int
    member: int
    weights: dict[str, Tensor]


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of several tensors as one vector, 0-d, float64."""
    parts = torch.stack([torch.linalg.vector_norm(t.detach()).double() for t in tensors])
    total: Tensor = torch.linalg.vector_norm(parts)
    return total


def summarize(
    raw: Tensor, clean: Tensor, norms: Mapping[str, Tensor], nonfinite: str, generation: int
) -> tuple[Metrics, int]:
    """The metrics of a generation and the index of its best member; one transfer from the device.

    Args:
        raw: Fitnesses as they came, `(population_size,)`.
        clean: The same with the non-finite ones replaced.
        norms: Further metrics, 0-d.
        nonfinite: `"raise"` raises where there are any.
        generation: Index of the generation.

    Raises:
        FitnessError: If there are non-finite fitnesses and `nonfinite` is `"raise"`.
    """
    finite = raw.isfinite()
    top, member = torch.where(finite, raw, -torch.inf).max(dim=0)
    stats = [clean.mean(), clean.std(correction=0), top, member.double(), (~finite).sum().double()]
    mean, std, maximum, best, bad, *rest = torch.stack([*stats, *norms.values()]).tolist()
    if bad and nonfinite == "raise":
        first = int((~finite).nonzero()[0])
        raise FitnessError(
            f"{bad:.0f} of {len(raw)} fitnesses are not finite, the first is member {first}'s, "
            f'{raw[first].item()}; nonfinite="worst" would count them as the worst'
        )
    if bad == len(raw):
        warnings.warn(
            f"generation {generation}: no fitness was finite, so the centre stays where it is",
            EggrollWarning,
            stacklevel=3,
        )
    metrics = {
        "generation": generation,
        "mean_fitness": mean,
        "std_fitness": std,
        "max_fitness": maximum,
        "nonfinite": bad / len(raw),
        **dict(zip(norms, rest, strict=True)),
    }
    return metrics, int(best)
