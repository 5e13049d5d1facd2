"""Steps as CUDA graphs: one launch instead of a thousand. On other devices a step is simply called.

A graph replays the launches that were made while it was captured, on the memory they had then. So a step is a function
of tensors: what changes from call to call is among its inputs, which are copied to where the graph reads them, or lies
in memory that stays where it is (key/value caches).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import switches

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST = 128  # graphs of one kind of run; further shapes of its steps are called


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


@dataclass
class _Graph:
    """A captured step: ``inputs`` it reads and ``outputs`` it writes, at fixed places.

    The graph also reads what the ``step`` had at hand (tables, caches), which therefore must not be freed before it.
    """

    graph: Any
    step: Callable[..., Any]
    inputs: tuple
    outputs: Any

    def replay(self, inputs: tuple) -> Any:
        """Copy what changed to where the graph reads it, and launch."""
        for there, given in zip(leaves(self.inputs), leaves(inputs), strict=True):
            if there.data_ptr() != given.data_ptr():
                there.copy_(given)
        self.graph.replay()
        return self.outputs


_allowed = True


def allow(allowed: bool) -> None:
    """May steps be captured from now on? ComfyUI's command line can forbid it."""
    global _allowed
    _allowed = allowed


def capturable(device: torch.device) -> bool:
    """Are steps captured on this device? On NVIDIA GPUs, unless it was forbidden.

    HIP, which ROCm shows as ``cuda``, may end the process over a capture that CUDA refuses with an error.
    """
    return (
        device.type == "cuda" and torch.version.hip is None and _allowed and not switches.on(switches.NO_GRAPHS)
    )


_recording = False


def recording() -> bool:
    """Is a step being captured? Then nothing may be read on the host."""
    return _recording


@contextmanager
def capturing() -> Iterator[None]:
    """While this lasts, a step is being captured.

    Python's garbage collector waits: a tensor or event of anybody's that it destroys may call what no capture bears.
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
    """The captured steps of one kind of run, by key. Results of a call stand until the next call."""

    def __init__(self, device: torch.device):
        self.active = capturable(device)
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: called once, which warmed it up
        self._pool: Any = None

    def __call__(self, key: Hashable, step: Callable[..., T], *inputs: Any) -> T:
        """step(*inputs). The key stands for all that is not a tensor: shapes, settings, the branches a step takes.

        The first call is an ordinary one; the second captures, and from then on the graph is replayed. Where a GPU
        refuses to capture or to launch a graph, nothing of it was executed: this and all further steps are called. (An
        error of something launched before comes back from the step, and ends the run.)
        """
        if not self.active:
            return step(*inputs)
        if key not in self._graphs:
            if len(self._graphs) < MOST:
                self._graphs[key] = None
            return step(*inputs)
        try:
            graph = self._graphs[key] = self._graphs[key] or self._capture(step, inputs)
            return graph.replay(inputs)
        except RuntimeError as error:
            log.warning("This run goes on without CUDA graphs (it will be slower): %s", error)
            self.active = False
            return step(*inputs)

    def forget(self) -> None:
        """Drop all graphs, and the memory of their intermediate results."""
        self._graphs, self._pool = {}, None

    def _capture(self, step: Callable[..., Any], inputs: tuple) -> _Graph:
        """Record the launches of a step; nothing is executed."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        places = placed(inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using the GPU meanwhile. A capture that fails does not find back to the
        # stream it came from.
        with (
            torch.cuda.stream(torch.cuda.current_stream()), capturing(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = own_outputs(step(*places), places)
        return _Graph(graph, step, places, outputs)


def placed(inputs: tuple) -> tuple:
    """Copies of the inputs, where a graph will find those of later calls."""
    return mapped(lambda t: t.clone(memory_format=torch.contiguous_format), inputs)


def own_outputs(outputs: T, places: tuple) -> T:
    """Outputs that are (parts of) inputs, copied: the next call's inputs are written there one after the other, while
    others may still have to be read."""
    taken = {t.untyped_storage().data_ptr() for t in leaves(places)}
    return mapped(lambda t: t.clone() if t.untyped_storage().data_ptr() in taken else t, outputs)
