"""`Population`: the members of one generation, to be run, looked at and scored."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .errors import AskTellError, ConfigurationError
from .evaluators import Evaluator, preserved
from .folded import Folded
from .inputs import Inputs, MemberInputs
from .noise import derive_seed
from .perturbations import Perturbations

Result = TypeVar("Result")


class population_fitness(Generic[Result]):
    """Mark a function as scoring a whole population: `f(population) → (population_size,)`.

    With `data=`, it is called as `f(population, batch)`.

    Example:
        >>> @population_fitness
        ... def fitness(population):
        ...     outputs = population(torch.ones(3, 4))  # (population_size, 3, …)
        ...     return -outputs.flatten(1).square().mean(dim=1)
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Result:
        """Call the function."""
        return self.function(*args)

    def complete(self, model: nn.Module) -> dict[str, float]:
        """Called when a generation has been told, for a subclass that learns from what it saw.

        Returns:
            More metrics of the generation.
        """
        return {}


class Population:
    """The members `θ + σ E_i` of one generation; valid until `tell`.

    Args:
        model: The model; its parameters are the centre.
        parameters: Name → parameter, of those that are perturbed.
        perturbations: The generation's perturbations.
        sigma: Parameter name → σ, in units of the weights.
        evaluator: How to run all members.
        seed: Seed of the run.
        generation: Index of the generation.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        perturbations: Perturbations,
        sigma: Mapping[str, float],
        evaluator: Evaluator,
        seed: int,
        generation: int,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.perturbations = perturbations
        self.sigma = sigma
        self.evaluator = evaluator
        self.generation = generation
        self.seed = seed
        self._closed = False

    def __len__(self) -> int:
        return self.perturbations.population_size

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    def fitness_seed(self, member: int) -> int:
        """The seed of the random numbers that a member's fitness draws (dropout)."""
        return derive_seed(self.seed, self.generation, "fitness", member)

    def close(self) -> None:
        """End the population's life: the centre is about to move."""
        self._closed = True

    def centre(self) -> dict[str, Tensor]:
        """Name → the centre's parameter, not copied."""
        if self._closed:
            raise AskTellError(
                f"this population is that of generation {self.generation}, which tell() has ended: "
                "ask() for the next one"
            )
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def member_weights(self, index: int) -> dict[str, Tensor]:
        """Name → the weights `θ + σ E_i` of member `index`, as new tensors."""
        if not 0 <= index < len(self):
            raise IndexError(f"member {index} of a population of {len(self)}")
        s = len(self.perturbations.signs)
        chunk = self.perturbations.chunk(index // s * s, index // s * s + s)
        with torch.no_grad():
            centre = self.centre()
            weights = {name: torch.empty_like(centre[name]) for name in centre}
            chunk.writer(centre, self.sigma, weights)(index % s)
        return weights

    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain module of its own: a copy of the model with its weights."""
        return with_weights(self.model, self.member_weights(index))

    def __call__(self, *args: Any, in_dims: Any = None, **kwargs: Any) -> Any:
        """Run every member's forward pass.

        Args:
            *args: Positional arguments of the model.
            in_dims: None gives every member the same arguments. An integer is the axis of each
                tensor in `args` that holds one slice for each member; a tuple has an entry for
                each argument.
            **kwargs: Keyword arguments of the model, the same for all.

        Returns:
            What the model returns, each tensor with a leading member axis, `(population_size, …)`.
        """
        dims = (in_dims,) * len(args) if isinstance(in_dims, int) or in_dims is None else in_dims
        if len(dims) != len(args):
            raise ConfigurationError(
                f"in_dims has {len(dims)} entries: expected one for each of the {len(args)} "
                "arguments"
            )
        inputs = MemberInputs((*args, kwargs), (*dims, None))
        inputs.check(len(self))
        return self.map(forward, inputs)

    @contextlib.contextmanager
    def folded(self, checked: bool = True) -> Iterator[Folded]:
        """Every member at once, laid out in the batch axis: for policies in a simulator.

        What calls the model many times with control flow between, and rows of each member's own:
        little is done in Python from one call to the next.

        Args:
            checked: Compare the first call with the members one by one. A model that draws random
                numbers, of which each member has its own, cannot be compared.

        Yields:
            A callable: `policy(observations)` takes `(members · rows, …)`, member after member, and
            each row meets its own member's weights. Gradients are off.

        Example:
            >>> @population_fitness
            ... def fitness(population):
            ...     state = torch.zeros(len(population), 3)
            ...     with population.folded() as policy:
            ...         for _ in range(10):
            ...             state = state + policy(state)
            ...     return -state.square().sum(dim=1)
        """
        self.centre()  # raises where the population has ended
        with torch.no_grad(), preserved(self.model):
            yield Folded(self, range(len(self)), checked)

    def map(self, function: Callable[..., Any], inputs: Inputs) -> Any:
        """Call `function(model, *arguments)` for every member; stack what it returns."""
        self.centre()  # raises where the population has ended
        with torch.no_grad():
            return self.evaluator.map(self, function, inputs)


def forward(model: nn.Module, *args: Any) -> Any:
    """Call the model; the last argument holds those by keyword."""
    *positional, keywords = args
    return model(*positional, **keywords)


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model in which the named parameters have other numbers."""
    module = copy.deepcopy(model)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return module
