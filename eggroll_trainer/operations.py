"""What each operation does with a `LowRankTensor`.

`LAZY`, the table at the end, holds those that never form a member's weight. Any other operation is
done on dense weights: right, slower, and counted, so that `trainer.explain()` can list it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import decompositions, members
from .convolutions import CONVOLUTIONS
from .errors import NotBatchableError
from .lowrank import METADATA, LowRankTensor
from .recurrent import RECURRENT


def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation of which an argument is a `LowRankTensor`."""
    if func in METADATA:
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    if (handler := LAZY.get(func)) is not None:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            _note(func, (*args, *kwargs.values()), dense=False)
            return result
    _refuse_in_place(func, args, kwargs)
    _note(func, (*args, *kwargs.values()), dense=True)
    args, kwargs = tree_map_only(LowRankTensor, LowRankTensor.dense, (args, kwargs))
    return func(*args, **kwargs)


def _note(func: Callable[..., Any], arguments: Iterable[Any], dense: bool) -> None:
    for tensor in arguments:
        if isinstance(tensor, LowRankTensor):
            trace = tensor.seen
            operation = torch.overrides.resolve_name(func) or func.__name__
            operation = operation.replace("torch.nn.functional.", "F.")
            (trace.dense if dense else trace.lazy).add((tensor.label, operation))
            trace.used.add(tensor.label)
            if dense:
                size = tensor.weight.numel() * tensor.weight.element_size()
                trace.formed_bytes = max(trace.formed_bytes, size)
        elif isinstance(tensor, (tuple, list)):
            _note(func, tensor, dense)


def _refuse_in_place(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    name = func.__name__
    in_place = name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__",))
    in_place |= name.endswith("_") and not name.endswith("__")
    if (in_place and isinstance(args[0], LowRankTensor)) or "out" in kwargs:
        raise NotBatchableError(
            f"the fitness writes into a parameter ({name}), which in a batched pass belongs to all "
            "members at once"
        )


def body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of `torch.nn.functional`, its own body running inside the pass; else None.

    These functions hand themselves to `__torch_function__` first thing. Past that check their
    bodies are plain compositions of simpler operations, which the tables know: with the check
    answering no, `multi_head_attention_forward` and its like need no code here.
    """
    if not isinstance(func, types.FunctionType) or func.__globals__ is not vars(F):
        return None
    if func not in _BODIES:
        namespace = {**vars(F), **dict.fromkeys(_SUBCLASS_CHECKS, lambda *args: False)}
        own = types.FunctionType(
            func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__
        )
        own.__kwdefaults__ = func.__kwdefaults__
        _BODIES[func] = own
    return _BODIES[func]


_BODIES: dict[types.FunctionType, Callable[..., Any]] = {}
_SUBCLASS_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


# --- products -------------------------------------------------------------------------------------


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, LowRankTensor) or weight.dim() != 2:
        return NotImplemented
    if not isinstance(weight, LowRankTensor):
        return NotImplemented
    w = weight
    return members.linear(input, w.coefficient, w.weight, w.left, w.right, w.scales, bias)


def _matmul(input: Any, other: Any) -> Any:
    if isinstance(input, LowRankTensor) and isinstance(other, LowRankTensor):
        return NotImplemented
    matrix, rest = (other, input) if isinstance(other, LowRankTensor) else (input, other)
    if not matrix.is_matrix or (matrix.dim() > 2 and rest.shape[:-2] != matrix.shape[:-2]):
        return NotImplemented
    flat = matrix.derive(matrix.weight, matrix.left, matrix.right)
    if matrix is other:
        return _linear(rest, _transpose(flat))
    return _linear(rest, flat) if rest.dim() == 1 else _linear(rest.mT, flat).mT


def _rmatmul(input: Any, other: Any) -> Any:
    return _matmul(other, input)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = NotImplemented if isinstance(input, LowRankTensor) else _matmul(mat1, mat2)
    if product is NotImplemented:
        return NotImplemented
    product = product if alpha == 1 else alpha * product
    return product + (input if beta == 1 else beta * input)


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """The centre's, and one in which the member's `B` is a kernel of `r` outputs, mixed by `A`."""
    if not isinstance(weight, LowRankTensor) or isinstance(bias, LowRankTensor):
        return NotImplemented
    centre = F.bilinear(input1, input2, weight.weight.view(weight.shape), bias)
    own = F.bilinear(input1, input2, weight.own_right().view(-1, *weight.shape[1:]))
    return centre + weight.coefficient * (own @ weight.own_left())


def _einsum(equation: Any, *operands: Any) -> Any:
    """Two terms: the centre's, and one in which the member's factors replace the matrix."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    lows = [i for i, operand in enumerate(operands) if isinstance(operand, LowRankTensor)]
    if not isinstance(equation, str) or "->" not in equation or len(lows) != 1:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    subscripts, low = inputs.split(","), operands[lows[0]]
    row, rest = subscripts[lows[0]][0], subscripts[lows[0]][1:]
    if low.shape[:1] != low.weight.shape[:1] or len({row, *rest}) != low.dim():
        return NotImplemented  # an expanded matrix, a diagonal or an ellipsis
    rank = next(c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in equation)
    right = low.own_right().view(-1, *low.shape[1:])
    factors = [(rank + row, low.own_left()), (rank + rest, right)]
    factors.sort(key=lambda factor: factor[0][1] in output)  # contract first what can be
    weight = low.weight.view(low.shape)
    centre = [weight if operand is low else operand for operand in operands]
    others = [(s, t) for s, t in zip(subscripts, operands, strict=True) if t is not low]
    terms = [*others, *factors]
    correction = torch.einsum(
        ",".join(s for s, _ in terms) + "->" + output, *[tensor for _, tensor in terms]
    )
    return torch.einsum(equation, *centre) + low.coefficient * correction


# --- views ----------------------------------------------------------------------------------------


def _transpose(input: Any, dim0: int = 0, dim1: int = 1) -> Any:
    if not input.is_matrix or {dim0 % input.dim(), dim1 % input.dim()} != {
        input.dim() - 2,
        input.dim() - 1,
    }:
        return NotImplemented
    shape = (*input.shape[:-2], input.shape[-1], input.shape[-2])
    return input.derive(input.weight.mT, input.right, input.left, torch.Size(shape))


def _matrix_transpose(input: Any) -> Any:
    return _transpose(input, -2, -1)


def _permute(input: Any, *dims: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 else dims
    return _transpose(input) if tuple(d % 2 for d in dims) == (1, 0) else NotImplemented


def _narrow(input: Any, dim: int, start: int, length: int) -> Any:
    if input.dim() != 2 or not input.is_matrix:
        return NotImplemented
    start = start + input.shape[dim] if start < 0 else start
    left, right = input.left, input.right
    if dim % 2 == 0:
        left = left.narrow(2, start, length)
    else:
        right = right.narrow(2, start, length)
    return input.derive(input.weight.narrow(dim, start, length), left, right)


def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    if tensor.dim() != 2 or not tensor.is_matrix:
        return NotImplemented
    sizes, size = split_size_or_sections, tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_narrow(tensor, dim, a, n) for a, n in zip(starts, sizes, strict=True))


def _chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    return _split(input, -(-input.shape[dim] // chunks), dim)


def _unsqueeze(input: Any, dim: int) -> Any:
    if not input.is_matrix or dim not in (0, -input.dim() - 1):
        return NotImplemented
    shape = torch.Size((1, *input.shape))
    return input.derive(input.weight, input.left, input.right, shape)


def _expand(input: Any, *sizes: Any) -> Any:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not input.is_matrix or any(
        size not in (-1, own) for size, own in zip(sizes[-2:], input.shape[-2:], strict=True)
    ):
        return NotImplemented
    old = (1,) * (len(sizes) - input.dim()) + tuple(input.shape)
    lead = (own if size == -1 else size for size, own in zip(sizes, old, strict=True))
    return input.derive(input.weight, input.left, input.right, torch.Size(lead))


def _diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if (offset, dim1, dim2) != (0, 0, 1) or input.dim() != 2 or not input.is_matrix:
        return NotImplemented
    n = min(input.shape)
    correction = (input.own_left()[:, :n] * input.own_right()[:, :n]).sum(dim=0)
    return input.weight.diagonal() + input.coefficient * correction


def _identity(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Stays as it is where nothing would change; a converted weight is formed."""
    target = torch.empty(0, dtype=input.dtype, device=input.device).to(*args, **kwargs)
    same = target.dtype == input.dtype and target.device == input.device
    return input if same else NotImplemented


# --- look-ups -------------------------------------------------------------------------------------


def _embedding(weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, LowRankTensor) or weight.dim() != 2 or not weight.is_matrix:
        return NotImplemented
    w = weight
    return members.embedding(indices, w.coefficient, w.weight, w.left, w.right, w.scales)


def _getitem(input: Any, index: Any) -> Any:
    if not isinstance(input, LowRankTensor) or input.dim() != 2 or not input.is_matrix:
        return NotImplemented
    if isinstance(index, int):
        index = index + input.shape[0] if index < 0 else index
        return _embedding(input, torch.tensor(index, device=input.device))
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
        return _embedding(input, torch.where(index < 0, index + input.shape[0], index))
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > 2 or not all(isinstance(s, slice) for s in slices):
        return NotImplemented
    for dim, part in enumerate(slices):
        start, stop, step = part.indices(input.shape[dim])
        if step != 1:
            return NotImplemented
        input = _narrow(input, dim, start, max(0, stop - start))
    return input


# --- the table ------------------------------------------------------------------------------------

LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((F.linear,), _linear),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _addmm),
    **dict.fromkeys((torch.addmv, Tensor.addmv), _addmm),
    F.bilinear: _bilinear,
    torch.einsum: _einsum,
    **dict.fromkeys((Tensor.T.__get__, Tensor.mT.__get__), _matrix_transpose),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.t, Tensor.t), _matrix_transpose),
    **dict.fromkeys((torch.transpose, Tensor.transpose, torch.swapaxes), _transpose),
    **dict.fromkeys((Tensor.swapaxes, torch.swapdims, Tensor.swapdims), _transpose),
    **dict.fromkeys((torch.permute, Tensor.permute), _permute),
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrow),
    **dict.fromkeys((torch.split, Tensor.split), _split),
    **dict.fromkeys((torch.chunk, Tensor.chunk), _chunk),
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _unsqueeze),
    Tensor.expand: _expand,
    **dict.fromkeys((torch.diagonal, Tensor.diagonal), _diagonal),
    **dict.fromkeys((torch.detach, Tensor.detach, Tensor.data.__get__), _identity),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.clone, Tensor.clone, Tensor.contiguous), _identity),
    Tensor.requires_grad_: _identity,
    Tensor.to: _to,
    torch.embedding: _embedding,
    Tensor.__getitem__: _getitem,
    torch.embedding_bag: decompositions.embedding_bag,
    **CONVOLUTIONS,
    **RECURRENT,
}
