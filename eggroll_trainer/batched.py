"""`BatchedEvaluator`: a chunk of members in one pass, by `torch.func.vmap` over stand-ins."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from .batched_pass import BatchedPass
from .errors import NotBatchableError
from .evaluators import Evaluator, preserved
from .folded import FoldedPass, check_alone
from .inputs import Inputs
from .lowrank import LowRankTensor, Trace
from .noise import keyed_global_rng
from .perturbations import Chunk
from .population import Population, forward

# The largest tensor of a chunk. On a CPU a pass over it should come from the cache, yet many calls
# cost more than that; on a GPU it should fill the machine. Measured: benchmarks/chunks.py.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
# On a CPU, a member whose largest tensor is above this for each thread, and above so many times its
# weights, is better off alone: it saves little by sharing them, and stays in the cache. Measured:
# benchmarks/modules.py.
ALONE_BYTES = 200 * 2**10
ALONE_RATIO = 0.75
# torch's warning where an operation has no batching rule.
LOOPED = re.compile(r"There is a performance drop .* batching rule for (\S+?)\.? ")

Named = dict[str, Tensor]
Own = tuple[Named, Named, tuple[Any, ...]]  # coefficients, full weights, arguments


class BatchedEvaluator(Evaluator):
    """All members of a chunk at once.

    Args:
        chunk_size: Members of a chunk, at most; None measures a first, small chunk and chooses.
        randomness: `"same"` gives every member the same random numbers, `"different"` its own.
    """

    name = "vmap"

    def __init__(self, chunk_size: int | None, randomness: str) -> None:
        self.chosen = chunk_size is None  # … by us, and not by the user
        self.chunk_size = chunk_size
        self.randomness = randomness
        self.seen = self.trace = Trace()
        self.graphs: dict[Any, dict[Any, Any]] = {}  # of folded passes, by modes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Choose the chunk that another run chose, unless the user has said one."""
        if self.chosen:
            self.chunk_size = state["chunk_size"]

    def map(self, population: Population, function: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function for every member, a chunk at a time."""
        _keep_freed_memory()
        results, start = [], 0
        owner = Owner(population.model, function)
        with preserved(population.model) as restore, _loops_noted(self.seen):
            while start < len(population):
                restore()
                stop = inputs.limit(start, min(start + self._size(population), len(population)))
                seed = population.fitness_seed(0 if self.randomness == "same" else start)
                with keyed_global_rng(population.device, seed):
                    results.append(self._run(population, owner, inputs, start, stop))
                if self.chunk_size is None:
                    self.chunk_size = self._choose_size(population)
                start = stop
        return results[0] if len(results) == 1 else tree_map(lambda *x: torch.cat(x), *results)

    def fold(
        self, population: Population, members: Sequence[int], checked: bool
    ) -> Callable[..., Any]:
        """All members in one pass, as a graph."""
        owner = Owner(population.model, forward)
        chunk = population.perturbations.select(members)

        def run(weights: Any, args: tuple[Any, ...]) -> Any:
            coefficients, full, shared = weights
            dims = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, args)
            own = (coefficients, full, (*args, {}))
            try:
                return self.batched_pass(owner, own, (0, 0, (*dims, None)), shared)
            finally:
                owner.forget_stand_ins()

        def check(args: Any, result: Any) -> None:
            if checked:
                check_alone(population, members, args, result)

        return FoldedPass(
            len(members),
            _tensors(population, owner, chunk, len(members)),
            run,
            self.finish,
            self.graphs.setdefault(owner.modes, {}),
            check,
        )

    def finish(self, graph: GraphModule) -> Callable[..., Any]:
        """A graph, to be called many times."""
        return graph.forward

    def _size(self, population: Population) -> int:
        """Members of the next chunk: whole directions, the smallest number for the first one."""
        s = len(population.perturbations.signs)
        return s if self.chunk_size is None else -(-self.chunk_size // s) * s

    def _choose_size(self, population: Population) -> int:
        """The same for the same model and fitness: nothing here is timed."""
        budget = CHUNK_BYTES.get(population.device.type, CHUNK_BYTES["cuda"])
        largest = max(1, self.seen.peak_bytes, self.seen.formed_bytes)
        return max(len(population.perturbations.signs), budget // largest)

    def better_alone(self, population: Population) -> str | None:
        """Why members are better evaluated one after another, although they can be batched."""
        peak, weights = self.seen.peak_bytes, sum(p.nbytes for p in population.parameters.values())
        least = max(ALONE_BYTES * torch.get_num_threads(), ALONE_RATIO * weights)
        if population.device.type != "cpu" or peak < least:
            return None
        return (
            f"a member's largest tensor ({peak / 2**20:.1f} MiB) is not small against its weights "
            f"({weights / 2**20:.2f} MiB) and the cache, so that on a CPU batching would not pay"
        )

    def _run(
        self, population: Population, owner: Owner, inputs: Inputs, start: int, stop: int
    ) -> Any:
        chunk = population.perturbations.chunk(start, stop)
        coefficients, full, shared = _tensors(population, owner, chunk, stop - start)
        args, dims = inputs.chunk(start, stop)
        try:
            return self.run_chunk(owner, (coefficients, full, args), (0, 0, dims), shared)
        finally:
            owner.forget_stand_ins()

    def run_chunk(self, owner: Owner, own: Own, dims: Any, shared: Shared) -> Any:
        """A chunk's batched pass, as it is."""
        return self.batched_pass(owner, own, dims, shared)

    def batched_pass(self, owner: Owner, own: Own, dims: Any, shared: Shared) -> Any:
        """Call the function for all members at once.

        Args:
            owner: The model, and the function to call.
            own: What each member has: coefficients and full weights by name, and arguments.
            dims: The member axes of `own`.
            shared: What all have, see `Shared`.
        """

        def run(coefficients: Named, full: Named, args: tuple[Any, ...]) -> Any:
            trace = Trace()
            weights = {**full, **_stand_ins(coefficients, shared, trace)}
            with BatchedPass(trace, full):
                swapped = owner.swap(weights) | shared.buffers
                result = torch.func.functional_call(owner, swapped, args, tie_weights=False)
            self.seen.merge(trace)
            if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                raise NotBatchableError(
                    "a batched pass returned a plain number, which cannot differ between members"
                )
            if not trace.used:
                raise NotBatchableError(
                    "no operation used any of the perturbed parameters, so a batched pass cannot "
                    "tell the members apart"
                )
            return result

        return torch.func.vmap(run, dims, randomness=self.randomness)(*own)


class Shared(NamedTuple):
    """What all members of a chunk have in common, by name: tensors only."""

    factors: dict[str, tuple[Tensor, Tensor]]  # A (K, r, m) and B (K, r, n)
    scales: Named  # σ or (σ, −σ), (s,)
    centre: Named  # the low-rank parameters
    buffers: Named  # by path, copies


def _tensors(
    population: Population, owner: Owner, chunk: Chunk, count: int
) -> tuple[Named, Named, Shared]:
    """Members' coefficients `σ s` `(M,)` and full weights `(M, …)`, and what they share."""
    centre, sigma = population.centre(), population.sigma
    full = {name: chunk.stacked_weights(name, centre[name], sigma[name]) for name in chunk.full}
    signs = torch.tensor(chunk.signs, dtype=torch.float64, device=population.device)
    low = {name: centre[name] for name in chunk.factors}
    scales = {name: (signs * sigma[name]).to(weight.dtype) for name, weight in low.items()}
    coefficients = {name: scale.repeat(count // len(signs)) for name, scale in scales.items()}
    buffers = {path: buffer.clone() for path, buffer in owner.buffer_places}
    return coefficients, full, Shared(dict(chunk.factors), scales, low, buffers)


@contextlib.contextmanager
def _loops_noted(trace: Trace) -> Iterator[None]:
    """Note the operations for which torch loops over the members, in place of its own warning.

    In the first generation only: a change of the filters would make Python repeat the warnings of
    the user's fitness, which it shows once.
    """
    first, show = not trace.used, warnings.showwarning
    enable = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if found := LOOPED.search(str(message)):
            trace.looped.add(found[1])
        else:
            show(message, *args, **kwargs)

    with warnings.catch_warnings() if first else contextlib.nullcontext():
        if first:
            warnings.filterwarnings("always", LOOPED.pattern)
            warnings.showwarning = note
        enable(first)
        try:
            yield
        finally:
            enable(True)


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors, for the next ones of a pass.

    glibc hands large freed blocks back to the system, and every page of a new one costs a fault:
    up to half the time of a batched pass. Its thresholds adapt to the largest block freed so far
    (mallopt(3)): freeing one of nearly 32 MiB, their maximum, settles them.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def _stand_ins(coefficients: Named, shared: Shared, trace: Trace) -> dict[str, LowRankTensor]:
    """One member's low-rank parameters, inside `vmap`."""
    stand_ins = {}
    for name, (left, right) in shared.factors.items():
        weight, scales = shared.centre[name], shared.scales[name]
        matrix = weight.reshape(left.shape[2], right.shape[2])
        stand_ins[name] = LowRankTensor(
            name, matrix, left, right, coefficients[name], scales, trace, weight.shape
        )
    return stand_ins


class Owner(nn.Module):
    """Owns the model, and its `forward` is the function: so `functional_call` can swap weights."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function
        names = {id(p): name for name, p in model.named_parameters()}
        # One path for each module that holds a parameter, whatever paths lead to the module.
        places = [(prefix, module) for prefix, module in self.named_modules()]
        self.parameter_places = [
            (f"{prefix}.{name}", names[id(p)])
            for prefix, module in places
            for name, p in module.named_parameters(recurse=False)
        ]
        self.buffer_places = [
            (f"{prefix}.{name}", buffer)
            for prefix, module in places
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(module.training for module in self.modules())

    def forward(self, *args: Any) -> Any:
        """Call the function on the model."""
        return self.function(self.model, *args)

    def swap(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every place of every perturbed parameter, tied ones included."""
        return {path: weights[name] for path, name in self.parameter_places if name in weights}

    def forget_stand_ins(self) -> None:
        """Recurrent modules keep a list of their weights beside them: bring it up to date."""
        for module in self.modules():
            if isinstance(module, nn.RNNBase):
                module._update_flat_weights()
