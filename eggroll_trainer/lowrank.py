"""`LowRankTensor`: a parameter's stand-in that holds `W`, `A`, `B` and never forms `A Bᵀ`.

A member's fitness runs with these in the place of the model's matrices; `operations.py` says what
each operation does with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import members
from .errors import NotBatchableError


@dataclass
class Trace:
    """What batched passes did.

    Attributes:
        lazy: (parameter, operation) done without forming a member's weight.
        dense: (parameter, operation) for which each member's weight was formed.
        looped: Operations that torch does for one member after another.
        used: Parameters that an operation has seen.
        peak_bytes: Bytes of the largest tensor that one member computes.
        formed_bytes: Bytes of one member's weights that exist: all with full noise together, or the
            largest that an operation made.
    """

    lazy: set[tuple[str, str]] = field(default_factory=set)
    dense: set[tuple[str, str]] = field(default_factory=set)
    looped: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    peak_bytes: int = 0
    formed_bytes: int = 0

    def merge(self, other: Trace) -> None:
        """Add what another trace has seen."""
        self.lazy |= other.lazy
        self.dense |= other.dense
        self.looped |= other.looped
        self.used |= other.used
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.formed_bytes = max(self.formed_bytes, other.formed_bytes)


class LowRankTensor(torch.Tensor):
    """One member's matrix `W + σ s A Bᵀ`, unformed.

    Args:
        label: The parameter's name, for reports.
        weight: The centre's `W`, `(m, n)`.
        left: Every direction's `A`, `(K, r, m)`.
        right: Every direction's `B`, `(K, r, n)`, scaled by `1/√r`.
        coefficient: The member's `σ s`, 0-d.
        scales: `σ` or `(σ, −σ)`, shape `(s,)`.
        trace: Where to note what is done with it.
        shape: The parameter's own shape where it is a kernel `(m, …)` seen as a matrix, or a
            matrix with leading axes of an `expand`; `(m, n)` by default.
    """

    label: str
    weight: Tensor
    left: Tensor
    right: Tensor
    coefficient: Tensor
    scales: Tensor
    seen: Trace

    @staticmethod
    def __new__(  # noqa: D102 - the class documents it
        cls,
        label: str,
        weight: Tensor,
        left: Tensor,
        right: Tensor,
        coefficient: Tensor,
        scales: Tensor,
        trace: Trace,
        shape: torch.Size | None = None,
    ) -> LowRankTensor:
        self: LowRankTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape or weight.shape, dtype=weight.dtype, device=weight.device
        )
        self.label, self.weight, self.left, self.right = label, weight, left, right
        self.coefficient, self.scales, self.seen = coefficient, scales, trace
        return self

    @property
    def is_matrix(self) -> bool:
        """Whether the last two axes are the matrix's own: no kernel of a convolution."""
        return self.shape[-2:] == self.weight.shape

    def derive(
        self, weight: Tensor, left: Tensor, right: Tensor, shape: torch.Size | None = None
    ) -> LowRankTensor:
        """The same member's noise over another view of the matrix."""
        return LowRankTensor(
            self.label, weight, left, right, self.coefficient, self.scales, self.seen, shape
        )

    def own_left(self) -> Tensor:
        """The member's own `A`, `(r, m)`."""
        return members.own_factor(self.coefficient, self.left)

    def own_right(self) -> Tensor:
        """The member's own `B`, `(r, n)`."""
        return members.own_factor(self.coefficient, self.right)

    def dense(self) -> Tensor:
        """The member's weight, formed: for operations that have no lazy form."""
        matrix = self.weight + self.coefficient * (self.own_left().mT @ self.own_right())
        return matrix.expand(self.shape) if self.is_matrix else matrix.view(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached outside a batched pass only: inside, the pass sees every operation first."""
        raise NotBatchableError(
            f"{torch.overrides.resolve_name(func)} was called on a low-rank weight that has left "
            "the pass it was made for"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never reached by an operation that goes through torch's Python API."""
        raise NotBatchableError(f"{func} reached a low-rank weight behind torch's Python API")


# What can be asked of a stand-in as of any tensor.
_ATTRIBUTES = (
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn"),
    *("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested"),
    *("itemsize", "nbytes"),
)
METADATA = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
    *(Tensor.get_device, Tensor.__len__, Tensor.__hash__, torch.numel, torch.is_floating_point),
    *(torch.is_complex, torch.is_tensor),
}
