"""Keyed noise: (seed, generation, parameter, direction) → standard normal numbers.

Nothing here reads or writes a global random state. A *direction* is one draw; the two members of an
antithetic pair share one. Directions are drawn in blocks of fixed size, each from a generator of
its own that is seeded by a hash of the block's key: so the numbers do not depend on the chunk size,
the order of evaluation or the number of processes, and blocks can be drawn by several threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

# A generation's noise is kept between forward pass and update while it takes no more than this,
# and is drawn anew, block by block, where it would take more.
MEMORY_BUDGET = 2**30  # bytes
# A block is long enough to make seeding negligible, and short enough for torch to copy it without
# threads of its own, of which each of ours would start a team.
BLOCK_NUMBERS = 2**15
MAX_BLOCK = 256  # directions
# What is drawn anew is drawn for a range of directions of about this many bytes.
RANGE_BYTES = 2**27


def derive_seed(*key: int | str) -> int:
    """Hash a key into a seed of 64 bits: equal keys only give equal seeds.

    (torch's CPU generator keeps 32 of the bits: two given blocks of a run coincide with probability
    2⁻³², at random, never systematically.)
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class NoiseSpec:
    """One tensor of noise for each direction: its shape, standard deviation, type and place."""

    shape: tuple[int, ...]
    std: float
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def numel(self) -> int:
        """Numbers in one direction."""
        return math.prod(self.shape)

    @functools.cached_property
    def block(self) -> int:
        """Directions drawn from one generator: a function of the shape alone, a power of two."""
        fit = max(1, min(MAX_BLOCK, BLOCK_NUMBERS // max(1, self.numel)))
        return 1 << (fit.bit_length() - 1)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that draw; kept, since starting them takes as long as drawing."""
    return ThreadPoolExecutor(thread_name_prefix="eggroll-noise")


class Noise:
    """The directions of one generation, drawn once and kept, or drawn again when they are many.

    Args:
        seed: Seed of the run, 0 ≤ seed < 2⁶⁴.
        generation: Index of the generation.
        specs: Name of each tensor of noise → its `NoiseSpec`.
        count: Directions in the generation.
        storage: Tensors of an earlier generation, to be written over, and afterwards this one's:
            fresh memory costs as much as the drawing.
        memory_budget: Bytes up to which the whole generation is kept in memory.
    """

    def __init__(
        self,
        seed: int,
        generation: int,
        specs: Mapping[str, NoiseSpec],
        count: int,
        storage: dict[str, Tensor],
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        self.specs = specs
        self.count = count
        self.storage = storage
        self._key = (seed, generation)
        self.nbytes = sum(s.numel * s.dtype.itemsize for s in specs.values()) * count
        self._kept: tuple[int, int, dict[str, Tensor]] = (0, 0, {})
        if self.nbytes <= memory_budget:
            self.draw(0, count)

    def draw(self, start: int, stop: int) -> dict[str, Tensor]:
        """Directions `start` to `stop` of every tensor: name → `(stop - start, *shape)`."""
        kept_start, kept_stop, kept = self._kept
        if not kept_start <= start <= stop <= kept_stop:
            # More than was asked for: the next chunk finds the rest of the blocks here.
            step = max(1, min(MAX_BLOCK, RANGE_BYTES * self.count // max(1, self.nbytes)))
            kept_start = start // step * step
            kept_stop = min(self.count, -(-stop // step) * step)
            kept = self._draw_blocks(kept_start, kept_stop)
            self._kept = (kept_start, kept_stop, kept)
        return {n: t[start - kept_start : stop - kept_start] for n, t in kept.items()}

    def _room(self, name: str, count: int) -> Tensor:
        """An uninitialised `(count, *shape)`, in the storage where that fits."""
        spec, stored = self.specs[name], self.storage.get(name)
        shape = (count, *spec.shape)
        if stored is None or (stored.shape, stored.dtype, stored.device) != (
            torch.Size(shape),
            spec.dtype,
            spec.device,
        ):
            stored = torch.empty(shape, dtype=spec.dtype, device=spec.device)
            self.storage[name] = stored
        return stored

    def _draw_blocks(self, start: int, stop: int) -> dict[str, Tensor]:
        out = {name: self._room(name, stop - start) for name in self.specs}
        blocks = [
            (name, index)
            for name, spec in self.specs.items()
            for index in range(start // spec.block, -(-stop // spec.block))
        ]
        on_cpu = all(tensor.device.type == "cpu" for tensor in out.values())
        threads = min(torch.get_num_threads() if on_cpu else 1, len(blocks))
        queue = iter(blocks)  # each thread takes the next: none waits for a slow one

        def fill() -> None:
            for name, index in queue:
                self._fill_block(out[name], name, index, start, stop)

        others = [_pool().submit(fill) for _ in range(threads - 1)]
        fill()
        for other in others:
            if not other.cancel():
                other.result()
        return out

    def _fill_block(self, out: Tensor, name: str, index: int, start: int, stop: int) -> None:
        """Draw a block whole, always, and copy the part of it that lies in `start … stop`."""
        spec = self.specs[name]
        first = index * spec.block
        generator = torch.Generator(spec.device)
        generator.manual_seed(derive_seed(*self._key, name, index))
        block = torch.empty((spec.block, *spec.shape), dtype=torch.float32, device=spec.device)
        block.normal_(0.0, spec.std, generator=generator)
        begin, end = max(first, start), min(first + spec.block, stop)
        out[begin - start : end - start].copy_(block[begin - first : end - first])


@contextlib.contextmanager
def keyed_global_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Run code that draws from torch's global generators from a state of our own, then restore it.

    A fitness with dropout, or a custom algorithm that calls `torch.randn`, so becomes a function of
    the run's seed, and the program around it sees the random state that it left.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        seed_global_rng(device, seed)
        yield


def seed_global_rng(device: torch.device, seed: int) -> None:
    """Seed the generators that a fitness on `device` draws from, and no others.

    `torch.manual_seed` would also queue a call for every absent accelerator, at 100 µs each.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
