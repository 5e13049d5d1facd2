"""CUDA graphs on the CPU: steps are recorded once and then replayed operation by operation, on the memory they had.

What a graph cannot do fails here too. Reading a value on the host raises. Whatever Python did while the step was
recorded does not happen again. Results are in memory of a pool, as torch's caching allocator hands it out: a block that
one capture gives back serves the next, and replays write to these addresses. Nothing in a pool outlives a replay: it is
overwritten before the next one. Used in place of device.graphs.Graphs and samplers.engine.session.Poll.
"""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from comfyui_specar.device import graphs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "unique", "masked_select", "equal.default")
POOL = 1 << 28  # bytes; the system gives them when they are written to
BLOCK = 512  # bytes that addresses are multiples of
GARBAGE = 0xFF  # NaN as a float, -1 as an integer
NOT_FILLED = ("aten::empty", "aten::new_empty")
CONSTANT = "aten::lift_fresh"  # has memory of its own


class Pool:
    """Memory of captures, with ``taken``: the place of every block that is in use -> its bytes and who asked
    for it."""

    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, str]] = {}
        self.end = 0  # of what was ever taken
        self.bytes = mmap.mmap(-1, POOL)
        self.memory = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self.begin = self.memory.data_ptr()

    def take(self, count: int, name: str) -> int:
        """The place of ``count`` bytes: the smallest gap that they fit into."""
        count = max(BLOCK, -(-count // BLOCK) * BLOCK)
        edges = [0, *(edge for at in sorted(self.taken) for edge in (at, at + self.taken[at][0])), POOL]
        gaps = [(stop - start, start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        at = min(gap for gap in gaps if gap[0] >= count)[1]
        self.taken[at] = count, name
        self.end = max(self.end, at + count)
        return at

    def moved(self, tensor: Tensor, name: str) -> Tensor:
        """A copy in a block of its own, which is given back when the last tensor on it is gone."""
        count = tensor.untyped_storage().nbytes()
        at = self.take(count, name)
        block = memoryview(self.bytes)[at : at + max(count, 1)]
        weakref.finalize(block, self.taken.pop, at)
        memory = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        return copy.copy_(tensor)

    def holds(self, tensor: Tensor) -> bool:
        return self.begin <= tensor.data_ptr() < self.begin + POOL

    def note(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address, which keeps no block in use."""
        if tensor.is_mkldnn:
            return tensor
        if not tensor.numel():  # of no address
            return torch.empty_like(tensor)
        at = tensor.data_ptr() - self.begin
        if not self.holds(tensor):
            return tensor.detach()
        return self.memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), at // tensor.itemsize)

    def overwrite(self) -> None:
        """What other graphs of the pool do."""
        self.memory[: self.end] = GARBAGE


class Tape(TorchDispatchMode):
    """Operations in order, with their arguments and results. Recording executed them: the first replay is that."""

    def __init__(self, pool: Pool):
        super().__init__()
        self.pool, self.executed = pool, True
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, kwargs = str(operation), kwargs or {}
        masks = name.startswith("aten.index") and any(t.dtype == torch.bool for t in graphs.leaves(args[1:2]))
        if masks or any(read in name for read in READS):
            raise RuntimeError(f"the step reads a value on the host, or has a shape that depends on values: {name}")
        result, given = operation(*args, **kwargs), graphs.leaves((args, *kwargs.values()))
        if any(t.is_mkldnn for t in graphs.leaves(result)):  # a CPU packs a weight, for good
            return result
        if not operation._schema.name.startswith(CONSTANT):
            before = {t.untyped_storage()._cdata for t in given if not t.is_mkldnn}
            result = graphs.map_tensors(
                lambda t: t if t.untyped_storage()._cdata in before else self.pool.moved(t, name), result
            )
        if operation._schema.name.startswith(NOT_FILLED):
            result.view(torch.uint8).fill_(GARBAGE)
        noted = graphs.map_tensors(self.pool.note, (args, tuple(kwargs.values()), result))
        self.calls.append((operation, noted[0], dict(zip(kwargs, noted[1], strict=True)), noted[2]))
        return result

    def replay(self) -> None:
        if self.executed:
            self.executed = False
            return
        self.pool.overwrite()
        for operation, args, kwargs, result in self.calls:
            if operation._schema.name.startswith((CONSTANT, *NOT_FILLED)):
                continue
            for old, new in zip(graphs.leaves(result), graphs.leaves(operation(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeGraphs(graphs.Graphs):
    """Graphs that are recorded and replayed on the CPU. ``captured`` counts them, ``replayed`` their uses."""

    tape = Tape

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.pads = True
        self.captured = self.replayed = 0

    @staticmethod
    def may_capture(device):
        return graphs._allowed and not graphs._failed

    def __call__(self, key, step, state):
        self.replayed += key in self._graphs
        graphs._recording = key not in self._called  # a GPU's values are never readable
        try:
            return super().__call__(key, step, state)
        finally:
            graphs._recording = False

    @contextmanager
    def _recorder(self) -> Iterator[Tape]:
        self._pool = self._pool or Pool()
        tape = self.tape(self._pool)
        with tape:
            yield tape
        gc.collect(0)  # torch's dispatch to Python leaves frames in cycles
        outliving = sorted({name for _, name in self._pool.taken.values()})
        assert not outliving, f"what a capture allocates outlives it, and other replays overwrite it: {outliving}"

    def _record(self, run: Callable[[], T]) -> tuple[Tape, T]:
        found = super()._record(run)
        self.captured += 1
        return found

    @staticmethod
    def _free_workspaces() -> None:
        pass


def captured_call(graphs: TapeGraphs, key: Any, step: Callable[..., T], inputs: tuple, before: Any = None) -> T:
    """step(*inputs) by graphs, which take states to states: the results of the call ``before`` (None: of another run)
    are overwritten."""
    if before is None and key in graphs._graphs:
        before = graphs._graphs[key].after[1]
    return graphs(key, lambda state: (state[0], step(*state[0])), (inputs, before))[1]


class LatePoll:
    """What session.Poll does on a GPU: counts are those of the step before."""

    lag = 1

    def __init__(self, device: torch.device, batch: int):
        self.before = torch.zeros(batch, dtype=torch.int64)

    def __call__(self, counts: Tensor) -> Tensor:
        known, self.before = self.before, counts.clone()
        return known
