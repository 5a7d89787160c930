"""Operations written out in simpler ones, where `vmap` has no rule for torch's own kernel.

The numbers are those of torch's kernels, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import members

# torch's softmaxes on a CPU take rows of at least this many numbers 16 at once, and shorter ones a
# number at a time.
SHORT_ROW = 16


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.embedding_bag` (0 sum, 1 mean, 2 maximum) as look-up and reduction by bag."""
    bags = len(offsets) - include_last_offset
    positions = torch.arange(len(indices), device=indices.device)
    bag = torch.searchsorted(offsets[:bags].contiguous(), positions, right=True) - 1
    if padding_idx is not None and padding_idx >= 0:  # goes into a bag that is thrown away
        bag = torch.where(indices == padding_idx, bags, bag)
    rows = F.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    total = torch.zeros(bags + 1, rows.shape[-1], dtype=rows.dtype, device=rows.device)
    if mode == 2:
        places = bag[:, None].expand_as(rows)
        total = total.scatter_reduce(0, places, rows, "amax", include_self=False)
    else:
        total = total.index_add(0, bag, rows)
    sizes = torch.bincount(bag, minlength=bags + 1)[:bags].to(rows.dtype)
    total = total[:bags] / sizes.clamp(min=1)[:, None] if mode == 1 else total[:bags]
    return total, bag, sizes, sizes


def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """`torch._pack_padded_sequence`: the rows that exist, step by step, and how many in each."""
    steps = input.transpose(0, 1) if batch_first else input
    exists = torch.arange(int(lengths.max()))[:, None] < lengths
    step, row = (index.to(input.device) for index in exists.nonzero(as_tuple=True))
    return steps[step, row], exists.sum(dim=1)


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    """`torch._pad_packed_sequence`, the inverse of `pack_padded_sequence`."""
    exists = torch.arange(int(batch_sizes[0])) < batch_sizes[:, None]
    step, row = (index.to(data.device) for index in exists.nonzero(as_tuple=True))
    shape = (max(len(batch_sizes), total_length), exists.shape[1], *data.shape[1:])
    padded = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    padded = padded.index_put((step, row), data)
    return padded.transpose(0, 1) if batch_first else padded, exists.sum(dim=0)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.bilinear` as two products; `weight` is `(out, in1, in2)`."""
    left, right = input1.reshape(-1, input1.shape[-1]), input2.reshape(-1, input2.shape[-1])
    products = (weight.flatten(0, 1) @ right.T).view(*weight.shape[:2], -1)  # (out, in1, B)
    out: Tensor = (products * left.T).sum(dim=1).T.reshape(*input1.shape[:-1], -1)
    return out if bias is None else out + bias


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The kernel behind `torch.nn.utils.parametrizations.weight_norm`: `g · v / |v|`."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    scale: Tensor = g / torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    return v * scale


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`scaled_dot_product_attention` written out, for random masks that `vmap` can draw."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, dim=-3) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.mT
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(dim=-1), dropout_p) @ value


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *options: Any,
) -> Tensor:
    """`torch.layer_norm`, its scale and shift in place, where `vmap` makes two more tensors."""
    return _affine(torch.layer_norm(input, normalized_shape, None, None, *options), weight, bias)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *options: Any,
) -> Tensor:
    """`torch.group_norm`, its scale and shift in place."""
    ones = (-1, *[1] * (input.dim() - 2))
    weight, bias = (None if t is None else t.view(ones) for t in (weight, bias))
    return _affine(torch.group_norm(input, num_groups, None, None, *options), weight, bias)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """`torch.batch_norm`; with fixed statistics, it is one scale and shift."""
    if training or running_mean is None or running_var is None:
        options = (training, momentum, eps, cudnn_enabled)
        return torch.batch_norm(input, weight, bias, running_mean, running_var, *options)
    ones = (-1, *[1] * (input.dim() - 2))
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    return _affine(input * scale.view(ones), None, shift.view(ones))


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`normal * weight + bias`, into `normal` itself where that is a member's own."""
    for other, fresh, in_place in (
        (weight, torch.mul, Tensor.mul_),
        (bias, torch.add, Tensor.add_),
    ):
        if other is not None:
            operation = in_place if members.is_batched(normal) else fresh
            normal = operation(normal, other)
    return normal


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Any:
    """`cross_entropy_loss` of labels, with our `log_softmax`."""
    if label_smoothing or target.is_floating_point() or input.dim() > 2:
        return NotImplemented
    logs = log_softmax(input, input.dim() - 1)
    if logs is NotImplemented:
        return logs
    return torch.ops.aten.nll_loss_nd(logs, target, weight, reduction, ignore_index)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """`torch.log_softmax` of short rows."""
    return _of_short_rows(torch.log_softmax, input, dim, dtype)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """`torch.softmax` of short rows."""
    return _of_short_rows(torch.softmax, input, dim, dtype)


def _of_short_rows(function: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    """Rows padded to a length that torch has a fast way for: five times as fast for 10 classes."""
    last = input.dim() - 1
    if not input.is_cpu or dim not in (-1, last) or last < 0 or input.shape[-1] >= SHORT_ROW:
        return NotImplemented
    length = input.shape[-1]
    padded = F.pad(input, (0, SHORT_ROW - length), value=-torch.inf)
    return function(padded, dim, dtype=dtype).narrow(-1, 0, length)
