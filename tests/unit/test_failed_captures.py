"""A capture may fail at any of its operations: the image is the same, it is said once, and nothing is tried again."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.kernels import graphs
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from torch import Tensor

from ..support.tape import Tape, TapeGraphs
from ..support.toy import ToyDrafter, ToyModel, plain, request

LAYOUT = plain(2, 3)
MODEL = ToyModel(LAYOUT)
DRAFTER = ToyDrafter(MODEL)
METHODS = {
    "next token": NextToken(),
    "sjd": SJD(3),
    "chain": DraftTree(DRAFTER, Chain(2)),
    "static": DraftTree(DRAFTER, Static(((0,), (1,), (0, 0)))),
    "dynamic": DraftTree(DRAFTER, Dynamic(2, 2, 3)),
}


class FailingTape(Tape):
    """Fails at operation number ``last``. As in a capture, the operations before it have written nothing then."""

    last = 0

    def __init__(self, pool):
        super().__init__(pool)
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that was written, as it was

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if len(self.calls) == self.last:
            for memory, content in self.before.values():
                memory.copy_(content)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        written = (
            value
            for value, argument in zip(args, operation._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        for tensor in (tensor for tensor in graphs.leaves(list(written)) if not self.pool.holds(tensor)):
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        return super().__torch_dispatch__(operation, types, args, kwargs)


@pytest.fixture
def failing(on_tape, monkeypatch):
    """A function that lets captures fail at an operation, whatever failed before; it returns the graphs made since."""
    monkeypatch.setattr(TapeGraphs, "tape", FailingTape)

    def at(last: int) -> list[TapeGraphs]:
        graphs._failed = False
        FailingTape.last = last
        on_tape.clear()
        return on_tape

    yield at
    graphs._failed = False


@pytest.mark.parametrize("name", METHODS)
def test_a_capture_that_fails_costs_time_alone(name, failing, monkeypatch, caplog):
    method, asked = METHODS[name], request(MODEL, LAYOUT, seed=5, batch=2)
    MODEL.sessions.clear()
    made = failing(10**9)
    wanted = method.sample(asked).tokens
    [tape] = [captured.graph for captured in made[0]._graphs.values()]
    MODEL.sessions.clear()
    for last in sorted({*range(0, len(tape.calls), max(1, len(tape.calls) // 12)), len(tape.calls) - 1}):
        made, _ = failing(last), caplog.clear()
        for _ in range(2):
            assert torch.equal(method.sample(asked).tokens, wanted), last
        assert [(each.captured, each.active, each._graphs, each._pool) for each in made] == [(0, False, {}, None)] * 2
        assert caplog.text.count("CUDA graphs are off") == 1 and not MODEL.sessions


def test_the_next_process_tries_again(failing):
    MODEL.sessions.clear()
    failing(3)
    NextToken().sample(request(MODEL, LAYOUT))
    made = failing(10**9)
    NextToken().sample(request(MODEL, LAYOUT))
    assert made[0].captured == 1 and made[0].replayed and isinstance(session.Graphs(torch.device("cpu")), TapeGraphs)
