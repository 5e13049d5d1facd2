"""Steps as CUDA graphs: one launch instead of a thousand. On other devices a step runs eagerly.

Whether a run captures its steps is decided here (``capturable``: device, user, an earlier failure) and in
samplers/engine/session.py (are all weights on the GPU).

A graph replays the captured launches on the memory they used. So a step is a function from one state to the next, both
nests of tensors: what changes from call to call is in the state, or in memory with a fixed address (key/value caches).
A step does not write to its state. What it returns unchanged is a constant of the run, and is copied once.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import switches

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST_GRAPHS = 64  # of a session: each is some memory of the driver's


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of nested dataclasses, tuples and lists, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    return [tensor for part in tree for tensor in leaves(part)] if isinstance(tree, (tuple, list)) else []


def map_tensors(change: Callable[[Tensor], Tensor], tree: T) -> T:
    """The same nest of dataclasses, tuples and lists with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_dataclass(tree):
        return type(tree)(**{f.name: map_tensors(change, getattr(tree, f.name)) for f in fields(tree)})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(change, part) for part in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(change, part) for part in tree)
    return tree


@dataclass(frozen=True)
class _Graph:
    """A captured step, where the state lies that it reads, and the one that it returns (which may be there, too).

    The graph also reads the tensors that the ``step`` refers to (tables, caches); holding the step keeps them alive.
    """

    graph: Any
    step: Callable[..., Any]
    places: Any
    after: Any


def put(places: Any, state: Any) -> None:
    """Copy the tensors of a state to ``places``, unless they are these. Raises RuntimeError for other shapes.

    One that shares memory with a place is copied aside first: another copy may overwrite it before it is read.
    """
    there, here = leaves(places), leaves(state)
    if shapes_and_dtypes(there) != shapes_and_dtypes(here):
        raise RuntimeError(
            f"the step changes the shapes of its state from {shapes_and_dtypes(there)} to {shapes_and_dtypes(here)}"
        )
    memory = {place.untyped_storage()._cdata for place in there}
    copy_together(
        (place, value.clone() if value.untyped_storage()._cdata in memory else value)
        for place, value in zip(there, here, strict=True)
        if place is not value
    )


def shapes_and_dtypes(tensors: Iterable[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def copy_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second one of its shape and dtype, with a launch for every dtype."""
    by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        by_type.setdefault(pair[0].dtype, []).append(pair)
    for group in by_type.values():
        torch._foreach_copy_(*map(list, zip(*group, strict=True)))


_allowed = True
_failed = False
_kept: list[Tensor] = []  # what captures allocated that failed


def allow(allowed: bool) -> None:
    """Allow or forbid capturing from now on, as ComfyUI's command line asks."""
    global _allowed
    _allowed = allowed


@contextmanager
def eager() -> Iterator[None]:
    """In this context no new run captures steps."""
    before = _allowed
    allow(False)
    try:
        yield
    finally:
        allow(before)


def give_up(why: str) -> None:
    """Capture nothing any more in this process, and say so once."""
    global _failed
    if not _failed:
        log.warning("CUDA graphs are off until ComfyUI is restarted, which makes steps slower: %s", why)
    _failed = True


def supports_graphs(device: torch.device) -> bool:
    """Can steps be captured on this device? Only on NVIDIA GPUs.

    HIP, which ROCm reports as ``cuda``, may end the process on a capture that CUDA refuses with an error.
    """
    return device.type == "cuda" and torch.version.hip is None


def allocates_in_graphs(device: torch.device) -> bool:
    """Is what a capture allocates a part of its graph? With cudaMallocAsync, ComfyUI's default on NVIDIA GPUs, it has
    an address at once, but memory only while the graph runs."""
    return supports_graphs(device) and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def capturable(device: torch.device) -> bool:
    """Are steps captured on this device: can they be, is it allowed, and has it not failed before?"""
    return supports_graphs(device) and _allowed and not _failed and not switches.on(switches.NO_GRAPHS)


_recording = False
uninterrupted: Callable[[], AbstractContextManager] = nullcontext  # in it, ComfyUI's layers do not interrupt a run


def recording() -> bool:
    """Is a step being captured? Then no value may be read on the host."""
    return _recording


@contextmanager
def capturing() -> Iterator[None]:
    """In this context a step is being captured.

    Python's garbage collector is off: destroying a tensor or event may make calls that a capture forbids. No run is
    interrupted: that raises an error in any layer.
    """
    global _recording
    with uninterrupted():
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
    """The captured steps of one kind of run, by key.

    A step takes a state to the next one. The states of captured steps are in memory of their own, one for all states of
    the same shapes: a graph reads it, and at its end overwrites that of the next state. So nothing that a capture
    allocates outlives it, and all graphs can share one pool of memory, whatever the allocator.

    pads: are all steps of a run padded to the same shapes? Every other shape is another capture. True on devices
    that can capture, even without graphs: sums of other lengths round differently, which may change the image.
    """

    def __init__(self, device: torch.device):
        self.device, self.active, self.pads = device, self.may_capture(device), supports_graphs(device)
        self._graphs: dict[Hashable, _Graph] = {}
        self._called: dict[Hashable, Any] = {}  # what the first call returned
        self._pool: Any = None

    @staticmethod
    def may_capture(device: torch.device) -> bool:
        """Would a new run capture its steps?"""
        return capturable(device)

    def __call__(self, key: Hashable, step: Callable[[T], T], state: T) -> T:
        """step(state). The key identifies everything that is not a tensor: shapes, settings, the branches of a step.

        ``state`` is used up, and the result is valid until the next call. The first call only calls the step; the
        second captures it, and from then on the graph is replayed. If a GPU refuses to capture or launch a graph,
        nothing was executed: this and all further steps are called. (An error of an earlier launch is raised again by
        the step, and ends the run.) Raises OutOfMemoryError without graphs, so that there is room for the next run.
        """
        if not self.active:
            return step(state)
        if key not in self._called:
            self._called[key] = step(state)
            return self._called[key]
        captured = self._graphs.pop(key, None)
        try:
            places = self._places(state) if captured is None else captured.places
            put(places, state)
            state = places  # also for a call, if the GPU refuses: leaves of the given one may be overwritten now
            captured = captured or self._capture(step, places, self._places(self._called[key], places))
            captured.graph.replay()
        except RuntimeError as error:
            self.forget()
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            self.active = False
            give_up(str(error))
            return step(state)
        if len(self._graphs) == MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest], self._called[oldest]
        self._graphs[key], self._called[key] = captured, None  # as the last one
        return captured.after

    def forget(self) -> None:
        """Drop all graphs, and the memory of their intermediate results."""
        self._graphs, self._pool = {}, None
        self._called.clear()

    def _places(self, state: T, *known: Any) -> T:
        """Memory for a state of these shapes: one of ``known``, that of another graph, or copies of its tensors."""
        known = (*known, *(places for each in self._graphs.values() for places in (each.places, each.after)))
        shapes = shapes_and_dtypes(leaves(state))
        fitting = next((places for places in known if shapes_and_dtypes(leaves(places)) == shapes), None)
        if fitting is None:
            return map_tensors(lambda t: t.clone(memory_format=torch.contiguous_format), state)
        place = iter(leaves(fitting))
        return map_tensors(lambda _: next(place), state)  # what is no tensor may differ

    def _capture(self, step: Callable[[T], T], places: T, results: T) -> _Graph:
        """Record the launches of a step, and of the copies of what it returns to ``results``."""

        def in_place() -> T:
            after = step(places)
            put(results, after)
            place = iter(leaves(results))
            return map_tensors(lambda _: next(place), after)

        graph, after = self._record_with_room(in_place)
        return _Graph(graph, step, places, after)

    def _record_with_room(self, run: Callable[[], T]) -> tuple[Any, T]:
        """As ``_record``; again where torch's own allocator has memory that it does not give back during a capture."""
        try:
            return self._record(run)
        except torch.OutOfMemoryError:
            if allocates_in_graphs(self.device):
                raise
        torch.cuda.empty_cache()
        return self._record(run)

    def _record(self, run: Callable[[], T]) -> tuple[Any, T]:
        """Record the launches of ``run``, without executing them. Returns the graph and the result.

        With cudaMallocAsync, what a capture allocated has memory in the graph alone: torch ends the process if it is
        freed later. So an error after which the capture goes on, such as ComfyUI's interruption, frees what it holds
        before the capture ends. What one that breaks the capture holds is never freed.
        """
        with capturing(), self._recorder() as graph:
            try:
                outcome: T | BaseException = run()
            except BaseException as error:
                if breaks_captures(error, self.device):
                    if allocates_in_graphs(self.device):
                        _kept.extend(find_tensors(error))
                    raise
                outcome = without_frames(error)
            self._free_workspaces()
        if isinstance(outcome, BaseException):
            raise outcome
        return graph, outcome

    @contextmanager
    def _recorder(self) -> Iterator[Any]:
        """In this context, launches are recorded in the graph that it yields. (``torch.cuda.graph`` would also empty
        the allocator's cache and collect Python's garbage, which can take longer than the rest.)"""
        if not self._graphs:  # a pool ends with its last graph, which may be one whose capture was interrupted
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        self._free_workspaces()
        with torch.cuda.stream(capture_stream(self.device)):
            try:
                # Other threads may use the GPU during the capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
            except BaseException:
                end_allocation(self.device, self._pool)
                raise

    @staticmethod
    def _free_workspaces() -> None:
        """Free the memory that cuBLAS has for each stream. Other libraries do it, too (``torch.compile``), so that of a
        graph must be its own: allocated and freed in the capture."""
        torch._C._cuda_clearCublasWorkspaces()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Is it a lack of memory? With cudaMallocAsync a graph gets its memory at its launch, which torch reports as any
    other error of the GPU."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def breaks_captures(error: BaseException, device: torch.device) -> bool:
    """May a capture be over with this error, as with errors of the GPU? It goes on after those of Python, and after a
    lack of memory that torch's own allocator notices."""
    unharmed = isinstance(error, torch.OutOfMemoryError) and not allocates_in_graphs(device)
    return isinstance(error, RuntimeError) and not unharmed


def without_frames(error: BaseException) -> BaseException:
    """An error, and those it came from, without the functions that they went through and what these hold."""
    each: BaseException | None = error
    while each:
        each.__traceback__, each = None, each.__context__
    return error


def find_tensors(error: BaseException) -> list[Tensor]:
    """The tensors in local variables of the functions that an error went through: in their dataclasses (with what one
    remembers besides its fields), tuples, lists and dicts, too."""
    todo: list[Any] = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    found, seen = [], {}
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each  # alive, so that no other object has its id
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            todo.extend(each)
        elif isinstance(each, dict) or is_dataclass(each) and not isinstance(each, type):
            todo.extend((each if isinstance(each, dict) else vars(each)).values())
    return found


def end_allocation(device: torch.device, pool: Any) -> None:
    """Repair what torch leaves of a capture that failed.

    CUDAGraph.capture_end() tells the allocator that a capture is over only after cudaStreamEndCapture(), which fails,
    too: no memory would go back to the GPU any more. Up to torch 2.11 the random generator would believe for ever that
    it is being captured.
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool
    try:
        end(device.index, pool)
    except RuntimeError:  # capture_end() came that far: the graph releases the pool, and twice would end the process
        return
    torch._C._cuda_releasePool(device.index, pool)


def return_memory(device: torch.device) -> None:
    """Give the GPU back what dropped graphs used. With cudaMallocAsync it stays in the driver's pool for graphs, which
    torch does not trim."""
    if allocates_in_graphs(device):
        torch.cuda.synchronize(device)
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        driver.cuDeviceGraphMemTrim(device.index)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a GPU's steps are captured. torch's default one belongs to the first GPU that captured."""
    return torch.cuda.Stream(device)
