"""Checks of arguments and of fitnesses; each error says what came and what was expected."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigurationError, FitnessError, ParameterError, PopulationSizeError

ParameterGroup = dict[str, Any]


def check_integer(name: str, value: Any, at_least: int) -> int:
    """`value` as an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError(f"{name}={value!r}: expected an integer of at least {at_least}")
    return value


def check_number(name: str, value: Any) -> float:
    """`value` as a finite float of at least 0."""
    if isinstance(value, (bool, str)) or value is None:
        raise ConfigurationError(f"{name}={value!r}: expected a number of at least 0")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={value!r}: expected a number of at least 0") from error
    if not math.isfinite(number) or number < 0:
        raise ConfigurationError(f"{name}={value!r}: expected a finite number of at least 0")
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value` as one of `choices`."""
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ConfigurationError(f"{name}={value!r}: expected {expected}")
    return str(value)


def check_population(population_size: Any, group_size: Any, share: int = 1) -> None:
    """A population divides into groups, and both into sets of `share` members of one draw."""
    check_integer("population_size", population_size, at_least=2)
    check_integer("group_size", group_size, at_least=0)
    if population_size % share:
        raise ConfigurationError(
            f"population_size={population_size} is odd: noise_reuse=2 evaluates pairs ±E; make it "
            f"{population_size + 1}, or pass noise_reuse=0"
        )
    if group_size and population_size % group_size:
        raise ConfigurationError(
            f"group_size={group_size} does not divide population_size={population_size}: expected "
            "groups of equal size, or 0 to compare all members"
        )
    if group_size and (group_size < 2 or group_size % share):
        raise ConfigurationError(
            f"group_size={group_size}: members are compared within a group, so it holds at least "
            "2, and whole pairs where noise_reuse=2"
        )


def check_noise_reuse(noise_reuse: Any) -> bool:
    """Whether members come in antithetic pairs: `noise_reuse` 2; 0 and 1 share nothing."""
    if isinstance(noise_reuse, bool) or noise_reuse not in (0, 1, 2):
        raise ConfigurationError(
            f"noise_reuse={noise_reuse!r}: expected 2 (antithetic pairs ±E), or 0 or 1 (a draw for "
            "each member)"
        )
    return bool(noise_reuse == 2)


def check_seed(seed: Any) -> int:
    """The seed, or a random one for None."""
    if seed is None:
        return secrets.randbits(63)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ConfigurationError(f"seed={seed!r}: expected None or an integer from 0 to 2**64 - 1")
    return seed


def check_callable(name: str, value: Any, expected: str) -> Any:
    """`value` as something that can be called."""
    if not callable(value):
        raise ConfigurationError(f"{name}={value!r}: expected {expected}")
    return value


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """A torch optimizer that steps from gradients alone."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer made a {type(optimizer).__name__}: expected a torch.optim.Optimizer; pass "
            "a class or a factory, such as functools.partial(torch.optim.AdamW, weight_decay=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("optimizer=LBFGS evaluates a closure with gradients: use another")
    return optimizer


def check_model(model: Any) -> nn.Module:
    """`model` as an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model={type(model).__name__}: expected an nn.Module; the trainer is called as "
            "Trainer(model.parameters(), model=model, fitness_fn=…)"
        )
    return model


def make_groups(params: Any) -> list[ParameterGroup]:
    """`params` as a list of groups, each a new dictionary with a list of parameters."""
    if isinstance(params, (torch.Tensor, nn.Module, str)) or not isinstance(params, Iterable):
        raise ConfigurationError(
            f"params={type(params).__name__}: expected an iterable of parameters or of groups, as "
            "for torch.optim: model.parameters()"
        )
    entries = list(params)
    if not entries:
        raise ParameterError("params is empty: expected model.parameters() or a part of it")
    groups = entries if isinstance(entries[0], Mapping) else [{"params": entries}]
    result = []
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigurationError(f"params[{i}]: expected a group, {{'params': …, 'sigma': …}}")
        own = group["params"]
        own = [own] if isinstance(own, torch.Tensor) else list(own)
        result.append({**group, "params": own})
    return result


def name_parameters(
    groups: Sequence[ParameterGroup], model: nn.Module, device: Any
) -> dict[str, nn.Parameter]:
    """Name → parameter, in the order of the groups; raises for what cannot be trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            place = f"params[{i}]" if len(groups) == 1 else f"params[{g}]['params'][{i}]"
            name = names.get(id(parameter))
            if name is None:
                kind = type(parameter).__name__
                shape = tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else ""
                raise ParameterError(
                    f"{place} ({kind} {shape}) is not a parameter of model: pass "
                    "model.parameters() of the same model"
                )
            if name in found:
                raise ParameterError(f"{place} is {name!r}, which params names already")
            if not parameter.is_floating_point():
                raise ParameterError(
                    f"{name!r} is {parameter.dtype}: noise can be added to floating point only; "
                    "leave it out of params"
                )
            found[name] = parameter
    places = {parameter.device for parameter in found.values()}
    if len(places) > 1:
        raise ParameterError(f"the parameters lie on several devices, {places}: move them to one")
    (place_found,) = places
    wanted = place_found if device is None else torch.device(device)
    if wanted.type != place_found.type or wanted.index not in (None, place_found.index):
        raise ParameterError(
            f"device={str(wanted)!r}, but the model is on {str(place_found)!r}: call "
            f"model.to({str(wanted)!r}) before making the trainer"
        )
    return found


@dataclass(frozen=True)
class Checked:
    """The fitness of one member, with what it returns checked."""

    fitness_fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Tensor | float:
        """Call it."""
        return as_fitness(self.fitness_fn(*args))


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
