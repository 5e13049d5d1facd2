"""A capture may fail at any of its operations, or replay something else than was captured, for which the first image of
a model is looked at: the image is the same, it is said once, and nothing is tried again."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.device import graphs
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import Auto
from comfyui_specar.samplers.drafts.costs import USUAL
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine import first_use
from comfyui_specar.samplers.generate import generate
from comfyui_specar.samplers.methods import speculative
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from torch import Tensor

from ..support import tiny_masked
from ..support.tape import Tape, TapeGraphs
from ..support.toy import ToyDrafter, ToyModel, plain, request

METHODS = {
    "next token": lambda drafter: NextToken(),
    "sjd": lambda drafter: SJD(3),
    "chain": lambda drafter: DraftTree(drafter, Chain(2)),
    "static": lambda drafter: DraftTree(drafter, Static(((0,), (1,), (0, 0)))),
    "dynamic": lambda drafter: DraftTree(drafter, Dynamic(2, 2, 3)),
}


def toy(name: str, layout=plain(2, 3)):
    """A model, a method with a drafter for it, and what they are asked."""
    model = ToyModel(layout)
    model.dequantize = lambda tokens: tokens.float()
    return model, METHODS[name](ToyDrafter(model)), request(model, layout, seed=5, batch=2)


# Captures that fail


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
            self.fail()
        written = (
            value
            for value, argument in zip(args, operation._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        for tensor in (tensor for tensor in graphs.leaves(list(written)) if not self.pool.holds(tensor)):
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def fail(self):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture
def failing(on_tape, monkeypatch, may_fail):
    """A function that lets captures fail at an operation, whatever failed before; it returns the graphs made since."""
    monkeypatch.setattr(TapeGraphs, "tape", FailingTape)

    def at(last: int) -> list[TapeGraphs]:
        graphs._failed = False
        FailingTape.last = last
        on_tape.clear()
        return on_tape

    return at


@pytest.mark.parametrize("name", METHODS)
def test_a_capture_that_fails_costs_time_alone(name, failing, caplog):
    model, method, asked = toy(name)
    made = failing(10**9)
    wanted = method.sample(asked).tokens
    [tape] = [captured.graph for captured in made[0]._graphs.values()]
    model.sessions.clear()
    for last in sorted({*range(0, len(tape.calls), max(1, len(tape.calls) // 12)), len(tape.calls) - 1}):
        made, _ = failing(last), caplog.clear()
        for _ in range(2):
            assert torch.equal(method.sample(asked).tokens, wanted), last
        assert [(each.captured, each.active, each._graphs, each._pool) for each in made] == [(0, False, {}, None)] * 2
        assert caplog.text.count("CUDA graphs are off") == 1 and not model.sessions


# Errors that are none of the capture's


class Interrupted(BaseException):
    """As ComfyUI's, which any of its layers may raise."""


class Interrupting(FailingTape):
    error: type[BaseException] = Interrupted

    def fail(self):
        Interrupting.last = -1
        raise self.error("not an error of the GPU")


@pytest.fixture(params=[False, True], ids=["native", "cudaMallocAsync"])
def in_graphs(request, on_tape, monkeypatch, may_fail) -> bool:
    """Both rules of allocators, and captures that fail at operation ``Interrupting.last`` with ``Interrupting.error``.
    Is what captures allocate a part of their graphs?"""
    monkeypatch.setattr(graphs, "allocates_in_graphs", lambda device: request.param)
    monkeypatch.setattr(graphs, "_kept", [])
    monkeypatch.setattr(TapeGraphs, "tape", Interrupting)
    monkeypatch.setattr(Interrupting, "last", -1)
    return request.param


@pytest.mark.parametrize("name", METHODS)
def test_an_interruption_frees_what_the_capture_allocated(name, in_graphs, monkeypatch):
    """At any of its operations, and before the capture ends, which the tape checks. The step is captured then."""
    _, method, asked = toy(name)
    every = 1 if name == "next token" else 50
    wanted, record, at = method.sample(asked).tokens, TapeGraphs._record, []

    def interrupted(self, run):
        while True:
            Interrupting.last = every * len(at)
            try:
                return record(self, run)
            except Interrupted:
                at.append(len(at))

    asked.model.sessions.clear()
    monkeypatch.setattr(TapeGraphs, "_record", interrupted)
    assert torch.equal(method.sample(asked).tokens, wanted)
    assert every * len(at) > 200 and not graphs._kept


@pytest.mark.parametrize("error", [Interrupted, torch.OutOfMemoryError])
def test_an_error_of_somebody_else_ends_the_run_and_nothing_more(error, in_graphs, on_tape, monkeypatch, caplog):
    """Later runs capture, and after an interruption in the same session."""
    model, method, asked = toy("chain")
    monkeypatch.setattr(Interrupting, "error", error)
    wanted = method.sample(asked).tokens
    interrupted = error is Interrupted
    for last in (0, 7, 40):
        model.sessions.clear()
        on_tape.clear()
        Interrupting.last = last
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda last=last: setattr(Interrupting, "last", last))  # in vain
        with pytest.raises(error):
            method.sample(asked)
        assert len(model.sessions) == interrupted, "what a full GPU holds goes at once"
        assert torch.equal(method.sample(asked).tokens, wanted)
        assert len(on_tape) == 2 - interrupted and on_tape[-1].active and on_tape[-1].captured == 1
    assert "CUDA graphs" not in caplog.text and bool(graphs._kept) == (in_graphs and not interrupted)


# The first image of a model


class Flatter(Tape):
    """A graph whose replays compute other probabilities than the step that was captured."""

    def replay(self):
        if not self.executed:
            self.calls = [
                (Root(operation) if any(name in str(operation) for name in ("softmax", "silu")) else operation, *rest)
                for operation, *rest in self.calls
            ]
        super().replay()


class Root:
    def __init__(self, operation):
        self.operation, self._schema = operation, operation._schema

    def __str__(self):
        return "our.root"

    def __call__(self, *given, **named):
        return self.operation(*given, **named).abs().sqrt()


def test_what_it_measures_is_given_to_both_runs(on_tape, costs_of_captures, caplog):
    """A GPU takes as long for a called pass of any width, and so grows another tree."""
    model, _, asked = toy("next token", plain(2, 6))
    for structure in (Auto(nodes=16, depth=4), ADTTree(pays=True)):
        first_use._checked.clear()
        on_tape.clear()
        method = DraftTree(ToyDrafter(model), structure)
        found = generate(method, asked)
        assert "CUDA graphs" not in caplog.text and on_tape[-1].active
        assert torch.equal(generate(method, asked).tokens, found.tokens)


def test_a_check_leaves_no_caches_beside_those_of_the_run(on_tape, monkeypatch):
    """ComfyUI has made room for one run."""
    model, _, asked = toy("next token", plain(2, 6))
    monkeypatch.setattr(speculative, "pass_costs", lambda *_: USUAL)
    method = DraftTree(ToyDrafter(model), ADTTree(pays=True))
    first_use.check_captured(method, asked)
    assert not model.sessions.keys() - {method.session_key(asked)}


@pytest.mark.parametrize("name", ["next token", "sjd", "chain"])
def test_it_is_checked_once_per_model(name, on_tape, caplog):
    _, method, asked = toy(name, plain(2, 6))
    found = [generate(method, asked).tokens for _ in range(2)]
    made = len(on_tape)
    generate(SJD(4), asked)
    assert len(on_tape) == made + 1, "another method is not tried"
    with graphs.eager():
        wanted = generate(method, asked).tokens
    assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)
    assert "CUDA graphs" not in caplog.text and sum(each.replayed for each in on_tape) > 4


@pytest.mark.parametrize("name", ["next token", "sjd", "chain"])
def test_steps_that_replay_something_else_are_not_captured(name, on_tape, may_fail, monkeypatch, caplog):
    model, method, asked = toy(name, plain(2, 6))
    with graphs.eager():
        wanted = generate(method, asked).tokens
    monkeypatch.setattr(TapeGraphs, "tape", Flatter)
    assert torch.equal(generate(method, asked).tokens, wanted)
    assert graphs._failed and not on_tape[-1].active and not model.sessions
    assert caplog.text.count("compute something else here") == 1


def test_a_near_tie_is_tried_again(may_fail, monkeypatch):
    """The first of two trials differs in a token."""
    called, other = (torch.tensor([[1, 2, -1]]), torch.full((1, 3), 0.5)), (torch.tensor([[1, 1, 3]]), torch.ones(1, 3))
    for outcomes, failed in (((called, other, called, called), False), ((called, other, called, other), True)):
        each = iter(outcomes)
        monkeypatch.setattr(first_use, "first_passes", lambda *given, each=each: next(each))
        monkeypatch.setattr(first_use.session, "Graphs", TapeGraphs)
        _, method, asked = toy("next token")
        first_use.check_captured(method, asked)
        assert graphs._failed == failed


def test_probabilities_are_compared_too():
    tokens, p = torch.tensor([[1, 2, -1]]), torch.tensor([[0.5, 0.25, 0.0]])
    assert first_use.agree((tokens, p), (tokens, p * 1.01))
    assert not first_use.agree((tokens, p), (tokens, p * 1.2))
    assert first_use.agree((tokens, p), (torch.tensor([[1, -1, 3]]), torch.tensor([[0.5, 0.0, 0.9]])))


@torch.inference_mode()
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", ["next token", "drafter"])
def test_models_of_vectors_are_checked_too(name, broken, on_tape, may_fail, monkeypatch, caplog):
    model, drafter = tiny_masked.tiny(1), tiny_masked.tiny(2)
    method = ContinuousNextToken() if name == "next token" else ContinuousSpeculative(drafter, 2)
    prompt = model.encode_features(torch.tensor([3.0]).view(1, -1, 1))
    asked = ContinuousRequest(model, prompt, model.grid, ContinuousParams(steps=3, cfg=2.0), seed=0, batch=2)
    if broken:
        monkeypatch.setattr(TapeGraphs, "tape", Flatter)
    first_use.check_captured(method, asked)
    assert ("captured steps compute something else" in caplog.text) == broken == graphs._failed
    assert sum(each.replayed for each in on_tape) > 4
