"""`Centre`: the parameters that are trained, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .checks import (
    check_callable,
    check_number,
    check_optimizer,
    make_groups,
    name_parameters,
)
from .errors import ConfigurationError

Sigma = float | Callable[[int], float]
LOW_PRECISION = (torch.bfloat16, torch.float16)


class Centre:
    """The trained parameters of a model, by name, in place; their σ, optimizer and scheduler.

    A step is a small fraction of a weight, which bfloat16 and float16 would round away: parameters
    of these types have a *master* in float32, which the optimizer moves and they are copied from.

    Args:
        params: As for `ESTrainer`.
        model: The module that owns them.
        device: Where they must be, or None.
        learning_rate: Of groups that have none of their own.
        sigma: Of groups that have none of their own; a number or a function of the generation.
        optimizer: Class or factory, called as `optimizer(groups, lr=…)`.
        lr_scheduler: Factory of a scheduler from the optimizer, or None.

    Attributes:
        parameters: Name → parameter, in the order of `params`.
        masters: Name → float32 parameter, of those of lower precision.
        optimizer: The torch optimizer. Each of its groups has a `sigma` beside its `lr`.
        lr_scheduler: The torch scheduler, or None.
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        device: torch.device | str | None,
        learning_rate: float,
        sigma: Sigma,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    ) -> None:
        self._groups = make_groups(params)
        self.parameters = name_parameters(self._groups, model, device)
        self._schedules: list[Sigma] = [group.get("sigma", sigma) for group in self._groups]
        for group, value in zip(self._groups, self._schedules, strict=True):
            group["sigma"] = check_number("sigma", value(0) if callable(value) else value)
            group["lr"] = check_number("learning_rate", group.get("lr", learning_rate))
        self._make_optimizer = check_callable("optimizer", optimizer, "an optimizer class")
        self._make_scheduler = lr_scheduler
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    def reset(self) -> None:
        """A new optimizer and scheduler; the parameters stay as they are."""
        self.masters = {
            name: nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
            if p.dtype in LOW_PRECISION
        }
        moved = {id(p): self.masters.get(name, p) for name, p in self.parameters.items()}
        groups = [
            {**group, "params": [moved[id(p)] for p in group["params"]]} for group in self._groups
        ]
        self.optimizer = check_optimizer(self._make_optimizer(groups, lr=groups[0]["lr"]))
        self.lr_scheduler = self._make_scheduler(self.optimizer) if self._make_scheduler else None

    def apply_schedules(self, generation: int) -> None:
        """Set the σ of the groups whose σ is a function of the generation."""
        for group, sigma in zip(self.optimizer.param_groups, self._schedules, strict=True):
            if callable(sigma):
                group["sigma"] = check_number("sigma", sigma(generation))

    def setting(self, key: str) -> dict[str, Any]:
        """Parameter name → its group's `key` (such as `"sigma"`) now."""
        names = {id(p): name for name, p in (*self.parameters.items(), *self.masters.items())}
        groups = self.optimizer.param_groups
        return {names[id(p)]: group[key] for group in groups for p in group["params"]}

    def step(self, update: Mapping[str, Tensor]) -> None:
        """One step of the optimizer and the scheduler along an update.

        Optimizers descend, so the gradient is the update's negative. A parameter that the update
        does not name has no gradient, and so is not touched, by weight decay neither.
        """
        self._refresh_masters()
        try:
            for name, direction in update.items():
                parameter = self.masters.get(name, self.parameters[name])
                parameter.grad = direction.neg().to(parameter.dtype).view(parameter.shape)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.write({name: self.masters[name] for name in update if name in self.masters})
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _refresh_masters(self) -> None:
        """Take over what the user has written into the parameters since the last step."""
        with torch.no_grad():
            for name, master in self.masters.items():
                parameter = self.parameters[name]
                same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(same, master, parameter.float()))

    def flat(self, names: list[str]) -> Tensor:
        """The named parameters as one vector: a copy."""
        return torch.cat([self.parameters[name].detach().reshape(-1) for name in names])

    def split(self, flat: Any, names: list[str]) -> dict[str, Tensor]:
        """A vector over the named parameters → name → its part, in the parameter's shape."""
        shapes = [self.parameters[name].shape for name in names]
        sizes = [shape.numel() for shape in shapes]
        if not isinstance(flat, Tensor) or flat.shape != (sum(sizes),):
            came = f"shape {tuple(flat.shape)}" if isinstance(flat, Tensor) else type(flat).__name__
            raise ConfigurationError(
                f"one number for each trained weight was expected, a tensor of shape "
                f"({sum(sizes)},), and came as {came}"
            )
        parts = torch.split(flat, sizes)
        return {name: p.view(s) for name, p, s in zip(names, parts, shapes, strict=True)}

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write into the parameters in place: storage, dtype and strides are kept."""
        with torch.no_grad():
            for name, weight in weights.items():
                self.parameters[name].copy_(weight)
