"""What a fitness may return, and what is made of it."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import FitnessError, PopulationSizeError


def checked(fitness_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The fitness of one member, with what it returns checked."""

    def fitness(*args: Any) -> Tensor | float:
        return as_fitness(fitness_fn(*args))

    return fitness


def as_fitness(value: Any) -> Tensor | float:
    """One member's fitness: a number, or a 0-d tensor."""
    if isinstance(value, Tensor):
        if value.dim() == 0 and not value.is_complex():
            return value
        raise FitnessError(
            f"the fitness returned a tensor of shape {tuple(value.shape)} and {value.dtype}: "
            "expected one real number (higher is better); reduce it, for example with .mean()"
        )
    if isinstance(value, numbers.Real):
        return float(value)
    came = "None (is a return missing?)" if value is None else f"{type(value).__name__} {value!r}"
    raise FitnessError(
        f"the fitness returned {came}: expected one real number (higher is better), as a float or "
        "a 0-d tensor"
    )


def as_fitnesses(values: Any, population_size: int, device: torch.device) -> Tensor:
    """The population's fitnesses as a float64 tensor `(population_size,)` on `device`.

    Double precision, so that a large offset costs no ranks.
    """
    try:
        dtype = None if isinstance(values, Tensor) else torch.float64
        fitnesses = torch.as_tensor(values, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitnessError(
            f"the fitnesses came as {type(values).__name__}: expected a tensor or a list of "
            f"{population_size} numbers, one for each member"
        ) from error
    if fitnesses.shape != (population_size,) or fitnesses.is_complex():
        raise PopulationSizeError(
            f"the fitnesses came as {fitnesses.dtype} of shape {tuple(fitnesses.shape)}: expected "
            f"one real number for each member, shape ({population_size},)"
        )
    return fitnesses.to(device, torch.float64)
