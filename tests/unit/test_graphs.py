"""Captured steps: the same results as calling them, whatever changes between calls; and what cannot be captured."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from comfyui_specar.kernels import graphs, switches
from comfyui_specar.kernels.graphs import Graphs, leaves, mapped
from comfyui_specar.samplers.engine.session import Poll

from ..support.tape import Tape, TapeGraphs


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
            return State(y, (y[:2].cumsum(0), state.parts[0] * 2), state.name)

        return step

    tape = TapeGraphs(torch.device("cpu"))
    one = two = State(torch.arange(4.0), (torch.ones(2), torch.ones(3)))
    for _ in range(6):
        one = tape("k", step_over(memory), one)
        two = step_over(plain)(two)
        assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(two), strict=True))
        assert torch.equal(memory, plain)
        two = mapped(torch.Tensor.clone, two)
    assert (tape.captured, tape.replayed) == (1, 4)


def test_values_that_change_places_are_not_lost():
    tape, pair = TapeGraphs(torch.device("cpu")), (torch.ones(1), torch.ones(1))
    for _ in range(8):  # Fibonacci: the second becomes the first
        pair = tape("k", lambda pair: (pair[1], pair[0] + pair[1]), pair)
    assert [int(x) for x in pair] == [34, 55]
    for _ in range(4):
        pair = tape("j", lambda pair: (pair[0] + pair[1], pair[0]), pair)
    assert [int(x) for x in pair] == [34 * 5 + 55 * 3, 34 * 3 + 55 * 2]


def test_what_a_step_hands_on_is_copied_once():
    """A constant comes back as it was given; another one is noticed, and so is what another graph writes."""
    tape, copies = TapeGraphs(torch.device("cpu")), []
    fixed, x = torch.tensor([3.0]), torch.ones(1)

    def step(state):
        return state[0], state[1] * state[0]

    def other(state):
        return state[0] + 1, state[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "copy_together", lambda pairs: copies.append(
            len([there.copy_(new) for there, new in pairs])))
        state = fixed, x
        for _ in range(5):
            state = tape("k", step, state)
            assert state[0] is fixed
        assert state[1].tolist() == [3**5] and copies == [2, 1, 1, 1]
        state = tape("k", step, (fixed + 2, x))
        assert state[1].tolist() == [5] and copies[-1] == 2
        for _ in range(3):
            state = tape("j", other, state)
        assert state[0].tolist() == [8] and state[1].tolist() == [5]
        for number in range(9, 12):
            state = tape("j", other, tape("k", step, (state[0], x)))
            assert state[0].tolist() == [number] and state[1].tolist() == [number - 1]


def test_of_many_shapes_only_those_are_captured_that_repeat():
    tape, captured = TapeGraphs(torch.device("cpu")), []
    for key in range(40):
        for _ in range(2):
            assert tape(key, lambda x: x + 1, torch.ones(1)).item() == 2
        captured.append(tape.captured)
    assert captured == [1, 2, 3, 4] + [4] * 36, "the first ones are captured at once"
    for _ in range(4):
        tape(39, lambda x: x + 1, torch.ones(1))
    assert tape.captured == 5


def test_a_step_that_reads_the_device_is_not_captured(caplog):
    tape = TapeGraphs(torch.device("cpu"))
    for _ in range(3):
        assert tape("k", lambda x: x + int(x.sum()), torch.ones(2)).tolist() == [3, 3]
    assert not tape.active and "without CUDA graphs" in caplog.text and caplog.text.count("without") == 1


def test_a_graph_that_is_not_launched_is_called_instead(caplog, monkeypatch):
    """With the inputs of this call, on memory as the calls before left it."""
    tape, memory = TapeGraphs(torch.device("cpu")), torch.zeros(1)

    def refuse(self):
        raise RuntimeError("CUDA error: out of memory")

    def step(x):
        memory.add_(x)
        return memory + 1

    for number in range(1, 7):
        if number == 4:
            monkeypatch.setattr(Tape, "replay", refuse)
        assert tape("k", step, torch.full((1,), float(number))).tolist() == [sum(range(number + 1)) + 1]
        assert tape.active == (number < 4)
    assert tape.captured == 1 and caplog.text.count("without CUDA graphs") == 1


@pytest.mark.parametrize("shape", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.masked_select(x > 0)])
def test_shapes_that_depend_on_values_are_not_captured(shape):
    tape = TapeGraphs(torch.device("cpu"))
    for _ in range(2):
        tape("k", shape, torch.ones(2))
    assert not tape.active


GPU = torch.device("cuda:0")


@pytest.fixture
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_GRAPHS, raising=False)


def test_steps_are_captured_on_nvidias_gpus_alone(nvidia, monkeypatch):
    assert Graphs(GPU).active
    assert not any(Graphs(torch.device(name)).active for name in ("cpu", "mps", "xpu", "privateuseone"))
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")  # a GPU of AMD, which torch calls cuda
    assert not Graphs(GPU).active


def test_capturing_can_be_switched_off(nvidia, monkeypatch):
    monkeypatch.setenv(switches.NO_GRAPHS, "1")
    assert not Graphs(GPU).active
    monkeypatch.delenv(switches.NO_GRAPHS)
    graphs.allow(False)
    try:
        assert not Graphs(GPU).active
    finally:
        graphs.allow(True)
    assert Graphs(GPU).active


def test_every_gpu_captures_on_a_stream_of_its_own(nvidia, monkeypatch):
    streams = []

    def capture(graph, pool=None, stream=None, capture_error_mode="global"):
        streams.append(stream)
        return nullcontext()

    for name, stand_in in {
        "graph_pool_handle": object, "CUDAGraph": Mock, "current_stream": object, "graph": capture,
        "stream": lambda stream: nullcontext(), "Stream": lambda device: f"on {device}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs.capture_stream.cache_clear()
    for gpu in (GPU, torch.device("cuda:1"), GPU):
        kept = Graphs(gpu)
        for _ in range(2):
            kept("k", lambda x: x + 1, torch.ones(1))
        assert kept.active
    graphs.capture_stream.cache_clear()
    assert streams == ["on cuda:0", "on cuda:1", "on cuda:0"]


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_step_is_captured(collects):
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


def test_a_poll_on_the_cpu_is_never_late():
    poll = Poll(torch.device("cpu"), 2)
    assert poll.lag == 0 and poll(torch.tensor([1, 2])).tolist() == [1, 2]


def test_memory_that_one_capture_takes_is_not_given_back_in_another():
    """Under cudaMallocAsync it would be freed as a node of a graph that never took it."""
    tape, holder = TapeGraphs(torch.device("cpu")), {}

    def keeping(x):
        holder["last"] = x * 2
        return x + holder["last"].view(1, 1)[0]

    keys = ("j", "k")
    for key in keys:
        tape(key, keeping, torch.ones(1))
    tape("j", keeping, torch.ones(1))
    with pytest.raises(AssertionError, match="mul"):
        tape("k", keeping, torch.ones(1))
