r"""Convolutions of a whole chunk of members, low-rank and dense.

A kernel `(out, in/groups, *k)` seen as a matrix has low-rank noise $A B^\top$ with `A` `(r, out)`
and `B` `(r, in/groups · k…)`: `r` filters of the member's own, mixed into its outputs by a 1×1
convolution. The filters are applied as one product over the channels, giving a map for each of the
kernel's places, and a sum of shifted maps: on a CPU far faster than a grouped convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import members
from .lowrank import LowRankTensor

Size = Sequence[int]


def _each(value: Any, axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else [*value] * (axes // len(value))


def _pad(x: Tensor, padding: Any, kernel: Size, dilation: Size) -> tuple[Tensor, list[int]]:
    """`padding` as numbers, alike on both sides; what "same" has on one side only is added here."""
    if padding == "valid":
        return x, [0] * len(kernel)
    if padding != "same":
        return x, _each(padding, len(kernel))
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    extra = [side for t in reversed(total) for side in (0, t % 2)]
    return (F.pad(x, extra) if any(extra) else x), [t // 2 for t in total]


def convolution(axes: int) -> Callable[..., Any]:
    """`torch.conv1d`, `conv2d` or `conv3d` inside a batched pass."""

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(input, LowRankTensor):
            return NotImplemented
        out: Tensor
        batch = input if input.dim() == axes + 2 else input.unsqueeze(0)
        stride, dilation = _each(stride, axes), _each(dilation, axes)
        batch, padding = _pad(batch, padding, weight.shape[2:], dilation)
        if isinstance(weight, LowRankTensor):
            w, kernel = weight, weight.weight.view(weight.shape)
            factors = (w.coefficient, kernel, w.left, w.right, w.scales)
            out = _OPS.lowrank_convolution(batch, *factors, bias, stride, padding, dilation, groups)
        else:
            options = (stride, padding, dilation, False, [0] * axes, groups)
            out = _OPS.convolution(batch, weight, bias, *options)
        return out if input.dim() == axes + 2 else out.squeeze(0)

    return conv


def transposed_convolution(axes: int) -> Callable[..., Any]:
    """`torch.conv_transpose1d`, `2d` or `3d` inside a batched pass."""

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if isinstance(input, LowRankTensor):
            return NotImplemented
        out: Tensor
        batch = input if input.dim() == axes + 2 else input.unsqueeze(0)
        sizes = [_each(size, axes) for size in (stride, padding, dilation)]
        options = (*sizes, True, _each(output_padding, axes), groups)
        if isinstance(weight, LowRankTensor):
            out = _lowrank_transposed(batch, weight, bias, options, groups)
        else:
            out = _OPS.convolution(batch, weight, bias, *options)
        return out if input.dim() == axes + 2 else out.squeeze(0)

    return conv


def _lowrank_transposed(
    x: Tensor, weight: LowRankTensor, bias: Tensor | None, options: Any, groups: int
) -> Tensor:
    """The other way round: `A`, over the inputs here, as a 1×1 convolution, then filters `B`."""
    kernel, ones = weight.shape[1:], [1] * (weight.dim() - 2)
    left = weight.own_left() * weight.coefficient  # (r, in)
    mix = left.view(len(left), groups, -1).transpose(0, 1).reshape(len(left) * groups, -1, *ones)
    zeros = [0] * len(ones)
    projected = _OPS.convolution(x, mix, None, ones, zeros, ones, False, zeros, groups)
    filters = weight.own_right().view(-1, *kernel).repeat(groups, *[1] * len(kernel))
    centre = _OPS.convolution(x, weight.weight.view(weight.shape), bias, *options)
    out: Tensor = centre + _OPS.convolution(projected, filters, None, *options)
    return out


def _convolution_rule(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Any, *options: Any
) -> tuple[Tensor, int]:
    m, groups = info.batch_size, options[-1]
    if bias is not None:
        bias = bias.movedim(in_dims[2], 0) if in_dims[2] is not None else bias.expand(m, -1)
    if in_dims[1] is None:  # one kernel for all: members are more batch
        x = x.expand(m, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        out = _OPS.convolution(x.flatten(0, 1), weight, None, *options)
        out = out.view(*x.shape[:2], *out.shape[1:])
        if bias is not None:
            out += bias.view(m, 1, -1, *[1] * (out.dim() - 3))
        return out, 0
    weight = weight.movedim(in_dims[1], 0)
    if in_dims[0] is None and groups == 1 and not options[3]:  # members are more outputs
        flat = None if bias is None else bias.flatten()
        return _OPS.convolution(x, weight.flatten(0, 1), flat, *options).unflatten(1, (m, -1)), 1
    x = x.expand(m, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if x.device.type != "cpu":
        return _grouped(x, weight, bias, *options), 0
    # On a CPU a loop, over nothing but this: its kernels for groups are slower.
    biases = itertools.repeat(None) if bias is None else bias
    own = zip(x, weight, biases, strict=False)
    return torch.stack([_OPS.convolution(*member, *options) for member in own]), 0


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Every member's own kernel, as one convolution in groups."""
    m, (*rest, groups) = len(weight), options
    folded = x.transpose(0, 1).flatten(1, 2)  # (B, M · in, …)
    flat = None if bias is None else bias.flatten()
    out: Tensor = _OPS.convolution(folded, weight.flatten(0, 1), flat, *rest, m * groups)
    return torch.unflatten(out, 1, (m, -1)).transpose(0, 1)


def _lowrank_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    coefficient: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
) -> tuple[Tensor, int]:
    geometry = (stride, padding, dilation)
    plain = (*geometry, False, [0] * len(stride), groups)
    if in_dims[1] is None:  # the user's own vmap, inside ours
        x = x.movedim(in_dims[0] or 0, 0)
        factors = (coefficient, weight, left, right, scales, bias)
        out = _OPS.lowrank_convolution(x.flatten(0, 1), *factors, *geometry, groups)
        return out.view(*x.shape[:2], *out.shape[1:]), 0
    if bias is not None:
        bias = (
            bias.expand(info.batch_size, -1) if in_dims[6] is None else bias.movedim(in_dims[6], 0)
        )
    (k, r, _), s = right.shape, len(scales)
    filters = right.view(k, r, *weight.shape[1:])
    if in_dims[0] is None:
        out = _OPS.convolution(x, weight, None, *plain)
        out = out.expand(k * s, *out.shape).contiguous()  # (M, B, out, …)
        projected = _shared_filters(x, filters, plain)  # (K, B, groups, r, …)
        projected = projected.unsqueeze(1).expand(-1, s, *projected.shape[1:])
    else:
        x = x.movedim(in_dims[0], 0)
        out = _OPS.convolution(x.flatten(0, 1), weight, None, *plain).contiguous()
        out = out.view(*x.shape[:2], *out.shape[1:])
        projected = _own_filters(x, filters, *geometry, groups)  # (M, B, groups, r, …)
        projected = projected.view(k, s, *projected.shape[1:])
    _mix(out, projected, left, scales, bias)
    return out, 0


def _mix(out: Tensor, projected: Tensor, left: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Add `± σ A (B x) + bias` to `out` `(M, B, out, …)`, in one pass over it.

    `projected` is `B x`, `(K, s, B, groups, r, …)`; the bias is one more factor, of ones.
    """
    k, s, batch, groups, r = projected.shape[:5]
    signed = projected.flatten(5) * scales.view(s, 1, 1, 1, 1)
    mixer = left.view(k, 1, 1, r, groups, -1).permute(0, 1, 2, 4, 5, 3)  # (K, 1, 1, g, out/g, r)
    mixer = mixer.expand(-1, s, batch, -1, -1, -1)
    if bias is not None:
        column = bias.view(k, s, 1, groups, -1, 1).expand(-1, -1, batch, -1, -1, -1)
        mixer = torch.cat([mixer, column], dim=-1)
        signed = F.pad(signed, (0, 0, 0, 1), value=1.0)
    mixer = mixer.reshape(k * s * batch * groups, -1, mixer.shape[-1])
    signed = signed.reshape(len(mixer), mixer.shape[-1], -1)
    out.view(len(mixer), mixer.shape[1], -1).baddbmm_(mixer, signed)


def _shared_filters(x: Tensor, filters: Tensor, options: tuple[Any, ...]) -> Tensor:
    """Every direction's filters on the same inputs: filters are more outputs of one convolution."""
    k, r, groups = *filters.shape[:2], options[-1]
    every = filters.flatten(0, 1)  # the same filters for each group of inputs
    every = every.repeat(groups, *[1] * (every.dim() - 1))
    out: Tensor = _OPS.convolution(x, every, None, *options)
    return torch.unflatten(out, 1, (groups, k, r)).movedim(2, 0)


def _own_filters(
    x: Tensor, filters: Tensor, stride: Size, padding: Size, dilation: Size, groups: int
) -> Tensor:
    """Each member's filters `(K, r, in/g, *k)` on its own inputs `(M, B, in, …)`."""
    k, r, channels, *kernel = filters.shape
    if any(padding):
        x = F.pad(x, [side for p in reversed(padding) for side in (p, p)])
    space = x.shape[3:]
    places = (
        filters.flatten(3).permute(0, 3, 1, 2).reshape(k, -1, channels)
    )  # (K, places · r, in/g)
    rows = x.reshape(k, -1, channels, space.numel())  # (K, s · B · g, in/g, …)
    maps = torch.matmul(places.unsqueeze(1), rows)
    maps = maps.view(*x.shape[:2], groups, -1, r, *space)
    total: Tensor | None = None
    offsets = itertools.product(*[range(n) for n in kernel])
    for place, offset in enumerate(offsets):
        slices = [
            slice(o * d, o * d + n - d * (size - 1), step)
            for o, d, n, size, step in zip(offset, dilation, space, kernel, stride, strict=True)
        ]
        window: tuple[Any, ...] = (..., *slices)
        shifted = maps[:, :, :, place][window]
        total = shifted.clone() if total is None else total.add_(shifted)
    assert total is not None
    return total


members.define(
    "convolution",
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups) -> Tensor",
    _convolution_rule,
    torch.convolution,
)
members.define(
    "lowrank_convolution",
    f"(Tensor x, {members.LOWRANK}, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor",
    _lowrank_rule,
)
_OPS = torch.ops.eggroll

CONVOLUTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv1d: convolution(1),
    torch.conv2d: convolution(2),
    torch.conv3d: convolution(3),
    torch.conv_transpose1d: transposed_convolution(1),
    torch.conv_transpose2d: transposed_convolution(2),
    torch.conv_transpose3d: transposed_convolution(3),
}
