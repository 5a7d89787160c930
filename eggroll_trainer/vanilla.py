"""`VanillaESTrainer`: dense Gaussian noise, to compare with and to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .base import ESTrainer, TrainerOptions
from .centre import Sigma
from .checks import check_noise_reuse, check_population
from .perturbations import KeyedPerturbations, ascent_direction


class VanillaESTrainer(ESTrainer):
    r"""The evolution strategy of Salimans et al. (2017, arXiv:1703.03864): full Gaussian noise.

    Each member is $\theta + \sigma E_i$ with $E_i$ standard normal in every weight. The estimate,
    the scale of the step and all arguments are those of `EGGROLLTrainer`, so that the two can be
    compared at equal settings; only the noise is dense, and `N` members cost `N` weight matrices.

    Args:
        params: As for `ESTrainer`.
        model: As for `ESTrainer`.
        fitness_fn: As for `ESTrainer`.
        population_size: As for `ESTrainer`.
        learning_rate: As for `ESTrainer`: the fraction of σ per generation, with SGD.
        sigma: As for `ESTrainer`.
        noise_reuse: 2 for antithetic pairs `±E`, 0 or 1 for a draw for each member.
        group_size: As for `ESTrainer`.
        device: As for `ESTrainer`.
        seed: As for `ESTrainer`.
        **options: As for `ESTrainer`, with `shaping="standardize"`.
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        fitness_fn: Callable[..., Any],
        population_size: int = 256,
        learning_rate: float = 0.05,
        sigma: Sigma = 0.1,
        noise_reuse: int = 2,
        group_size: int = 0,
        device: torch.device | str | None = None,
        seed: int | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._storage: dict[str, Tensor] = {}
        self.antithetic = check_noise_reuse(noise_reuse)
        check_population(population_size, group_size, share=2 if self.antithetic else 1)
        options.setdefault("shaping", "standardize")
        super().__init__(
            params,
            model,
            fitness_fn,
            population_size,
            learning_rate,
            sigma,
            group_size,
            device,
            seed,
            **options,
        )

    def sample_perturbations(self, population_size: int) -> KeyedPerturbations:
        """Draw a standard normal number for every weight of every direction."""
        return KeyedPerturbations(
            self.parameter_noise(),
            self.seed,
            self.generation,
            population_size,
            self.antithetic,
            self._storage,
        )

    def compute_update(
        self, perturbations: KeyedPerturbations, fitnesses: Tensor
    ) -> Mapping[str, Tensor]:
        """The ES estimate: see `ascent_direction`."""
        return ascent_direction(perturbations, fitnesses, self.sigmas())
