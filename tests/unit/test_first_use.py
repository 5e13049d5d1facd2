"""The first image of a model on a GPU compares captured steps with called ones."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.kernels import graphs
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.engine import first_use
from comfyui_specar.samplers.generate import generate
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree

from ..support import tiny_masked
from ..support.tape import Tape, TapeGraphs
from ..support.toy import ToyDrafter, ToyModel, plain, request

LAYOUT = plain(2, 6)


def toy() -> ToyModel:
    model = ToyModel(LAYOUT)
    model.dequantize = lambda tokens: tokens.float()
    return model


METHODS = {
    "next token": lambda drafter: NextToken(),
    "sjd": lambda drafter: SJD(3),
    "chain": lambda drafter: DraftTree(drafter, Chain(2)),
    "adaptive": lambda drafter: DraftTree(drafter, ADTTree()),
}
CAPTURED = [name for name in METHODS if name != "adaptive"]


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


@pytest.mark.parametrize("name", CAPTURED)
def test_it_is_checked_once_per_model(name, on_tape, caplog):
    model = toy()
    method = METHODS[name](ToyDrafter(model))
    asked = request(model, LAYOUT, seed=5, batch=2)
    found = [generate(method, asked).tokens for _ in range(2)]
    made = len(on_tape)
    generate(SJD(4), asked)
    assert len(on_tape) == made + 1, "another method is not tried"
    with graphs.eager():
        wanted = generate(method, asked).tokens
    assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)
    assert "CUDA graphs" not in caplog.text and sum(each.replayed for each in on_tape) > 4


def test_a_method_that_is_not_captured_leaves_the_check_to_the_next(on_tape):
    model = toy()
    asked = request(model, LAYOUT, seed=5, batch=2)
    generate(METHODS["adaptive"](ToyDrafter(model)), asked)
    assert len(on_tape) == 1 and model not in first_use._checked
    generate(NextToken(), asked)
    assert model in first_use._checked


@pytest.mark.parametrize("name", CAPTURED)
def test_steps_that_replay_something_else_are_not_captured(name, on_tape, monkeypatch, caplog):
    model = toy()
    method, asked = METHODS[name](ToyDrafter(model)), request(model, LAYOUT, seed=5, batch=2)
    with graphs.eager():
        wanted = generate(method, asked).tokens
    monkeypatch.setattr(TapeGraphs, "tape", Flatter)
    try:
        assert torch.equal(generate(method, asked).tokens, wanted)
        assert graphs._failed and not on_tape[-1].active and not model.sessions
        assert caplog.text.count("compute something else here") == 1
    finally:
        graphs._failed = False


def test_a_near_tie_is_tried_again(monkeypatch, caplog):
    """The first of two trials differs in a token."""
    called, other = (torch.tensor([[1, 2, -1]]), torch.full((1, 3), 0.5)), (torch.tensor([[1, 1, 3]]), torch.ones(1, 3))
    for outcomes, failed in (((called, other, called, called), False), ((called, other, called, other), True)):
        each = iter(outcomes)
        monkeypatch.setattr(first_use, "first_passes", lambda *given, each=each: next(each))
        monkeypatch.setattr(first_use.session, "Graphs", TapeGraphs)
        first_use.check_captured(NextToken(), request(toy(), LAYOUT))
        assert graphs._failed == failed
    graphs._failed = False


def test_probabilities_are_compared_too():
    tokens, p = torch.tensor([[1, 2, -1]]), torch.tensor([[0.5, 0.25, 0.0]])
    assert first_use.agree((tokens, p), (tokens, p * 1.01))
    assert not first_use.agree((tokens, p), (tokens, p * 1.2))
    assert first_use.agree((tokens, p), (torch.tensor([[1, -1, 3]]), torch.tensor([[0.5, 0.0, 0.9]])))


@torch.inference_mode()
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", ["next token", "drafter"])
def test_models_of_vectors_are_checked_too(name, broken, on_tape, monkeypatch, caplog):
    model, drafter = tiny_masked.tiny(1), tiny_masked.tiny(2)
    method = ContinuousNextToken() if name == "next token" else ContinuousSpeculative(drafter, 2)
    prompt = model.encode_features(torch.tensor([3.0]).view(1, -1, 1))
    asked = ContinuousRequest(model, prompt, model.grid, ContinuousParams(steps=3, cfg=2.0), seed=0, batch=2)
    if broken:
        monkeypatch.setattr(TapeGraphs, "tape", Flatter)
    first_use.check_captured(method, asked)
    assert ("captured steps compute something else" in caplog.text) == broken == graphs._failed
    assert sum(each.replayed for each in on_tape) > 4
    graphs._failed = False
