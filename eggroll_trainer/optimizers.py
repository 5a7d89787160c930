"""Optimizers that torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError


class ClipUp(torch.optim.Optimizer):
    """Momentum over normalised gradients, with a limit on the speed (arXiv:2008.02387).

    The length of the gradient does not matter, so no fitness is too steep for it, and the speed is
    limited, so no step is too long: both in units of the weights. Much used where policies are
    trained by evolution.

    Args:
        params: Parameters, or groups of them. Lengths are taken over each group.
        lr: Length by which a step adds to the velocity, in units of the weights.
        momentum: Share of the velocity that is kept from step to step.
        max_speed: Limit on the length of a step; None is twice `lr`, as the paper recommends.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> def fitness(model):
        ...     return -model.weight.square().sum()
        >>> trainer = EGGROLLTrainer([model.weight], model, fitness, optimizer=ClipUp)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        max_speed: float | None = None,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or (max_speed is not None and max_speed <= 0):
            raise ConfigurationError(
                f"lr={lr}, momentum={momentum}, max_speed={max_speed}: expected lr from 0 on, "
                "momentum from 0 to below 1, max_speed above 0"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "max_speed": max_speed})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            if not moving:
                continue
            length = _length([p.grad for p in moving])
            velocities = []
            for p in moving:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"])
                if length > 0:
                    velocity.sub_(p.grad, alpha=group["lr"] / length)
                velocities.append(velocity)
            limit = 2 * group["lr"] if group["max_speed"] is None else group["max_speed"]
            if (speed := _length(velocities)) > limit:
                for velocity in velocities:
                    velocity.mul_(limit / speed)
            for p, velocity in zip(moving, velocities, strict=True):
                p.add_(velocity)
        return loss


def _length(tensors: list[Tensor]) -> float:
    """Euclidean, of all together."""
    return float(torch.linalg.vector_norm(torch.stack([t.float().norm() for t in tensors])))
