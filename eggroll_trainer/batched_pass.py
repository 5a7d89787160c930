"""`BatchedPass`: what every operation goes through while all members are evaluated at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import decompositions, members, operations
from .convolutions import CONVOLUTIONS
from .lowrank import LowRankTensor, Trace
from .members import is_batched
from .recurrent import RECURRENT


class BatchedPass(TorchFunctionMode):
    """Sees every operation of a batched pass: keeps the trace, steps in where `vmap` would fail.

    Args:
        trace: Where to note the parameters used and the largest tensor.
        full: The parameters with full noise, batched.
    """

    def __init__(self, trace: Trace, full: dict[str, Tensor]) -> None:
        super().__init__()
        self.trace = trace
        self.names = {id(tensor): name for name, tensor in full.items()}
        trace.formed_bytes = sum(tensor.nbytes for tensor in full.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        with self:  # the simpler operations that this one becomes are seen too
            if (body := operations.body(func)) is not None:
                return body(*args, **kwargs)
            batched, low_rank = self._look_at((*args, *kwargs.values()))
            if low_rank:
                return operations.run(func, args, kwargs)
        result: Any = NotImplemented
        if batched and (stand_in := STEP_IN.get(func)) is not None:
            result = stand_in(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, Tensor) and is_batched(leaf):
                self.trace.peak_bytes = max(self.trace.peak_bytes, leaf.nbytes)
        return result

    def _look_at(self, arguments: Any) -> tuple[bool, bool]:
        """Note the use of parameters with full noise; is any argument batched, any a stand-in?"""
        batched = low_rank = False
        for argument in arguments:
            if isinstance(argument, LowRankTensor):
                low_rank = True
            elif isinstance(argument, Tensor):
                batched = batched or is_batched(argument)
                if id(argument) in self.names:
                    self.trace.used.add(self.names[id(argument)])
            elif isinstance(argument, (tuple, list)):
                inner = self._look_at(argument)
                batched, low_rank = batched or inner[0], low_rank or inner[1]
        return batched, low_rank


def _item(tensor: Tensor) -> Any:
    """`.item()` of a tensor that differs from member to member: the tensor goes on in its place.

    As a Python number would, it counts in double precision.
    """
    if tensor.numel() != 1:
        return tensor.item()  # raises
    tensor = tensor.reshape(())
    return tensor.double() if tensor.is_floating_point() else tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0:  # each member's own mask, or one for all: vmap's dropout knows
        return decompositions.attention_with_dropout(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    return members.attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


# Operations for which `vmap` has no rule, or a slow one.
STEP_IN: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.item: _item,
    F.scaled_dot_product_attention: _attention,
    F.bilinear: decompositions.bilinear,
    torch._C._nn.cross_entropy_loss: decompositions.cross_entropy,
    **dict.fromkeys((torch.softmax, Tensor.softmax), decompositions.softmax),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), decompositions.log_softmax),
    torch._weight_norm: decompositions.weight_norm,
    torch.layer_norm: decompositions.layer_norm,
    torch.group_norm: decompositions.group_norm,
    torch.batch_norm: decompositions.batch_norm,
    torch.embedding_bag: decompositions.embedding_bag,
    torch._pack_padded_sequence: decompositions.pack_padded_sequence,
    torch._pad_packed_sequence: decompositions.pad_packed_sequence,
    **CONVOLUTIONS,
    **RECURRENT,
}
