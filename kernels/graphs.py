"""Steps as CUDA graphs: one launch instead of a thousand. On other devices a step is simply called.

A graph replays the captured launches on the memory they used. So a step is a function of tensors: everything that
changes from call to call is an input, which is copied to where the graph reads it, or is in memory with a fixed address
(key/value caches). Inputs are never written to: one that a step returns unchanged is a constant of the run, and is
copied once.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import switches

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST = 128  # graphs of one kind of run; steps of further shapes are called
PATIENCE = 5  # calls that take as long as one capture


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of nested dataclasses, tuples and lists, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    return [tensor for part in tree for tensor in leaves(part)] if isinstance(tree, (tuple, list)) else []


def mapped(change: Callable[[Tensor], Tensor], tree: T) -> T:
    """The same nest of dataclasses, tuples and lists with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_dataclass(tree):
        return type(tree)(**{f.name: mapped(change, getattr(tree, f.name)) for f in fields(tree)})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(change, part) for part in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(change, part) for part in tree)
    return tree


class _Graph:
    """A captured step: ``inputs`` it reads and ``outputs`` it writes, at fixed addresses.

    The graph also reads the tensors that the ``step`` refers to (tables, caches); holding the step keeps them alive. An
    output that is the input of the same index is handed on: the caller gets back the tensor it passed.
    """

    def __init__(self, graph: Any, step: Callable[..., Any], inputs: tuple, outputs: Any):
        self.graph, self.step, self.inputs, self.outputs = graph, step, inputs, outputs
        self.places = leaves(inputs)
        self.handed_on = {i for i, (a, b) in enumerate(zip(self.places, leaves(outputs), strict=False)) if a is b}
        self.written = {id(x) for i, x in enumerate(leaves(outputs)) if i not in self.handed_on}
        self.held: dict[int, Tensor] = {}  # of what is handed on, the input that was copied

    def replay(self, inputs: tuple, written: Container[int]) -> Any:
        """Copy the inputs that changed to where the graph reads them, and launch. ``written``: the outputs of all
        graphs, by id: their values change with every replay."""
        given = leaves(inputs)
        copy_together((there, new) for i, (there, new) in enumerate(zip(self.places, given, strict=True))
                      if self.held.get(i) is not new)
        self.held = {i: given[i] for i in self.handed_on if id(given[i]) not in written}
        self.graph.replay()
        place = itertools.count()
        return mapped(lambda x: given[i] if (i := next(place)) in self.handed_on else x, self.outputs)


def copy_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second one of its shape and dtype, with a launch for every dtype."""
    by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        by_type.setdefault(pair[0].dtype, []).append(pair)
    for group in by_type.values():
        torch._foreach_copy_(*map(list, zip(*group, strict=True)))


_allowed = True


def allow(allowed: bool) -> None:
    """Allow or forbid capturing from now on, as ComfyUI's command line asks."""
    global _allowed
    _allowed = allowed


def captures(device: torch.device) -> bool:
    """Can steps be captured on this device? Only on NVIDIA GPUs.

    HIP, which ROCm reports as ``cuda``, may end the process on a capture that CUDA refuses with an error.
    """
    return device.type == "cuda" and torch.version.hip is None


def capturable(device: torch.device) -> bool:
    """Are steps captured on this device: can they be, and is it allowed?"""
    return captures(device) and _allowed and not switches.on(switches.NO_GRAPHS)


_recording = False


def recording() -> bool:
    """Is a step being captured? Then no value may be read on the host."""
    return _recording


@contextmanager
def capturing() -> Iterator[None]:
    """In this context a step is being captured.

    Python's garbage collector is off: destroying a tensor or event may make calls that a capture forbids.
    """
    global _recording
    collects = gc.isenabled()
    gc.disable()
    _recording = True
    try:
        yield
    finally:
        _recording = False
        if collects:
            gc.enable()


class Graphs:
    """The captured steps of one kind of run, by key. The results of a call are valid until the next call.

    one_shape: should all steps of a run have the same shapes? Every other shape is another capture. True on devices
    that can capture, even without graphs: sums of other lengths round differently, which may change the image.
    """

    def __init__(self, device: torch.device):
        self.device, self.active, self.one_shape = device, capturable(device), captures(device)
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: Counter[Hashable] = Counter()  # of steps that are not captured (yet)
        self._pool: Any = None
        self._written: set[int] = set()  # outputs of all graphs

    def __call__(self, key: Hashable, step: Callable[..., T], *inputs: Any) -> T:
        """step(*inputs). The key identifies everything that is not a tensor: shapes, settings, the branches of a step.

        The first call only calls the step; the second captures it, and from then on the graph is replayed. In a run
        with many shapes, a shape is captured after it was called a few times. If a GPU refuses to capture or launch a
        graph, nothing was executed: this and all further steps are called. (An error of an earlier launch is raised
        again by the step, and ends the run.)
        """
        if not self.active:
            return step(*inputs)
        graph, captured = self._graphs.get(key), len(self._graphs)
        if graph is None and (captured >= MOST or self._calls[key] < min(1 + captured // 4, PATIENCE)):
            self._calls[key] += 1
            return step(*inputs)
        try:
            if graph is None:
                graph = self._graphs[key] = self._capture(step, inputs)
                self._written |= graph.written
            return graph.replay(inputs, self._written)
        except RuntimeError as error:
            log.warning("This run goes on without CUDA graphs (it will be slower): %s", error)
            self.active = False
            return step(*inputs)

    def forget(self) -> None:
        """Drop all graphs, and the memory of their intermediate results."""
        self._graphs, self._pool, self._written = {}, None, set()
        self._calls.clear()

    def _capture(self, step: Callable[..., Any], inputs: tuple) -> _Graph:
        """Record the launches of a step; nothing is executed."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        places = placed(inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU during the capture. A capture that fails does not restore the current stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()), capturing(),
            torch.cuda.graph(graph, self._pool, capture_stream(self.device), capture_error_mode="thread_local"),
        ):
            outputs = own_outputs(step(*places), places)
        return _Graph(graph, step, places, outputs)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a GPU's steps are captured. torch's default one belongs to the first GPU that captured."""
    return torch.cuda.Stream(device)


def placed(inputs: tuple) -> tuple:
    """Copies of the inputs: the memory from which a graph reads those of later calls."""
    return mapped(lambda t: t.clone(memory_format=torch.contiguous_format), inputs)


def own_outputs(outputs: T, places: tuple) -> T:
    """The outputs, with those that share an input's memory copied: the next call overwrites inputs one after the other,
    while others may still have to be read. Outputs that are handed on are not copied (see _Graph)."""
    taken = {t.untyped_storage()._cdata for t in leaves(places)}
    every = itertools.chain(leaves(places), itertools.repeat(None))

    def own(output: Tensor) -> Tensor:
        return output if next(every) is output or output.untyped_storage()._cdata not in taken else output.clone()

    return mapped(own, outputs)
