"""Functions of tensors traced into graphs of tensor operations, with no Python between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .noise import keyed_global_rng

# Products of so few factors are written out as sums: a batched product of small matrices costs
# more, and a compiler fuses sums with what stands around them (the bias, the activation).
FEW = 4

# Operations that may hand on their input as it is.
VIEWS = (
    torch.ops.aten.alias.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
)


def trace(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The operations of `function(*args)`, as a function of the tensors in `args`, flat.

    Everything else is a constant of the graph: what is no tensor, shapes, the branches taken.
    """
    leaves, spec = tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def run(*given: Tensor) -> Any:
        rest = iter(given)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return function(*tree_unflatten(filled, spec))

    # Tracing runs the function; its random numbers must not be missing afterwards.
    with keyed_global_rng(tensors[0].device, 0):
        return make_fx(run, decomposition_table=DECOMPOSITIONS)(*tensors)


def split(graph: GraphModule, first: int) -> tuple[GraphModule, GraphModule]:
    """Two graphs in place of one: what depends on its first inputs alone, and the rest.

    Views that change nothing are left out.

    Args:
        graph: A graph of `trace`.
        first: How many inputs those are.

    Returns:
        `early(*first inputs) → values`, and `late(*values, *other inputs) → result`. Random numbers
        are drawn late. Where the rest writes into what would be early, nothing is early.
    """
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"][:first]
    early = set(inputs)
    for node in nodes:
        if _is_fixed(node) and early.issuperset(node.all_input_nodes):
            early.add(node)
    if any(early.intersection(_written(node)) for node in nodes):
        early = set(inputs)
    begin, end = Graph(), Graph()
    known: dict[Node, Node] = {}
    for node in nodes:
        if node in early:
            known[node] = begin.node_copy(node, known.__getitem__)
    kept = [node for node in known if not early.issuperset(node.users)]
    begin.output(tuple(known[node] for node in kept))
    known = {node: end.placeholder(node.name) for node in kept}
    for node in nodes:
        if node in early:
            continue
        if _changes_nothing(node):
            known[node] = known[node.all_input_nodes[0]]
        else:
            known[node] = end.node_copy(node, known.__getitem__)
    return GraphModule(graph, begin), GraphModule(graph, end)


def _is_fixed(node: Node) -> bool:
    """Whether it gives the same for the same inputs, and has some."""
    if isinstance(node.target, OpOverload):
        free = torch.Tag.nondeterministic_seeded in node.target.tags
        return bool(node.all_input_nodes) and not free and not node.target._schema.is_mutable
    return node.op == "get_attr" or node.target is operator.getitem


def _written(node: Node) -> list[Node]:
    """What it writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
    written = [
        (given | node.kwargs).get(argument.name)
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in written if isinstance(value, Node)]


def _changes_nothing(node: Node) -> bool:
    """Whether it is a view of its whole input as it is."""
    if node.target not in VIEWS:
        return False
    before, after = node.all_input_nodes[0].meta["tensor_meta"], node.meta["tensor_meta"]
    return bool(before.shape == after.shape and before.stride == after.stride)


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph depends on: the make of each tensor, the value of anything else."""
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    )


def _accumulated(add: Callable[..., Tensor]) -> Callable[..., Any]:
    """`baddbmm` as a sum of outer products, where there are few."""

    def run(
        input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        if batch1.shape[2] > FEW or (beta, alpha) != (1, 1):
            return NotImplemented
        for j in range(batch1.shape[2]):
            input = add(input, batch1[..., j : j + 1], batch2[:, j : j + 1])
        return input

    return run


DECOMPOSITIONS = {
    torch.ops.aten.baddbmm.default: _accumulated(torch.addcmul),
    torch.ops.aten.baddbmm_.default: _accumulated(Tensor.addcmul_),
}
