"""Policies for simulators: plain modules from observations to actions.

Any module will do as a policy. These bring what most of them need: observations brought to unit
scale, bounded actions, a memory, and a file that holds all of it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import checkpoint
from .errors import CheckpointError, ConfigurationError

Bounds = float | Sequence[float] | np.ndarray[Any, Any]  # one for each number, or for all


class Normalize(nn.Module):
    """Bring observations to mean 0 and variance 1, by statistics of those seen so far.

    The statistics are buffers: they are saved with the model, and no trainer perturbs them. They
    change between generations only, when a fitness calls `merge` (`EpisodeReturn` does); so all
    members of a generation, and an evaluation, see the same ones. This is the normalisation of ARS
    (arXiv:1803.07055, section 3.2).

    Args:
        size: Numbers in an observation.
        clip: Bound of what comes out, in standard deviations: 10 leaves what is ordinary alone and
            stops what was never seen before.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))

    def forward(self, observation: Tensor) -> Tensor:
        """`(…, size)` → `(…, size)`."""
        scale = self.variance.clamp(min=1e-8).rsqrt().to(observation.dtype)
        scaled = (observation - self.mean.to(observation.dtype)) * scale
        return scaled.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def merge(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Take in the statistics of more observations (Chan, Golub and LeVeque, 1979).

        Args:
            count: How many.
            mean: Their mean, `(size,)`.
            variance: Their variance, `(size,)`: the mean square of the distance from the mean.
        """
        if count == 0:
            return
        total = self.count + count
        share, distance = count / total, mean - self.mean
        old = self.variance if self.count > 0 else torch.zeros_like(self.variance)
        between = distance.square() * share * (1 - share)
        self.variance.copy_(old * (1 - share) + variance * share + between)
        self.mean.add_(distance * share)
        self.count.copy_(total)


class Clip(nn.Module):
    """Any numbers to `low … high`, by cutting off what is beyond.

    Args:
        low: Lower bounds, one for each number or one for all.
        high: Upper bounds.
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Bounds, high: Bounds) -> None:
        super().__init__()
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        if not bool((self.low < self.high).all()):
            raise ConfigurationError(f"low={low}, high={high}: expected low < high")

    def forward(self, x: Tensor) -> Tensor:
        """`(…, size)` → `(…, size)`."""
        return x.clamp(self.low, self.high)


class Squash(Clip):
    """Any numbers to finite `low … high`, by tanh; 0 goes to the middle."""

    def __init__(self, low: Bounds, high: Bounds) -> None:
        super().__init__(low, high)
        if not bool((self.high - self.low).isfinite().all()):
            raise ConfigurationError(f"low={low}, high={high}: expected finite bounds")

    def forward(self, x: Tensor) -> Tensor:
        """`(…, size)` → `(…, size)`."""
        return self.low + (self.high - self.low) * (x.tanh() + 1) / 2


class RecurrentPolicy(nn.Module, ABC):
    """A policy with a memory: `forward(observation, state) -> (action, state)`.

    Subclass it and say what the state is at the beginning of an episode.
    """

    @abstractmethod
    def initial_state(self, rows: int) -> Any:
        """The state of so many episodes: any nesting of tensors `(rows, …)`."""


class Policy(RecurrentPolicy):
    """Observations to actions: linear, MLP or recurrent, saved whole.

    Args:
        observation_size: Numbers in an observation.
        action_size: Numbers in an action, or discrete actions to choose from.
        hidden: Widths of hidden layers; none is a linear policy.
        memory: Width of a recurrent layer (GRU) after the hidden ones; 0 is none.
        low: Lower bounds of the actions, `(action_size,)` or one for all; None leaves them open.
        high: Upper bounds.
        squash: Bounds are kept by tanh; else actions beyond them are cut off.
        normalize: Bring observations to unit scale by statistics of those seen.
        discrete: Actions are chosen by the largest output.

    The last layer begins at zero, so that perturbations alone tell the first members apart.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int] = (64, 64),
        memory: int = 0,
        low: Bounds | None = None,
        high: Bounds | None = None,
        squash: bool = True,
        normalize: bool = True,
        discrete: bool = False,
    ) -> None:
        super().__init__()
        if (low is None) != (high is None):
            raise ConfigurationError(f"low={low}, high={high}: give both bounds, or none")
        self.settings = {
            "observation_size": observation_size,
            "action_size": action_size,
            "hidden": list(hidden),
            "memory": memory,
            "low": low if low is None else np.asarray(low, dtype=float).tolist(),
            "high": high if high is None else np.asarray(high, dtype=float).tolist(),
            "squash": squash,
            "normalize": normalize,
            "discrete": discrete,
        }
        self.normalize = Normalize(observation_size) if normalize else nn.Identity()
        layers: list[nn.Module] = []
        widths = [observation_size, *hidden]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.hidden = nn.Sequential(*layers)
        self.memory = nn.GRUCell(widths[-1], memory) if memory else None
        self.head = nn.Linear(memory or widths[-1], action_size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        bounds = Squash if squash else Clip
        self.bounds = nn.Identity() if low is None or high is None else bounds(low, high)
        self.discrete = discrete
        self._state: Any = None  # of the episode that `act` is in

    def initial_state(self, rows: int) -> Any:
        """Zeros `(rows, memory)`; nothing without a memory."""
        if self.memory is None:
            return ()
        return (self.head.weight.new_zeros(rows, self.memory.hidden_size),)

    def forward(self, observation: Tensor, state: Any = ()) -> Any:
        """`(rows, observation_size)` and a state → `(rows, action_size)` and the next state."""
        x = self.hidden(self.normalize(observation))
        if self.memory is not None:
            x = self.memory(x, *state)
            state = (x,)
        return self.bounds(self.head(x)), state

    def begin(self) -> None:
        """Begin an episode of `act`: forget the last one."""
        self._state = None

    @torch.no_grad()
    def act(self, observation: Any) -> Any:
        """One observation `(observation_size,)` to an action, as gymnasium takes it.

        A recurrent policy remembers from call to call: call `begin()` with each `env.reset()`.
        """
        weight = self.head.weight
        x = torch.as_tensor(observation, dtype=weight.dtype, device=weight.device).reshape(1, -1)
        if self._state is None:
            self._state = self.initial_state(1)
        output, self._state = self(x, self._state)
        return int(output.argmax()) if self.discrete else output[0].cpu().numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings, weights and statistics to a file."""
        checkpoint.write({"policy": self.settings, "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """The policy of a file of `save()`.

        Raises:
            CheckpointError: If it is none.
        """
        saved = checkpoint.read(path, torch.device("cpu"))
        if "policy" not in saved:
            raise CheckpointError(f"{path} holds no policy: expected a file of Policy.save()")
        policy = cls(**saved["policy"])
        policy.load_state_dict(saved["weights"])
        return policy
