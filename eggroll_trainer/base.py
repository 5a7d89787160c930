"""`ESTrainer`: the one loop that every algorithm of this library runs in."""

from __future__ import annotations

import math
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from . import checkpoint
from .auto import make_evaluator
from .callbacks import Callback, check_callbacks, newest, running
from .centre import Centre, Sigma
from .checks import (
    Checked,
    as_fitnesses,
    check_callable,
    check_choice,
    check_integer,
    check_model,
    check_population,
    check_seed,
)
from .data import BatchSource
from .errors import AskTellError, EggrollWarning, ParameterError
from .evaluators import preserved, uninterrupted
from .explain import Report, make_report
from .inputs import GroupInputs, Inputs, MemberInputs
from .metrics import Best, Metrics, norm, summarize
from .noise import derive_seed, keyed_global_rng
from .perturbations import DensePerturbations, ParameterNoise, Perturbations
from .population import Population, population_fitness, with_weights
from .progress import ProgressBar
from .shaping import Shaping, make_shaping, replace_nonfinite


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments that every trainer shares; `ESTrainer` documents them."""

    data: Any
    batch_size: int | None
    optimizer: Callable[..., torch.optim.Optimizer]
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    shaping: str | Shaping
    evaluation: str
    chunk_size: int | None
    randomness: str
    compile: bool
    nonfinite: str
    callbacks: Iterable[Callback]


class ESTrainer(ABC):
    """Train a module by an evolution strategy: subclass this to write one.

    A subclass fills in two methods. `sample_perturbations` says what is added to the parameters,
    `compute_update` where to go, given how well each member did. Batched evaluation, optimizers,
    schedules, checkpoints and the loop are here.

    Args:
        params: The parameters to train, as for `torch.optim`: an iterable of the model's
            parameters, or groups `{"params": …, "lr": …, "sigma": …}`. Those with
            `requires_grad=False` are left alone.
        model: The module; its parameters are the *centre* that is trained, in place.
        fitness_fn: `f(model) -> number`, higher is better; `f(model, batch)` with `data`; or a
            `@population_fitness`.
        population_size: Members of a generation. More give a better direction; a batched
            evaluation makes hundreds cheap.
        learning_rate: Of the optimizer. With SGD, the built-in algorithms and z-scores, the
            fraction of σ by which noise alone moves each weight in a generation; 0.01 to 0.3.
        sigma: Standard deviation of the perturbations, in units of the weights; or a function
            generation → σ. 0.1 suits layers initialised by PyTorch; trained models want less.
        group_size: Members that are compared with one another, and share a batch of `data`; 0
            compares all.
        device: Must be where the model is, if given.
        seed: Seed of all noise, and of the random numbers a fitness draws; None takes a random one.
        data: Batches, one a generation (one for each group with `group_size`): any iterable that
            can be begun again, such as a `DataLoader` or a list; or a `Dataset`, which is shuffled.
            They are moved to the model's device.
        batch_size: Examples of a batch, where `data` is a `Dataset`.
        optimizer: Class or factory, called as `optimizer(groups, lr=learning_rate)`.
        lr_scheduler: Factory of a torch scheduler from the optimizer; stepped once a generation.
        shaping: Raw fitnesses → weights: `"standardize"`, `"centered_rank"`, `"raw"`, or a
            callable `(population_size,) → (population_size,)`. `"raw"` here, so that
            `compute_update` gets what the fitness returned; the built-in algorithms standardize.
        evaluation: `"vmap"` evaluates members in one batched pass, `"sequential"` one after
            another; `"auto"` tries the first and falls back to the second with a warning.
        chunk_size: Members in one batched pass, at most (whole pairs); None chooses.
        randomness: Random numbers that a fitness draws (dropout): `"different"` for each member,
            or the `"same"` for all.
        compile: Compile the batched pass, by `torch.compile`: small networks are evaluated up to
            twice as fast, after some seconds for each shape of batch. It needs a C++ compiler, and
            a fitness that depends on nothing but the model and its batch: it is traced once.
        nonfinite: `"worst"` counts NaN and infinite fitnesses as the worst finite one of their
            group; `"raise"` raises.
        callbacks: What else happens in `train()`, in this order: see `Callback`.

    Raises:
        ConfigurationError: If an argument is wrong; the message says which and what to do.

    Attributes:
        model: The module.
        centre: The parameters that are trained, and their optimizer.
        evaluator: How members are evaluated.
        generation: Generations completed.
        history: Metrics of each generation.
        seed: The seed of the run.
        device: Where the parameters are.
        generator: A `torch.Generator` for the subclass's own draws, seeded for each generation.
        callbacks: The callbacks; those that save come last.
        last_planned: Generations completed when the present `train()` ends.
        interrupted: Whether the last `train()` ended by Ctrl-C.
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        fitness_fn: Callable[..., Any],
        population_size: int = 256,
        learning_rate: float = 0.05,
        sigma: Sigma = 0.1,
        group_size: int = 0,
        device: torch.device | str | None = None,
        seed: int | None = None,
        *,
        data: Any = None,
        batch_size: int | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        shaping: str | Shaping = "raw",
        evaluation: str = "auto",
        chunk_size: int | None = None,
        randomness: str = "different",
        compile: bool = False,
        nonfinite: str = "worst",
        callbacks: Iterable[Callback] = (),
    ) -> None:
        check_population(population_size, group_size)
        self.model = check_model(model)
        self.fitness_fn = check_callable("fitness_fn", fitness_fn, "a function of the model")
        self.population_size = population_size
        self.group_size = group_size
        self.seed = check_seed(seed)
        self.nonfinite = check_choice("nonfinite", nonfinite, ("worst", "raise"))
        self.centre = Centre(params, model, device, learning_rate, sigma, optimizer, lr_scheduler)
        self.device = self.centre.device
        self.generator = torch.Generator(self.device)
        self._shape = make_shaping(shaping, group_size)
        self._source: BatchSource | None = None
        if data is not None or batch_size is not None:
            self._source = BatchSource(data, batch_size, self.device, self.seed)
        self.evaluator = make_evaluator(evaluation, chunk_size, randomness, compile)
        self.callbacks = check_callbacks(callbacks)
        self.last_planned, self.interrupted = 0, False
        self._population: Population | None = None
        self._sampled: Tensor | Perturbations | None = None
        self._inputs: Inputs = MemberInputs(())
        self._use_checked = False
        self.reset()
        if not self.parameter_noise():
            raise ParameterError(
                "there is nothing to train: every parameter in params is frozen "
                "(requires_grad=False, or freeze_nonlora=True and no matrix among them)"
            )

    def reset(self) -> None:
        """Begin again at generation 0 from the weights that the model has now.

        Optimizer, scheduler, history and best member are new; the weights stay: load others into
        the model to start from them.
        """
        self._close()
        self.centre.reset()
        if self._source is not None:
            self._source.reset()
        self.generation = 0
        self.history: list[Metrics] = []
        self._best: Best | None = None

    # --- the algorithm: what a subclass fills in ----------------------------------------------

    @abstractmethod
    def sample_perturbations(self, population_size: int) -> Tensor | Perturbations:
        """Draw the generation's perturbations at unit scale; a member's weights are `θ + σ E`.

        Torch's global generators are seeded for the generation while this runs, and restored.

        Args:
            population_size: Members `N`.

        Returns:
            One member a row, `(N, D)` with `D = len(self.current_params)`.
        """

    @abstractmethod
    def compute_update(
        self, perturbations: Any, fitnesses: Tensor
    ) -> Tensor | Mapping[str, Tensor]:
        """Find the direction of ascent.

        Args:
            perturbations: What `sample_perturbations` returned.
            fitnesses: Shaped fitnesses, `(population_size,)`, float32, finite.

        Returns:
            The direction, `(D,)`; with SGD the parameters move by `learning_rate` times it. Or the
            same by name: parameter → tensor of its shape.
        """

    def parameter_noise(self) -> list[ParameterNoise]:
        """The parameters to perturb now, and how: full noise for all that are not frozen."""
        return [
            ParameterNoise(name, p.shape, p.dtype, p.device, rank=None)
            for name, p in self.centre.parameters.items()
            if p.requires_grad
        ]

    # --- the loop -----------------------------------------------------------------------------

    def ask(self) -> Population:
        """The current generation's population: the same one until `tell`."""
        if self._population is None:
            self.centre.apply_schedules(self.generation)
            noise = self.parameter_noise()
            seed = derive_seed(self.seed, self.generation, "sampling")
            self.generator.manual_seed(seed)
            with torch.no_grad(), keyed_global_rng(self.device, seed):
                self._sampled = self.sample_perturbations(self.population_size)
            perturbations = self._sampled
            if not isinstance(perturbations, Perturbations):
                perturbations = DensePerturbations(perturbations, noise, self.population_size)
            inputs = self._next_inputs()
            self._population = Population(
                self.model,
                {p.name: self.centre.parameters[p.name] for p in noise},
                perturbations,
                self.sigmas(),
                self.evaluator,
                self.seed,
                self.generation,
            )
            self._inputs = inputs
        return self._population

    def evaluate(self, population: Population) -> Tensor:
        """Score every member.

        Returns:
            Raw fitnesses, `(population_size,)`, float64.
        """
        if population is not self._population:
            raise AskTellError("evaluate takes the population that ask() returned last")
        if isinstance(self.fitness_fn, population_fitness):
            with preserved(self.model), torch.no_grad():
                values = self.fitness_fn(population, *self._inputs.everything())
        else:
            values = population.map(Checked(self.fitness_fn), self._inputs)
        self._warn_of_unused(population)
        return as_fitnesses(values, self.population_size, self.device)

    def tell(self, fitnesses: Any) -> Metrics:
        """Move the centre, given the raw fitnesses of the population asked for.

        Args:
            fitnesses: `(population_size,)` numbers, higher is better.

        Returns:
            The generation's metrics: `generation`, `mean_fitness`, `std_fitness`, `max_fitness`,
            `best_fitness` (so far), `nonfinite` (the share of NaN and infinite fitnesses),
            `update_norm` (of the direction handed to the optimizer), `centre_norm` (of the trained
            parameters before the step), `learning_rate` and `sigma` (of the first group).

        Raises:
            AskTellError: If no population has been asked for, or it has been told already.
            PopulationSizeError: If there is not one number for each member.
        """
        population = self._population
        if population is None:
            raise AskTellError("tell() needs a population: call ask() first, and tell it once")
        raw = as_fitnesses(fitnesses, self.population_size, self.device)
        with torch.no_grad():
            clean = replace_nonfinite(raw, self.group_size)
            weights = self._shape(clean).to(torch.float32)
            update = self.compute_update(self._sampled, weights)
            if not isinstance(update, Mapping):
                update = self.centre.split(update, self._trained())
            norms = {
                "update_norm": norm(update.values()),
                "centre_norm": norm(self.centre.parameters.values()),
            }
        metrics, best_member = summarize(raw, clean, norms, self.nonfinite, self.generation)
        metrics |= {"learning_rate": self.learning_rate, "sigma": self.sigma}
        with uninterrupted():
            if metrics["max_fitness"] > self.best_fitness:
                self._best = Best(
                    metrics["max_fitness"],
                    self.generation,
                    best_member,
                    population.member_weights(best_member),
                )
            if metrics["nonfinite"] < 1.0:
                self.centre.step(update)
            metrics["best_fitness"] = self.best_fitness
            if isinstance(self.fitness_fn, population_fitness):
                metrics |= self.fitness_fn.complete(self.model)
            self._close()
            self.generation += 1
            self.history.append(metrics)
        return metrics

    def step(self) -> Metrics:
        """One generation: ask, evaluate, tell.

        Returns:
            The metrics of `tell`, the seconds of each phase and `members_per_second`.
        """
        times = [time.perf_counter()]
        population = self.ask()
        times.append(time.perf_counter())
        fitnesses = self.evaluate(population)
        times.append(time.perf_counter())
        metrics = self.tell(fitnesses)
        times.append(time.perf_counter())
        for name, start, end in zip(("ask", "evaluate", "tell"), times, times[1:], strict=False):
            metrics[f"{name}_seconds"] = end - start
        metrics["members_per_second"] = self.population_size / (times[-1] - times[0])
        return metrics

    def train(
        self,
        num_generations: int = 100,
        verbose: bool = True,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Run generations, with callbacks. Ctrl-C ends them early, with the centre intact.

        Args:
            num_generations: How many from here on; with `resume_from`, how many in all.
            verbose: Show a progress bar (plain lines where the output is no terminal).
            resume_from: A checkpoint to go on from, or a folder of `Checkpoint`'s: its newest, or
                the beginning where there is none yet. So a script that was killed is run again.

        Returns:
            `generation` (completed), `best_fitness`, `fitness_history` (each generation's mean).

        Raises:
            CheckpointError: As for `load`.
        """
        check_integer("num_generations", num_generations, at_least=0)
        self.last_planned = self.generation + num_generations
        if resume_from is not None:
            if (path := newest(resume_from)) is not None:
                self.load(path)
            self.last_planned = num_generations
        self.interrupted = False
        callbacks = [ProgressBar(), *self.callbacks] if verbose else self.callbacks
        with running(callbacks, self) as tell_callbacks:
            try:
                while not self.last_generation:
                    tell_callbacks(self.step())
            except KeyboardInterrupt:
                self.interrupted = True
        return {
            "generation": self.generation,
            "best_fitness": self.best_fitness,
            "fitness_history": self.fitness_history,
        }

    @property
    def last_generation(self) -> bool:
        """Whether the `train()` that is running is done with the generation completed last."""
        return self.generation >= self.last_planned

    def stop(self) -> None:
        """End `train()` after the present generation: for callbacks."""
        self.last_planned = self.generation

    def _next_inputs(self) -> Inputs:
        if self._source is None:
            return MemberInputs(())
        if not self.group_size:
            return MemberInputs((self._source.next(),))
        groups = self.population_size // self.group_size
        return GroupInputs([self._source.next() for _ in range(groups)], self.group_size)

    def sigmas(self) -> dict[str, float]:
        """Parameter name → σ, in units of the weights: that of the population asked for, if any."""
        if self._population is not None:
            return dict(self._population.sigma)
        return self.centre.setting("sigma")

    def _warn_of_unused(self, population: Population) -> None:
        """Once: a parameter that is perturbed but never used would get an update of pure noise."""
        trace = self.evaluator.trace
        if self._use_checked or trace is None or self.evaluator.reason is not None:
            return
        self._use_checked = True
        if unused := [name for name in population.parameters if name not in trace.used]:
            warnings.warn(
                f"no operation used {', '.join(unused)}: an update would be pure noise; leave such "
                "parameters out of params, or use them",
                EggrollWarning,
                stacklevel=3,
            )

    def _close(self) -> None:
        """Let go of the population that was asked for."""
        if self._population is not None:
            self._population.close()
            if self._source is not None:
                self._source.complete()
        self._population, self._sampled, self._inputs = None, None, MemberInputs(())

    # --- results ------------------------------------------------------------------------------

    @property
    def fitness_history(self) -> list[float]:
        """Mean fitness of each generation."""
        return [metrics["mean_fitness"] for metrics in self.history]

    @property
    def best_fitness(self) -> float:
        """Fitness of the best member seen; −inf before the first generation."""
        return -math.inf if self._best is None else self._best.fitness

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer; editing its `param_groups` (`lr`, `sigma`) has its usual effect."""
        return self.centre.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The torch scheduler, or None."""
        return self.centre.lr_scheduler

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate now (of its first group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def sigma(self) -> float:
        """σ now (of the first group)."""
        return float(self.optimizer.param_groups[0]["sigma"])

    def get_best_model(self) -> nn.Module:
        """A new module with the weights of the best member seen: scored again, `best_fitness`.

        Raises:
            AskTellError: If no generation has been scored.
        """
        if self._best is None:
            raise AskTellError("there is no best member before the first generation: call train()")
        return with_weights(self.model, self._best.weights)

    def explain(self) -> Report:
        """How this model is perturbed and evaluated: a report that prints as a table.

        Before the first generation the fitness is tried on the current population.
        """
        return make_report(self)

    # --- the parameters as one vector, for custom algorithms ------------------------------------

    @property
    def current_params(self) -> Tensor:
        """The centre's trained parameters, flat, `(D,)`: a copy, read from the model each time."""
        return self._get_flat_params()

    def _trained(self) -> list[str]:
        return [noise.name for noise in self.parameter_noise()]

    def _get_flat_params(self) -> Tensor:
        return self.centre.flat(self._trained())

    def _set_flat_params(self, flat: Tensor) -> None:
        """Write `(D,)` into the model in place: storage, dtype and strides are kept."""
        self.centre.write(self.centre.split(flat, self._trained()))

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on: tensors and plain values only, nothing shared.

        The model's whole state, the optimizer's and scheduler's, generation, seed, history, best
        member, the position in `data` and what the evaluator has chosen.
        """
        return checkpoint.capture(self)

    def resume(
        self,
        seed: int,
        generation: int,
        history: list[Metrics],
        best: Best | None,
        data: Mapping[str, Any] | None,
    ) -> None:
        """Take up the counters of another run; `load_state_dict` does the whole."""
        self._close()
        self.seed, self.generation, self.history, self._best = seed, generation, history, best
        if self._source is not None and data is not None:
            self._source.seed = seed
            self._source.load_state_dict(data)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a run from `state_dict()`; it continues bit for bit.

        Raises:
            CheckpointError: If the state is not one of this library, or of another model or
                population; then nothing has changed.
        """
        checkpoint.restore(self, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file, which is whole at every moment, old or new."""
        checkpoint.write(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take up a run from a file of `save()`.

        Raises:
            CheckpointError: As for `load_state_dict`, or if the file is no checkpoint.
        """
        self.load_state_dict(checkpoint.read(path, self.device))
