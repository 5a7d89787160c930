"""Shaping: raw fitnesses → the weights of the update.

A weight is dimensionless. Equal fitnesses get equal weights, and a generation (or group) in which
all are equal gets weights of exactly zero. All shapings ignore the fitness's scale and offset.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import ConfigurationError, FitnessError, PopulationSizeError

Shaping = Callable[[Tensor], Tensor]


def standardize(fitnesses: Tensor, group_size: int = 0) -> Tensor:
    r"""Z-scores: $w_i = (f_i - \bar f) / \operatorname{std}(f)$, with the population's own std.

    With groups, $\bar f$ is the mean of the member's group and the deviation stays that of the
    whole population about its own mean: a group whose members hardly differ then weighs little
    (the reference implementation of EGGROLL, arXiv:2511.16652).

    Args:
        fitnesses: Finite raw fitnesses, `(population_size,)`.
        group_size: Members of a group; 0 for one group of all.

    Returns:
        Weights, `(population_size,)`.
    """
    grouped = fitnesses.view(-1, group_size or len(fitnesses))
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    # A mean of equal numbers may be off by rounding, and the std then be rounding alone.
    equal = grouped.amax(dim=1, keepdim=True) == grouped.amin(dim=1, keepdim=True)
    centred = centred.masked_fill(equal, 0.0).view(-1)
    deviation = fitnesses - fitnesses.mean()
    scale = deviation.abs().amax()  # the square of a large fitness would overflow
    std = scale * (deviation / scale).std(correction=0)
    return torch.where(std > 0, centred / std, torch.zeros_like(centred))


def centered_rank(fitnesses: Tensor, group_size: int = 0) -> Tensor:
    r"""Ranks within the group, from −½ (worst) to ½ (best); equal fitnesses share their mean rank.

    Args:
        fitnesses: Finite raw fitnesses, `(population_size,)`.
        group_size: Members of a group; 0 for one group of all.

    Returns:
        Weights, `(population_size,)`.
    """
    grouped = fitnesses.view(-1, group_size or len(fitnesses))
    ordered = grouped.sort(dim=1).values
    below = torch.searchsorted(ordered, grouped.contiguous())
    not_above = torch.searchsorted(ordered, grouped.contiguous(), right=True)
    mean_rank = (below + not_above - 1).to(fitnesses.dtype) / 2
    return (mean_rank / max(1, grouped.shape[1] - 1) - 0.5).view(-1)


def raw(fitnesses: Tensor, group_size: int = 0) -> Tensor:
    """No shaping: the fitnesses themselves."""
    return fitnesses


def top_directions(share: float) -> Shaping:
    r"""Only the best antithetic pairs count, and their own deviation is the scale (ARS).

    A pair is as good as the better one of its two members. With $b$ pairs kept of $N$ members, the
    weights are $w_i = \sqrt{N / 2b} \, (f_i - \bar f) / \operatorname{std}(f)$ over the kept
    ones, and 0 for the others: so a step in pure noise is as long as with `standardize`. ARS's own
    step size (arXiv:1803.07055, section 3) is `α = learning_rate · σ · √(b / 2)`.

    Args:
        share: Of the pairs that are kept, above 0 and at most 1. For `noise_reuse=2` alone.

    Returns:
        A shaping: fitnesses to weights, `(population_size,)`.
    """
    if not 0 < share <= 1:
        raise ConfigurationError(f"share={share}: expected a number above 0 and at most 1")

    def shape(fitnesses: Tensor) -> Tensor:
        pairs = fitnesses.view(-1, 2)
        kept = max(1, round(share * len(pairs)))
        best = pairs.amax(dim=1).topk(kept).indices
        weights = torch.zeros_like(pairs)
        weights[best] = standardize(pairs[best].view(-1)).view(-1, 2) * (len(pairs) / kept) ** 0.5
        return weights.view(-1)

    shape.__qualname__ = f"top_directions({share:g})"  # what settings that are written down say
    return shape


SHAPINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "standardize": standardize,
    "centered_rank": centered_rank,
    "raw": raw,
}


def make_shaping(shaping: str | Shaping, group_size: int) -> Shaping:
    """The function `(population_size,) → (population_size,)` that `shaping` names or is."""
    if isinstance(shaping, str):
        if shaping not in SHAPINGS:
            names = ", ".join(map(repr, SHAPINGS))
            raise ConfigurationError(f"shaping={shaping!r}: expected one of {names}, or a callable")
        named = SHAPINGS[shaping]
        return lambda fitnesses: named(fitnesses, group_size)
    if not callable(shaping):
        raise ConfigurationError(f"shaping={shaping!r}: expected a name or a callable (N,) → (N,)")
    own = shaping

    def checked(fitnesses: Tensor) -> Tensor:
        weights = torch.as_tensor(own(fitnesses), device=fitnesses.device)
        if weights.shape != fitnesses.shape:
            raise PopulationSizeError(
                f"shaping returned shape {tuple(weights.shape)}: expected one weight for each "
                f"member, shape {tuple(fitnesses.shape)}"
            )
        if not bool(weights.isfinite().all()):
            raise FitnessError("shaping returned weights that are not finite: expected finite ones")
        return weights

    return checked


def replace_nonfinite(fitnesses: Tensor, group_size: int) -> Tensor:
    """NaN and ±inf count as the worst finite fitness of their group, or of all if it has none."""
    finite = fitnesses.isfinite()
    large = torch.where(finite, fitnesses, torch.inf)
    size = group_size or len(fitnesses)
    worst = large.view(-1, size).amin(dim=1)
    worst = torch.where(worst.isfinite(), worst, large.amin())
    return torch.where(finite, fitnesses, worst.repeat_interleave(size))
