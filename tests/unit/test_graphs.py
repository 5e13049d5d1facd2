"""Captured steps: the same results as calling them, whatever changes between calls; and what cannot be captured."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from comfyui_specar.device import graphs, switches
from comfyui_specar.device.graphs import Graphs, leaves, map_tensors

from ..support.tape import Pool, Tape, TapeGraphs


@dataclass(frozen=True)
class State:
    x: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    name: str = "n"


def test_a_replayed_step_computes_what_a_called_one_does():
    memory, plain = torch.zeros(4), torch.zeros(4)

    def step_over(memory):
        def step(state: State) -> State:
            memory.add_(state.x)
            memory[1:2] += 1
            y = state.x.view(2, 2).t().reshape(-1) + memory
            return State(y, (y[:2].cumsum(0), state.parts[1] * 2), state.name)

        return step

    tape = TapeGraphs(torch.device("cpu"))
    one = two = State(torch.arange(4.0), (torch.ones(2), torch.ones(3)))
    for _ in range(6):
        one = tape("k", step_over(memory), one)
        two = step_over(plain)(two)
        assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(two), strict=True))
        assert torch.equal(memory, plain)
        two = map_tensors(torch.Tensor.clone, two)
    assert (tape.captured, tape.replayed) == (1, 4)


@pytest.mark.parametrize(
    ("step", "turned"),
    [
        (lambda one, two: (two, one + two), lambda one, two: (one, two)),
        (lambda one, two: (one + two, one), lambda one, two: (one, two)),
        (lambda one, two: (one + 1, two * 3), lambda one, two: (two, one)),
    ],
    ids=["the second becomes the first", "the first the second", "the caller turns them round"],
)
@pytest.mark.parametrize("refused", [0, 4])
def test_values_that_change_places_are_not_lost(step, turned, refused, may_fail, monkeypatch):
    """They are copied over one another before a launch, also before one that a GPU then refuses."""
    tape, wanted = TapeGraphs(torch.device("cpu")), (1, 2)
    state = torch.tensor([1.0]), torch.tensor([2.0])
    for number in range(8):
        if refused and number == refused:
            monkeypatch.setattr(Tape, "replay", Mock(side_effect=RuntimeError("CUDA error: unknown error")))
        state = turned(*tape("k", lambda each: step(*each), state))
        wanted = turned(*step(*wanted))
        assert tuple(int(x) for x in state) == wanted
    assert tape.active == (not refused)


def test_what_a_step_hands_on_is_copied_once():
    """And what it computes is not copied at all, if the next call is given it; another state is, in full."""
    tape, copies = TapeGraphs(torch.device("cpu")), []
    fixed, x = torch.tensor([3.0]), torch.ones(1)

    def step(state):
        return state[0], state[1] * state[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            graphs, "copy_together", lambda pairs: copies.append(len([there.copy_(new) for there, new in pairs]))
        )
        state = fixed, x
        for _ in range(5):
            state = tape("k", step, state)
        assert state[1].tolist() == [3**5] and copies == [2, 1, 0, 0, 0]  # the second is part of the capture
        state = tape("k", step, (fixed + 2, x))
        assert state[1].tolist() == [5] and copies[5:] == [2]
        state = tape("k", step, (state[0], x + 1))
        assert state[1].tolist() == [10] and copies[6:] == [1]


def test_graphs_of_other_keys_take_the_state_where_it_is():
    tape, state = TapeGraphs(torch.device("cpu")), (torch.ones(1), torch.full((1,), 2.0))
    for number in range(20):
        state = tape(number % 2, lambda pair, n=number % 2: (pair[n], pair[0] + pair[1]), state)
    wanted = [1, 2]
    for number in range(20):
        wanted = [wanted[number % 2], sum(wanted)]
    assert [int(x) for x in state] == wanted and tape.captured == 2
    assert len({id(leaf) for graph in tape._graphs.values() for leaf in leaves(graph.places)}) == 2


def test_a_step_that_changes_shapes_is_called(may_fail, caplog):
    tape, x = TapeGraphs(torch.device("cpu")), torch.ones(1)
    for _ in range(3):
        x = tape("k", lambda x: torch.cat((x, x)), x)
    assert len(x) == 8 and not tape.active and "changes the shapes" in caplog.text


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x * int(x.sum()),
        lambda x: x[x > 0] + 1,
        lambda x: x.nonzero()[:, 0] + 2.0,
        lambda x: x.masked_select(x > 0) + 1,
    ],
)
def test_a_step_that_reads_the_device_is_not_captured(may_fail, caplog, step):
    """Its shapes may depend on values, too. Neither is any other one of the process afterwards."""
    for _ in range(2):
        tape = TapeGraphs(torch.device("cpu"))
        for _ in range(3):
            assert torch.equal(tape("k", step, torch.ones(2)), step(torch.ones(2)))
        assert not tape.active and not tape._graphs and tape._pool is None
        assert caplog.text.count("CUDA graphs are off") == 1


def test_a_graph_that_is_not_launched_is_called_instead(may_fail, caplog, monkeypatch):
    """With the state of this call, on memory as the calls before left it."""
    tape, memory, x = TapeGraphs(torch.device("cpu")), torch.zeros(1), torch.zeros(1)

    def step(x):
        memory.add_(1)
        return x + memory

    for number in range(1, 7):
        if number == 4:
            monkeypatch.setattr(Tape, "replay", Mock(side_effect=RuntimeError("CUDA error: unknown error")))
        x = tape("k", step, x)
        assert x.tolist() == [number * (number + 1) / 2]
        assert tape.active == (number < 4)
    assert tape.captured == 1 and caplog.text.count("CUDA graphs are off") == 1


GPU = torch.device("cuda:0")


@pytest.fixture
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_GRAPHS, raising=False)


def test_steps_are_captured_on_nvidias_gpus_alone_unless_that_is_switched_off(nvidia, monkeypatch):
    assert Graphs(GPU).active
    assert not any(Graphs(torch.device(name)).active for name in ("cpu", "mps", "xpu", "privateuseone"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4.43482")  # a GPU of AMD, which torch calls cuda
        assert not Graphs(GPU).active
    with monkeypatch.context() as patch:
        patch.setenv(switches.NO_GRAPHS, "1")
        assert not Graphs(GPU).active
    with graphs.eager():
        assert not Graphs(GPU).active
    assert Graphs(GPU).active


@pytest.fixture
def simulated(nvidia, monkeypatch):
    """torch's functions for captures on GPUs that are not there: the list of what they were asked, in order."""
    asked = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            asked.append(("begin", self.stream[-1]))

        def capture_end(self):
            asked.append(("end", self.stream[-1]))

        def replay(self):
            asked.append("replay")

        stream = ["current"]  # noqa: RUF012

    @contextmanager
    def on(stream):
        Graph.stream.append(stream.place)
        yield
        Graph.stream.pop()

    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "stream": on,
        "Stream": lambda device: SimpleNamespace(place=f"stream of {device}"),
        "synchronize": lambda device: None,
        "get_allocator_backend": lambda: "native",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append("workspaces"), raising=False)
    graphs.capture_stream.cache_clear()
    yield asked
    graphs.capture_stream.cache_clear()


def test_every_gpu_captures_on_a_stream_of_its_own(simulated):
    """cuBLAS's workspace is allocated and freed in the capture: any library may free one from before it."""
    for gpu in (GPU, torch.device("cuda:1"), GPU):
        simulated.clear()
        kept = Graphs(gpu)
        for _ in range(2):
            kept("k", lambda x: simulated.append("step") or x + 1, torch.ones(1))
        where = f"stream of {gpu}"
        capture = ["workspaces", ("begin", where), "step", "workspaces", ("end", where)]
        assert kept.active and simulated == ["step", *capture, "replay"]


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_step_is_captured(may_fail, collects):
    """What the collector destroys may call the GPU, which would break the capture. It is as before afterwards."""
    seen = []
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        tape = TapeGraphs(torch.device("cpu"))
        for _ in range(2):
            tape("k", lambda x: seen.append(gc.isenabled()) or x + 1, torch.ones(1))
        assert seen == [collects, False] and gc.isenabled() is collects
        for _ in range(2):
            tape("fails", lambda x: x + int(x), torch.ones(1))
        assert not tape.active and gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), torch.OutOfMemoryError("full"), KeyError()])
def test_what_a_broken_capture_allocated_is_never_freed(simulated, may_fail, monkeypatch, error, in_graphs):
    """Where it is a part of the graph: torch would end the process. What any other error holds is freed at once."""
    kept, alive = [], []
    monkeypatch.setattr(graphs, "_kept", kept)
    monkeypatch.setattr(graphs, "allocates_in_graphs", lambda device: in_graphs)
    monkeypatch.setattr(graphs, "end_allocation", lambda device, pool: None)

    def step(x):
        made = x * 2
        if graphs.recording():
            alive.append(weakref.ref(made))
            raise error
        return made

    tape = Graphs(GPU)
    tape("k", step, torch.ones(1))
    with nullcontext() if type(error) is RuntimeError else pytest.raises(type(error)):
        tape("k", step, torch.ones(1))
    broken = isinstance(error, RuntimeError) and (in_graphs or not isinstance(error, torch.OutOfMemoryError))
    tries = 1 + (type(error) is torch.OutOfMemoryError and not in_graphs)
    assert simulated.count("workspaces") == tries * (1 + (not broken)), "what it allocated is freed while it goes on"
    assert broken or alive[0]() is None
    assert any(tensor is alive[0]() for tensor in kept) == (broken and in_graphs)


def test_tensors_are_found_wherever_a_function_holds_them():
    state, named = State(torch.ones(1), (torch.ones(2),)), {"x": [torch.ones(3)]}
    object.__setattr__(state, "_remembered", torch.ones(4))
    named["itself"] = named

    def fails(state, **named):
        raise RuntimeError(state.name)

    with pytest.raises(RuntimeError) as caught:
        fails(state, **named)
    assert {len(tensor) for tensor in graphs.find_tensors(caught.value)} == {1, 2, 3, 4}


def test_a_lack_of_memory_goes_on_to_the_caller_and_leaves_no_graphs(may_fail, caplog, monkeypatch):
    """At a launch, where a graph gets its memory with cudaMallocAsync, or while it is captured. The next run captures
    again."""
    full = RuntimeError("CUDA error: out of memory")  # as torch reports it

    class Run:
        cache = torch.zeros(1000)

    def run():
        tape, held = TapeGraphs(torch.device("cpu")), Run()
        alive = weakref.ref(held)
        for _ in range(3):
            tape("k", lambda x: x + held.cache[0], torch.zeros(4))
        return tape, alive

    for name in ("replay", "__enter__"):
        with monkeypatch.context() as patch:
            patch.setattr(Tape, name, Mock(side_effect=full))
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                run()
    tape, alive = run()
    assert tape.active and tape.captured == 1 and not graphs._kept and "CUDA graphs" not in caplog.text
    tape.forget()
    assert alive() is None


def test_memory_that_is_merely_cached_is_given_back_for_a_capture(simulated, monkeypatch):
    """torch's own allocator does not do so while it lasts."""
    tape, cached = Graphs(GPU), [True]
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)

    def step(x):
        if graphs.recording() and cached:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + 1

    for number in range(3):
        simulated.clear()
        tape("k", step, torch.ones(1))
        assert simulated.count("replay") == (number > 0)
    assert tape.active and not cached


def test_a_pool_is_not_used_after_its_last_graph(simulated, monkeypatch):
    """torch refuses it: nothing keeps the pool of a capture that was interrupted."""
    handles = iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    tape, errors, pools = Graphs(GPU), [KeyError(), None, None], []

    def step(x):
        if graphs.recording():
            pools.append(tape._pool)
            if error := errors.pop(0):
                raise error
        return x + 1

    for key in ("one", "two"):
        tape(key, step, torch.ones(1))
    with pytest.raises(KeyError):
        tape("one", step, torch.ones(1))
    for key in ("one", "two"):
        tape(key, step, torch.ones(1))
    assert pools == [1, 2, 2]


def test_what_is_no_tensor_stays_with_its_state():
    """States of other shapes of trees may have the same shapes of tensors."""
    tape = TapeGraphs(torch.device("cpu"))

    def doubled(state: State) -> State:
        return State(state.x * len(state.name), state.parts, state.name)

    for _ in range(3):
        for name in ("n", "nnn"):
            assert tape(name, doubled, State(torch.ones(2), (), name)).x.tolist() == [len(name)] * 2


def test_the_number_of_graphs_has_a_bound():
    """Those replayed last stay."""
    tape, x = TapeGraphs(torch.device("cpu")), torch.zeros(1)
    for number in range(2 * graphs.MOST_GRAPHS):
        for key in (number, "again"):
            for _ in range(2):
                x = tape(key, lambda x: x + 1, x)
    assert len(tape._graphs) == graphs.MOST_GRAPHS and tape.captured == 2 * graphs.MOST_GRAPHS + 1
    assert list(tape._graphs)[-1] == "again" and int(x) == 8 * graphs.MOST_GRAPHS


def test_nobody_interrupts_a_capture(monkeypatch):
    """Layers of ComfyUI do; what was asked for before is raised instead of it."""
    tape, held = TapeGraphs(torch.device("cpu")), []

    @contextmanager
    def uninterrupted():
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(graphs, "uninterrupted", uninterrupted)
    seen = []
    for _ in range(3):
        tape("k", lambda x: seen.append(len(held)) or x + 1, torch.ones(1))
    assert seen == [0, 1]


def test_what_a_capture_allocates_must_not_outlive_it():
    """Another replay would overwrite it; under cudaMallocAsync it could not be given back."""
    tape, holder = TapeGraphs(torch.device("cpu")), {}

    def keeping(x):
        holder["last"] = x * 2
        return x + holder["last"].view(1, 1)[0]

    tape("k", keeping, torch.ones(1))
    with pytest.raises(AssertionError, match="outlives"):
        tape("k", keeping, torch.ones(1))


def test_replays_overwrite_what_others_left_in_the_pool():
    """What a graph reads before it writes is garbage: another graph had this memory."""
    tape, places = TapeGraphs(torch.device("cpu")), [torch.zeros(3) for _ in range(2)]
    for _ in range(3):
        for key in range(2):
            places[key] = tape(key, lambda x: torch.empty(3).add_(x * 0).nan_to_num(nan=-1.0), places[key])
    assert all(place.tolist() == [-1, -1, -1] for place in places)


def test_the_pool_hands_out_blocks_again():
    pool, size = Pool(), 3000
    first, second = (pool.moved(torch.full((size,), n, dtype=torch.uint8), "") for n in range(2))
    place = first.data_ptr()
    del first
    third, fourth = (pool.moved(torch.full((size - n,), n, dtype=torch.uint8), "") for n in range(2, 4))
    assert third.data_ptr() == place and fourth.data_ptr() > second.data_ptr()
    assert all((each == n).all() for n, each in ((1, second), (2, third), (3, fourth)))
    view = pool.moved(torch.arange(8.0).view(2, 4), "")[:, 1::2]
    assert pool.note(view).tolist() == view.tolist() and len(pool.taken) == 4


@pytest.mark.parametrize("end", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
@pytest.mark.parametrize("ended", [False, True])
def test_the_allocator_learns_that_a_failed_capture_is_over(simulated, may_fail, monkeypatch, caplog, end, ended):
    """torch up to 2.7 calls it otherwise. A capture that has ended, so that only its graph is missing, is refused."""
    done = []

    def over(*where):
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        done.append(("over", *where))

    def released(*where):
        done.append(("released", *where))

    generator = Mock()
    generator.clone_state = lambda: "a state that is not captured"

    def refuse(*given, **named):  # nothing is executed
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    for name, function in ((end, over), ("_cuda_releasePool", released)):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    kept = Graphs(GPU)
    assert [kept("k", lambda x: x + 1, torch.ones(1)).item() for _ in range(3)] == [2, 2, 2]
    assert done == ([] if ended else [("over", 0, (0, 1)), ("released", 0, (0, 1))]), "twice would end the process"
    generator.graphsafe_set_state.assert_called_once_with("a state that is not captured")
    assert not kept.active and not Graphs(GPU).active
    assert caplog.text.count("CUDA graphs are off") == 1


@pytest.mark.parametrize(("system", "library"), [("nt", "nvcuda.dll"), ("posix", "libcuda.so.1")])
def test_the_memory_of_dropped_graphs_goes_back_to_the_gpu(nvidia, monkeypatch, system, library):
    trimmed = []
    monkeypatch.setattr(graphs, "os", SimpleNamespace(name=system))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: trimmed.append("synchronized"))
    monkeypatch.setattr(
        graphs.ctypes,
        "CDLL",
        lambda name: SimpleNamespace(cuDeviceGraphMemTrim=lambda device: trimmed.append((name, device))),
    )
    for backend in ("native", "cudaMallocAsync"):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        for device in (torch.device("cpu"), torch.device("cuda:1")):
            graphs.return_memory(device)
    assert trimmed == ["synchronized", (library, 1)]
