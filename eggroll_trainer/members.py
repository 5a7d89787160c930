r"""The batched kernels: one operation, every member of a chunk at once.

Each is an operator of torch's library with a batching rule and nothing else: it is called for one
member inside `torch.func.vmap`, and its rule does all of them. The member axis is written `M`,
directions `K`, and `s = M / K` members share a direction: 2 for antithetic pairs (members `2k` and
`2k + 1`), else 1. The factors enter the rule whole, as `(K, r, …)`: a pair reads them once, and
they are never repeated for its second member.

With $x$ a member's input and $W + \sigma s_i A_i B_i^\top$ its weight (EGGROLL, arXiv:2511.16652,
section 3), the rule of `linear` computes

$$ x_i (W + \sigma s_i A_i B_i^\top)^\top = x_i W^\top + \sigma s_i (x_i B_i) A_i^\top $$

as one product of all rows with $W$ and a batched product that accumulates into its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor differs from member to member, inside `vmap`."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def _correct(out: Tensor, projected: Tensor, left: Tensor, scales: Tensor) -> Tensor:
    """Add `± σ (x B) Aᵀ` to `out` in place, without another pass over it.

    Args:
        out: `(K, s·rows, m)`.
        projected: The rows' projections `x B`, `(K, r, s·rows)`; overwritten.
        left: Factors `A`, `(K, r, m)`.
        scales: `σ` or `(σ, −σ)`, shape `(s,)`.
    """
    k, r, _ = projected.shape
    projected.view(k, r, len(scales), -1).mul_(scales[:, None])
    # Under autocast the products are of another type than the factors.
    return out.baddbmm_(projected.mT.to(out.dtype), left.to(out.dtype))


def _correct_shared(base: Tensor, projected: Tensor, left: Tensor, scales: Tensor) -> Tensor:
    """Where all members have the same input: `base` `(rows, m)`, `projected` `(K, r, rows)`.

    Returns `(M, rows, m)`.
    """
    k, s, m = len(left), len(scales), base.shape[-1]
    out = base.expand(k * s, -1, m).contiguous()
    _correct(out.view(k, -1, m), projected.repeat(1, 1, s), left, scales)
    return out


def linear_members(
    x: Tensor, dim: int | None, weight: Tensor, left: Tensor, right: Tensor, scales: Tensor
) -> Tensor:
    """`x` is `(M, …, n)` with its member axis at `dim`, or shared by all; returns `(M, …, m)`."""
    (k, r, n), s, m = right.shape, len(scales), weight.shape[0]
    if dim is None:
        rows = x.reshape(-1, n)
        projected = (right.reshape(k * r, n) @ rows.T).view(k, r, -1)
        out = _correct_shared(F.linear(rows, weight), projected, left, scales)
        return out.view(k * s, *x.shape[:-1], m)
    x = x.movedim(dim, 0)
    rows = x.reshape(-1, n)
    out = F.linear(rows, weight)
    projected = torch.bmm(right, rows.view(k, -1, n).mT)
    _correct(out.view(k, -1, m), projected, left, scales)
    return out.view(*x.shape[:-1], m)


def _linear_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    coefficient: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, int]:
    if bias is not None and in_dims[6] is not None:
        bias = bias.movedim(in_dims[6], 0)
    if in_dims[1] is None:  # the user's own vmap, inside ours: one more axis of rows
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        out = linear(x, coefficient, weight, left, right, scales)
    else:
        out = linear_members(x, in_dims[0], weight, left, right, scales)
    if bias is not None:  # (m,), or (M, m)
        out += bias.view(*bias.shape[:-1], *[1] * (out.dim() - bias.dim()), bias.shape[-1])
    return out, 0


def _own_factor_rule(
    info: Any, in_dims: tuple[int | None, ...], coefficient: Tensor, factor: Tensor
) -> tuple[Tensor, int]:
    return factor.repeat_interleave(info.batch_size // len(factor), dim=0), 0


def _embedding_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    indices: Tensor,
    coefficient: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
) -> tuple[Tensor, int]:
    (k, r, n), s = right.shape, len(scales)
    if in_dims[0] is None:
        flat = indices.reshape(-1)
        base, projected = F.embedding(flat, weight), left.index_select(2, flat)
        out = _correct_shared(base, projected, right, scales)
        return out.view(k * s, *indices.shape, n), 0
    indices = indices.movedim(in_dims[0], 0)
    if in_dims[1] is None:  # the user's own vmap, inside ours
        return embedding(indices, coefficient, weight, left, right, scales), 0
    out = F.embedding(indices.reshape(-1), weight)
    flat = indices.reshape(k, 1, -1).expand(-1, r, -1)
    _correct(out.view(k, -1, n), left.gather(2, flat), right, scales)
    return out.view(*indices.shape, n), 0


def _attention_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, int]:
    def member_first(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    query, key, value = (
        member_first(tensor, dim)
        for tensor, dim in zip((query, key, value), in_dims[:3], strict=True)
    )
    if mask is not None and in_dims[3] is not None:
        mask = mask.movedim(in_dims[3], 0)
        # Broadcasting aligns on the right: the member axis must stay the first one.
        mask = mask.view(len(mask), *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
    lead = query.shape[:-3]  # (M, batch): folded into one axis, heads stay
    if mask is not None and mask.dim() > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
    query, key, value = (t.flatten(0, len(lead) - 1) for t in (query, key, value))
    out = attention(query, key, value, mask, is_causal, scale, enable_gqa)
    return out.view(*lead, *out.shape[1:]), 0


def define(
    name: str,
    schema: str,
    rule: Callable[..., tuple[Any, Any]],
    alone: Callable[..., Any] | None = None,
) -> None:
    """Define an operator by its batching rule, and by what it does when nothing is batched."""
    torch.library.define(f"eggroll::{name}", schema)
    torch.library.register_vmap(f"eggroll::{name}", rule)
    if alone is not None:
        torch.library.impl(f"eggroll::{name}", "default", func=alone)


def _attention_alone(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, *options: Any
) -> Tensor:
    scale, enable_gqa = options
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


LOWRANK = "Tensor coefficient, Tensor weight, Tensor left, Tensor right, Tensor scales"
define("linear", f"(Tensor x, {LOWRANK}, Tensor? bias=None) -> Tensor", _linear_rule)
define("own_factor", "(Tensor coefficient, Tensor factor) -> Tensor", _own_factor_rule)
define("embedding", f"(Tensor indices, {LOWRANK}) -> Tensor", _embedding_rule)
define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
    "bool enable_gqa) -> Tensor",
    _attention_rule,
    _attention_alone,
)
_OPS = torch.ops.eggroll


def linear(
    x: Tensor,
    coefficient: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """One member's `x (W + σ s A Bᵀ)ᵀ + bias`.

    Args:
        x: The member's input, `(…, n)`.
        coefficient: `σ s`, 0-d, one for each member.
        weight: The centre's weight `W`, `(m, n)`, the same for all.
        left: Every direction's `A`, `(K, r, m)`.
        right: Every direction's `B`, `(K, r, n)`.
        scales: `σ` or `(σ, −σ)`, shape `(s,)`.
        bias: The member's bias, `(m,)`.
    """
    out: Tensor = _OPS.linear(x, coefficient, weight, left, right, scales, bias)
    return out


def own_factor(coefficient: Tensor, factor: Tensor) -> Tensor:
    """One member's `(r, …)` out of every direction's `(K, r, …)`."""
    out: Tensor = _OPS.own_factor(coefficient, factor)
    return out


def embedding(
    indices: Tensor,
    coefficient: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
) -> Tensor:
    """One member's rows `(W + σ s A Bᵀ)[indices]`; arguments as for `linear`."""
    out: Tensor = _OPS.embedding(indices, coefficient, weight, left, right, scales)
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`scaled_dot_product_attention`, the member axis folded into the batch axis.

    torch has no batching rule for it on the CPU and would loop over the members.
    """
    out: Tensor = _OPS.attention(query, key, value, mask, is_causal, scale, enable_gqa)
    return out
