"""The stand-in for a matrix: what stays lazy, what is formed, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, Calls, make, readout

from eggroll_trainer import EGGROLLTrainer, NotBatchableError
from eggroll_trainer.lowrank import LowRankTensor

N = 4


def check(
    function: Callable[[Any], Tensor],
    shape: tuple[int, ...],
    tolerance: float = 1e-12,
    **options: Any,
) -> Any:
    """Evaluate `function(weight)` batched and member by member; the trainer's trace."""
    torch.manual_seed(0)
    model = Calls(lambda m: function(m.w), w=shape).double()

    def fitness(m: nn.Module) -> Tensor:
        out = m().flatten()
        return (out.sin() * torch.linspace(-1, 1, len(out), dtype=torch.float64)).sum()

    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        fitness,
        population_size=N,
        seed=0,
        evaluation="vmap",
        **options,
    )
    population = trainer.ask()
    got = trainer.evaluate(population)
    with torch.no_grad():
        wanted = torch.stack([fitness(population.member(i)) for i in range(N)])
    assert wanted.std() > 1e-4
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    return trainer.evaluator.trace


X = torch.randn(5, 6, dtype=torch.float64)
Y = torch.randn(5, 4, dtype=torch.float64)
V6, V4 = X[0], Y[0]
STACK = torch.randn(2, 5, 6, dtype=torch.float64)
IDS = torch.tensor([[0, 3], [2, 2]])

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "F.linear": lambda w: F.linear(X, w),
    "F.linear, bias": lambda w: F.linear(X, w, V4),
    "F.linear, keywords": lambda w: F.linear(input=STACK, weight=w, bias=V4),
    "x @ w.T": lambda w: X @ w.T,
    "x @ w.mT": lambda w: STACK @ w.mT,
    "x @ w": lambda w: Y @ w,
    "w @ x": lambda w: w @ X.T,
    "w @ stack": lambda w: w @ STACK.mT,
    "w @ vector": lambda w: w @ V6,
    "vector @ w": lambda w: V4 @ w,
    "matmul": lambda w: torch.matmul(X, w.t()),
    "mm": lambda w: torch.mm(w, X.T),
    "mv": lambda w: torch.mv(w, V6),
    "x.mm(w)": lambda w: Y.mm(w),
    "w.matmul(x)": lambda w: w.matmul(X.T),
    "bmm": lambda w: torch.bmm(STACK, w.T.expand(2, 6, 4)),
    "addmm": lambda w: torch.addmm(V6, Y, w, beta=0.5, alpha=2),
    "x.addmm": lambda w: V6.expand(5, 6).addmm(Y, w),
    "addmv": lambda w: torch.addmv(V4, w, V6),
    "baddbmm": lambda w: torch.baddbmm(
        torch.ones(2, 5, 4, dtype=torch.float64), STACK, w.T.unsqueeze(0).expand(2, -1, -1)
    ),
    "einsum": lambda w: torch.einsum("bi,oi->bo", X, w),
    "einsum, list": lambda w: torch.einsum("bo,oi->bi", [Y, w]),
    "einsum, three": lambda w: torch.einsum("bi,oi,bo->b", X, w, Y),
    "einsum, outer": lambda w: torch.einsum("oi,b->boi", w, X[:, 0]),
    "transpose": lambda w: X @ w.transpose(0, 1),
    "transpose, negative": lambda w: X @ torch.transpose(w, -1, -2),
    "permute": lambda w: X @ w.permute(1, 0),
    "swapaxes": lambda w: X @ w.swapaxes(0, 1),
    "twice transposed": lambda w: F.linear(X, w.T.T),
    "chunk": lambda w: torch.cat([F.linear(X, part) for part in w.chunk(3)], dim=1),
    "chunk, columns": lambda w: sum(F.linear(X[:, :2], part) for part in w.chunk(3, dim=1)),
    "split": lambda w: torch.cat([F.linear(X, part) for part in w.split([1, 3])], dim=1),
    "split, size": lambda w: torch.cat([F.linear(X, part) for part in torch.split(w, 3)], 1),
    "narrow": lambda w: F.linear(X, w.narrow(0, 1, 2)),
    "narrow, columns": lambda w: F.linear(X[:, 2:4], w.narrow(-1, -4, 2)),
    "slice": lambda w: F.linear(X[:, 1:4], w[1:, 1:4]),
    "row": lambda w: w[2] + w[-1],
    "rows": lambda w: w[IDS] + w[torch.tensor([-1, 0])],
    "embedding": lambda w: F.embedding(IDS, w),
    "embedding_bag": lambda w: F.embedding_bag(IDS, w, mode="mean"),
    "embedding_bag, max": lambda w: F.embedding_bag(IDS, w, mode="max"),
    "embedding_bag, weighted": lambda w: F.embedding_bag(
        IDS, w, mode="sum", per_sample_weights=Y[:2, :2].contiguous(), padding_idx=2
    ),
    "diagonal": lambda w: w.diagonal(),
    "detach": lambda w: F.linear(X, w.detach()),
    "data": lambda w: F.linear(X, w.data),
    "clone": lambda w: F.linear(X, w.clone().contiguous()),
    "to, the same": lambda w: F.linear(X, w.to(X)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("rank", [1, 3])
def test_lazy_operations(name: str, rank: int) -> None:
    trace = check(LAZY[name], (4, 6), rank=rank)
    assert not trace.dense, f"a member's weight was formed by {trace.dense}"
    assert trace.used == {"w"}


IMAGE = torch.randn(2, 4, 7, 7, dtype=torch.float64)
CONV: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "conv2d": ((6, 4, 3, 3), lambda w: F.conv2d(IMAGE, w, padding=1)),
    "conv2d, stride": ((6, 4, 3, 2), lambda w: F.conv2d(IMAGE, w, stride=(2, 1))),
    "conv2d, dilation": ((6, 4, 2, 2), lambda w: F.conv2d(IMAGE, w, dilation=2, padding="same")),
    "conv2d, groups": ((6, 2, 3, 3), lambda w: F.conv2d(IMAGE, w, groups=2)),
    "conv1d": ((6, 4, 3), lambda w: F.conv1d(IMAGE[:, :, 0], w)),
    "conv3d": ((6, 1, 2, 2, 2), lambda w: F.conv3d(IMAGE[:, None], w)),
    "conv_transpose2d": ((4, 3, 3, 3), lambda w: F.conv_transpose2d(IMAGE, w, stride=2)),
    "bilinear": ((3, 6, 4), lambda w: F.bilinear(X, Y, w, V6[:3])),
    "einsum of a kernel": ((3, 4, 7), lambda w: torch.einsum("bchw,kcw->bkh", IMAGE, w)),
}


@pytest.mark.parametrize("name", CONV)
@pytest.mark.parametrize("rank", [1, 2])
def test_lazy_kernels(name: str, rank: int) -> None:
    shape, function = CONV[name]
    trace = check(function, shape, rank=rank, matricize=True)
    assert not trace.dense, f"a member's kernel was formed by {trace.dense}"


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda w: F.linear(X, 2 * w + 1),
    "function": lambda w: w.tanh().sum(1),
    "view": lambda w: w.view(2, 12).sum(1),
    "boolean mask": lambda w: torch.where(w.detach() > 0, w, 0 * w).sum(1),
    "step": lambda w: w[::2].sum(1),
    "two indices": lambda w: w[IDS, IDS],
    "norm": lambda w: w / w.norm(),
    "w @ w.T": lambda w: w @ w.T,
    "linear of a weight": lambda w: F.linear(w, X),
    "other type": lambda w: F.linear(X.float(), w.float()).double(),
    "stacked": lambda w: torch.stack([w, w]).sum(0),
}


@pytest.mark.parametrize("name", DENSE)
def test_other_operations_are_right_and_reported(name: str) -> None:
    tolerance = 1e-5 if name == "other type" else 1e-12
    assert check(DENSE[name], (4, 6), tolerance).dense


def test_the_zoo_is_lazy() -> None:
    """What `architecture.md` promises to be lazy is lazy in whole modules too."""
    formed = {}
    for name in ZOO:
        model, args = make(name, torch.float64)
        trainer = EGGROLLTrainer(
            model.parameters(),
            model,
            readout(args),
            population_size=N,
            evaluation="vmap",
            seed=0,
        )
        trainer.evaluate(trainer.ask())
        formed[name] = {operation for _, operation in trainer.evaluator.trace.dense}
    assert {name for name, operations in formed.items() if operations} == {
        "dense_algebra",  # on purpose
        "weight_norm",  # divides a matrix by its norm
        "spectral_norm",
    }


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda w: w.add_(1), "add_"),
        (lambda w: w.zero_(), "zero_"),
        (lambda w: w.__setitem__(0, 1.0), "__setitem__"),
        (lambda w: torch.mul(X, 2, out=w), "mul"),
    ],
)
def test_writing_into_a_weight_is_refused(write: Any, name: str) -> None:
    def function(w: Tensor) -> Tensor:
        write(w)
        return w.sum()

    with pytest.raises(NotBatchableError, match=f"writes into a parameter .*{name}"):
        check(function, (4, 6))


def test_metadata_is_that_of_the_parameter() -> None:
    seen: list[Any] = []

    def function(w: Tensor) -> Tensor:
        seen.append((w.shape, w.dtype, w.dim(), w.numel(), w.size(0), len(w), w.device.type))
        seen.append((w.is_floating_point(), isinstance(w, Tensor), hash(w) is not None))
        return F.linear(X, w)

    check(function, (4, 6))
    assert seen[0] == ((4, 6), torch.float64, 2, 24, 4, 4, "cpu")
    assert seen[1] == (True, True, True)


def test_a_weight_that_escapes_says_so() -> None:
    kept: list[Tensor] = []

    def function(w: Tensor) -> Tensor:
        kept.append(w)
        return F.linear(X, w)

    torch.manual_seed(0)
    model = Calls(lambda m: function(m.w), w=(4, 6)).double()
    trainer = EGGROLLTrainer(
        model.parameters(), model, lambda m: m().sum(), population_size=N, evaluation="vmap"
    )
    trainer.evaluate(trainer.ask())
    assert isinstance(kept[0], LowRankTensor)
    with pytest.raises(NotBatchableError, match="left the pass"):
        kept[0] + 1


def test_nothing_of_the_size_of_all_weights_is_made() -> None:
    """A million-weight matrix, 512 members: 2 GiB of weights, were they formed."""
    model = nn.Linear(1024, 1024, bias=False)
    x = torch.randn(1, 1024)
    trainer = EGGROLLTrainer(
        model.parameters(),
        model,
        lambda m: m(x).sum(),
        population_size=512,
        evaluation="vmap",
        chunk_size=512,
        seed=0,
    )
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for leaf in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(leaf, Tensor):
                    largest = max(largest, leaf.untyped_storage().nbytes())
            return out

    with Watch():
        trainer.step()
    assert largest <= 4 * 2**20, "larger than the matrix itself, or all the noise"
