"""`EGGROLLTrainer`: which parameters get low-rank noise; the rest is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .base import ESTrainer, TrainerOptions
from .centre import Sigma
from .checks import check_integer, check_noise_reuse, check_population, make_groups
from .perturbations import KeyedPerturbations, ParameterNoise, ascent_direction


class EGGROLLTrainer(ESTrainer):
    r"""EGGROLL: evolution strategies with low-rank perturbations (arXiv:2511.16652).

    A member's matrix is $W + \sigma A B^\top / \sqrt r$ with Gaussian $A \in R^{m \times r}$ and
    $B \in R^{n \times r}$, so a layer costs one product that all members share and $r (m + n)$
    multiplications for each. The update, averaged over members, has full rank all the same.

    Matrices (2-D parameters) of which neither side is below `rank` get low-rank noise, all others
    full noise of the same σ.

    Args:
        params: As for `ESTrainer`; groups may also have a `rank`.
        model: As for `ESTrainer`.
        fitness_fn: As for `ESTrainer`.
        population_size: As for `ESTrainer`.
        learning_rate: As for `ESTrainer`: the fraction of σ per generation, with SGD.
        sigma: As for `ESTrainer`.
        rank: Rank `r` of a member's perturbation; 1 is usually enough, as the paper finds. Small
            populations (hundreds) can gain from 4.
        noise_reuse: Members that share a draw. 2: antithetic pairs `±E`, members `2k` and `2k + 1`:
            half the noise to draw, and what is even in the perturbation cancels. 0 or 1: none.
            (Elsewhere the word means generations that share noise.)
        group_size: As for `ESTrainer`.
        freeze_nonlora: Perturb and move only the parameters with low-rank noise.
        device: As for `ESTrainer`.
        seed: As for `ESTrainer`.
        matricize: Treat parameters of three and more axes, such as the kernels of convolutions, as
            matrices `(out, in·k·k)`: much cheaper than full noise.
        **options: As for `ESTrainer`, with `shaping="standardize"`.

    Raises:
        ConfigurationError: If an argument is wrong; the message says which and what to do.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> x = torch.randn(8, 4)
        >>> trainer = EGGROLLTrainer(
        ...     model.parameters(), model=model, fitness_fn=lambda m: -m(x).square().mean(), seed=0
        ... )
        >>> result = trainer.train(num_generations=20, verbose=False)
        >>> result["fitness_history"][-1] > result["fitness_history"][0]
        True
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        fitness_fn: Callable[..., Any],
        population_size: int = 256,
        learning_rate: float = 0.05,
        sigma: Sigma = 0.1,
        rank: int = 1,
        noise_reuse: int = 2,
        group_size: int = 0,
        freeze_nonlora: bool = False,
        device: torch.device | str | None = None,
        seed: int | None = None,
        *,
        matricize: bool = False,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._storage: dict[str, Tensor] = {}
        self.antithetic = check_noise_reuse(noise_reuse)
        check_population(population_size, group_size, share=2 if self.antithetic else 1)
        self.freeze_nonlora = freeze_nonlora
        self.matricize = matricize
        groups = make_groups(params)
        for group in groups:
            group["rank"] = check_integer("rank", group.get("rank", rank), at_least=1)
        options.setdefault("shaping", "standardize")
        super().__init__(
            groups,
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

    def parameter_noise(self) -> list[ParameterNoise]:
        """Low-rank noise for matrices that are large enough, full noise for the others."""
        ranks = self.centre.setting("rank")
        noise = []
        for full in super().parameter_noise():
            rank = ranks[full.name]
            matrix = len(full.shape) == 2 or (self.matricize and len(full.shape) > 2)
            side = min(full.matrix_shape)
            if matrix and rank <= side:
                noise.append(replace(full, rank=rank))
            elif not self.freeze_nonlora:
                note = f" (rank {rank} > {side})" if matrix else ""
                noise.append(replace(full, note=note))
        return noise

    def sample_perturbations(self, population_size: int) -> KeyedPerturbations:
        """Draw the generation's factors."""
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
        """The EGGROLL estimate: see `ascent_direction`."""
        return ascent_direction(perturbations, fitnesses, self.sigmas())
