"""Perturbations: what a generation adds to the centre, member by member and in the mean.

A perturbation `E` has unit variance; `σ` is applied where a member's weights are made (`Chunk`) and
where the update is (`ascent_direction`). A member is its direction times a sign: the members `2k`
and `2k + 1` of an antithetic pair share direction `k` and have the signs +1 and −1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigurationError
from .noise import Noise, NoiseSpec

# Directions that the weighted mean takes at once: bounds its memory, and is a multiple of a block.
MEAN_BLOCK = 4096


@dataclass(frozen=True)
class ParameterNoise:
    """How one parameter is perturbed: `rank` of its low-rank noise, None for full noise.

    `note` is for the report: why a matrix has full noise.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rank: int | None
    note: str = ""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """`(m, n)`: the first axis, and all others as one (a convolution's kernel)."""
        m = self.shape[0] if self.shape else 1
        return m, self.shape.numel() // max(1, m)


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring members' perturbations, as factors or in full.

    Attributes:
        signs: Sign of each member of a direction: `(1.0,)`, or `(1.0, -1.0)` for pairs.
        factors: Parameter name → `A` `(directions, r, m)` and `B` `(directions, r, n)`, the latter
            scaled by `1/√r`.
        full: Parameter name → `E` `(directions, *shape)`.
    """

    signs: tuple[float, ...]
    factors: Mapping[str, tuple[Tensor, Tensor]]
    full: Mapping[str, Tensor]

    def writer(
        self,
        centre: Mapping[str, Tensor],
        sigma: Mapping[str, float],
        targets: Mapping[str, Tensor],
    ) -> Callable[[int], None]:
        """A function that writes the weights `θ + σ E_i` of the chunk's member `i` into `targets`.

        All that is the same for every member is done here, once.
        """
        low = []
        for name, (left, right) in self.factors.items():
            target, shape = targets[name], (left.shape[2], right.shape[2])
            copy = None if target.is_contiguous() else target
            matrix = target.view(shape) if copy is None else target.new_empty(shape)
            factors = left.mT.unbind(0), right.unbind(0)
            low.append((centre[name].reshape(shape), *factors, sigma[name], matrix, copy))
        full = [
            (centre[name], noise.unbind(0), sigma[name], targets[name])
            for name, noise in self.full.items()
        ]

        def write(index: int) -> None:
            direction, j = divmod(index, len(self.signs))
            sign = self.signs[j]
            for weight, a, b, scale, matrix, copy in low:
                torch.addmm(weight, a[direction], b[direction], alpha=sign * scale, out=matrix)
                if copy is not None:
                    copy.copy_(matrix.view(copy.shape))
            for weight, e, scale, target in full:
                torch.add(weight, e[direction], alpha=sign * scale, out=target)

        return write

    def stacked_weights(self, name: str, centre: Tensor, sigma: float) -> Tensor:
        """All members' `θ + σ E_i` of a parameter with full noise, `(members, *shape)`."""
        noise, signs = self.full[name], self.signs
        out = torch.empty(
            (len(noise), len(signs), *centre.shape), dtype=centre.dtype, device=centre.device
        )
        for j, sign in enumerate(signs):
            torch.add(centre, noise, alpha=sign * sigma, out=out[:, j])
        return out.flatten(0, 1)


class Perturbations(ABC):
    """A generation's perturbations.

    Args:
        population_size: Members `N`.
        signs: Sign of each member of a direction, in the members' order.
    """

    def __init__(self, population_size: int, signs: tuple[float, ...]) -> None:
        self.population_size = population_size
        self.signs = signs

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of noise in the whole generation, kept or not."""

    @abstractmethod
    def chunk(self, start: int, stop: int) -> Chunk:
        """Members `start` to `stop`; both are multiples of `len(signs)`."""

    def select(self, members: Sequence[int]) -> Chunk:
        """Any members, each with a direction of its own unless they are whole pairs in a row."""
        s = len(self.signs)
        first, count = members[0], len(members)
        if first % s == count % s == 0 and members == range(first, first + count):
            return self.chunk(first, first + count)
        everyone = self.chunk(0, self.population_size)
        directions = torch.tensor([index // s for index in members])
        signs = torch.tensor([self.signs[index % s] for index in members])

        def own(noise: Tensor) -> Tensor:
            return noise[directions.to(noise.device)]

        def signed(noise: Tensor) -> Tensor:
            shape = (-1, *[1] * (noise.dim() - 1))
            return own(noise) * signs.to(noise.device, noise.dtype).view(shape)

        factors = {name: (signed(a), own(b)) for name, (a, b) in everyone.factors.items()}
        full = {name: signed(noise) for name, noise in everyone.full.items()}
        return Chunk((1.0,), factors, full)

    def weighted_mean(self, weights: Tensor) -> dict[str, Tensor]:
        r"""Average the perturbations, each times its member's weight.

        Computes $\frac1N\sum_i w_i E_i$ (EGGROLL, arXiv:2511.16652, eq. 6) as one product of the
        stacked factors, $\sum_k c_k A_k B_k^\top$ with $c_k$ the weight of direction $k$: its
        member's, or the difference of its pair's. A block of directions at a time.

        Args:
            weights: Shaped fitnesses, shape `(population_size,)`, dimensionless.

        Returns:
            Parameter name → tensor of that parameter's shape, in float32 at least, at unit
            perturbation scale (σ not applied).
        """
        s, n = len(self.signs), self.population_size
        signs = torch.tensor(self.signs, dtype=weights.dtype, device=weights.device)
        coefficients = (weights.view(-1, s) * signs).sum(dim=1) / n
        total: dict[str, Tensor] = {}
        for start in range(0, len(coefficients), MEAN_BLOCK):
            block = coefficients[start : start + MEAN_BLOCK]
            chunk = self.chunk(start * s, (start + len(block)) * s)
            for name, (left, right) in chunk.factors.items():
                dtype = torch.promote_types(left.dtype, torch.float32)
                a = left.to(dtype) * block.to(dtype)[:, None, None]
                a, b = a.flatten(0, 1), right.to(dtype).flatten(0, 1)
                total[name] = total[name].addmm_(a.T, b) if name in total else a.T @ b
            for name, noise in chunk.full.items():
                dtype = torch.promote_types(noise.dtype, torch.float32)
                part = torch.tensordot(block.to(dtype), noise.to(dtype), dims=1)
                total[name] = total[name].add_(part) if name in total else part
        return total


class DensePerturbations(Perturbations):
    """Perturbations given as a matrix, as a custom algorithm samples them.

    Args:
        matrix: One member a row, `(population_size, D)`.
        parameters: The parameters, in the order of the matrix's columns.
        population_size: Members `N`.

    Raises:
        ConfigurationError: If the matrix has another shape.
    """

    def __init__(
        self, matrix: Tensor, parameters: Sequence[ParameterNoise], population_size: int
    ) -> None:
        super().__init__(population_size, (1.0,))
        expected = (population_size, sum(p.shape.numel() for p in parameters))
        if not isinstance(matrix, Tensor) or matrix.shape != expected:
            came = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else repr(matrix)
            raise ConfigurationError(
                f"sample_perturbations returned {came}: expected a tensor of shape {expected}, a "
                "row for each member and a column for each trained weight"
            )
        self.matrix = matrix
        self.parameters = parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.matrix.nbytes

    def chunk(self, start: int, stop: int) -> Chunk:
        """Members `start` to `stop`."""
        columns = torch.split(
            self.matrix[start:stop], [p.shape.numel() for p in self.parameters], dim=1
        )
        full = {
            p.name: part.to(p.dtype).reshape(stop - start, *p.shape)
            for p, part in zip(self.parameters, columns, strict=True)
        }
        return Chunk(self.signs, {}, full)


class KeyedPerturbations(Perturbations):
    """Gaussian perturbations drawn from a key, low-rank or full for each parameter.

    Args:
        parameters: The parameters to perturb.
        seed: Seed of the run.
        generation: Index of the generation.
        population_size: Members `N`.
        antithetic: Whether members `2k`, `2k + 1` are the pair `±E_k`.
        storage: Memory that the generations of a run hand on; see `Noise`.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterNoise],
        seed: int,
        generation: int,
        population_size: int,
        antithetic: bool,
        storage: dict[str, Tensor],
    ) -> None:
        super().__init__(population_size, (1.0, -1.0) if antithetic else (1.0,))
        self.parameters = parameters
        specs: dict[str, NoiseSpec] = {}
        for p in parameters:
            if p.rank is None:
                specs[p.name] = NoiseSpec(tuple(p.shape), 1.0, p.dtype, p.device)
            else:  # E = A Bᵀ with A ~ N(0, 1) and B ~ N(0, 1/r) has unit variance
                m, n = p.matrix_shape
                specs[f"{p.name}/A"] = NoiseSpec((p.rank, m), 1.0, p.dtype, p.device)
                std = 1 / math.sqrt(p.rank)
                specs[f"{p.name}/B"] = NoiseSpec((p.rank, n), std, p.dtype, p.device)
        self.noise = Noise(seed, generation, specs, population_size // len(self.signs), storage)

    @property
    def nbytes(self) -> int:
        """Bytes of noise in the whole generation, kept or not."""
        return self.noise.nbytes

    def chunk(self, start: int, stop: int) -> Chunk:
        """Members `start` to `stop`; both are multiples of `len(signs)`."""
        s = len(self.signs)
        drawn = self.noise.draw(start // s, stop // s)
        low = [p.name for p in self.parameters if p.rank is not None]
        return Chunk(
            self.signs,
            {name: (drawn[f"{name}/A"], drawn[f"{name}/B"]) for name in low},
            {p.name: drawn[p.name] for p in self.parameters if p.rank is None},
        )


def ascent_direction(
    perturbations: Perturbations, weights: Tensor, sigma: Mapping[str, float]
) -> dict[str, Tensor]:
    r"""The ES estimate handed to the optimizer: $g = \sqrt N \cdot \frac1N \sum_i w_i \sigma E_i$.

    The scale is that of the reference implementation of EGGROLL (arXiv:2511.16652): with z-scored
    weights and SGD, a step in pure noise moves each weight by about `learning_rate · σ`, whatever
    `N` and the rank are. The paper's own step size is `α = learning_rate · σ · √N`.

    Args:
        perturbations: The generation's perturbations, unit variance.
        weights: Shaped fitnesses, `(population_size,)`, dimensionless.
        sigma: Parameter name → σ, in units of the weights.

    Returns:
        Parameter name → direction of ascent, in units of the weights.
    """
    scale = math.sqrt(perturbations.population_size)
    return {
        name: mean.mul_(scale * sigma[name])
        for name, mean in perturbations.weighted_mean(weights).items()
    }
