"""Runs as on a GPU: steps compiled whole, captured, replayed and read late. Nothing of that may show.

Whatever changes between runs, tokens and trace are those of the plain loop, so their distribution is, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.device import cpu, dispatch
from comfyui_specar.device.graphs import Graphs
from comfyui_specar.model_loaders import detect
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import Auto
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import REUSE, SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.samplers.rules.lantern import Lantern
from comfyui_specar.tools.benchmarks import sizes
from torch._subclasses.fake_tensor import FakeTensorMode

from ..support.captured_runs import assert_captured_as_plain, assert_same_run, assert_same_tree_run, captured
from ..support.tape import LatePoll
from ..support.tiny import CAPTION, caption_features, fill, write_llamagen
from ..support.toy import ToyDrafter, ToyModel, draft_tree, plain, request, with_kept_tokens, with_line_ends

LAYOUT = plain(2, 3)
MODEL = ToyModel(LAYOUT)
STATIC = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
ADT = ADTTree(depths=(1, 3), widths=(1, 3), width_step=1, first=(2, 2), nodes=5)
COSTS = PassCosts(((1, 1.0), (65, 7.0)), 0.1, ((1, 0.1), (64, 0.1)))


def prompted(model, seed, tokens=7, batch=1):
    """What a tiny LlamaGen is asked: guided, with tokens of the user's own."""
    kept = torch.zeros((1, 4, 4), dtype=torch.bool)
    kept.view(-1)[[2, 3, 9, 15]] = True
    layout = model.layout().keeping(torch.full((1, 4, 4), 7), kept)
    negative = model.encode_features(fill("negative embedding", (1, 3, CAPTION)))
    prompt = model.encode_features(caption_features(tokens))
    return Request(model, prompt, layout, SamplingParams(cfg=2.0, top_k=12), negative, seed, batch)


def assert_as_plain(method, asked, monkeypatch):
    """The runs on tape, then plain ones. Captured windows have the plain ones' shapes, so that they round alike."""
    if isinstance(method, DraftTree):
        return assert_captured_as_plain(method, asked, monkeypatch)
    found = [method.sample(each) for each in asked]
    monkeypatch.undo()
    asked[0].model.sessions.clear()
    for each, one in zip(asked, found, strict=True):
        assert_same_run(one, method.sample(each))


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        (SJD(3, rule=CoolSD(3)), 1),
        (DraftTree(ToyDrafter(MODEL), STATIC, CoolSD(3)), 1),
        (DraftTree(ToyDrafter(MODEL), ADT), 2),
        (VVS(ToyDrafter(MODEL, stale=True), STATIC, skipping=Skipping(interval=2, guard=0)), 2),
    ],
    ids=str,
)
def test_what_serves_every_run(method, kinds, on_tape):
    """One session for every seed, strength and slider, with a graph for every kind of step; what is switched on needs
    other graphs on the same memory, and inputs of other shapes another session. (That nothing of it shows is in
    test_run_laws.py.)"""
    first = request(MODEL, LAYOUT, SamplingParams(cfg=1.5, temperature=1.2), batch=3)
    one, own = torch.ones(1, LAYOUT.length), LAYOUT.forced.repeat(3, 1)
    own[1, 0], own[2, 1] = 0, 1
    for changed in (
        {},
        {"seed": 40, "params": replace(first.params, cfg=2.5, temperature=0.5)},
        {"params": replace(first.params, top_k=2, entropy=(2.5, 1.0, 0.6))},
        {"strength": 0 * one},
        {"strength": torch.rand(1, LAYOUT.length)},
        {"layout": replace(LAYOUT, forced=own)},
        {"layout": replace(LAYOUT, forced=own.flip(0))},
    ):
        method.sample(replace(first, **changed))
    MODEL.sessions.clear()
    assert [each.captured for each in on_tape] == [2 * kinds, kinds, kinds]
    assert all(each.replayed for each in on_tape)


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        (SJD(3), {"params": SamplingParams(cfg=2.0)}),
        (SJD(3), {"batch": 3}),
        (SJD(3), {"layout": with_kept_tokens(2, 3)}),
        (SJD(3), {"layout": TokenLayout(3, 2, 2, plain(2, 3).forced)}),
        (SJD(3), {"strength": torch.ones(1, 6)}),
        *((other, {}) for other in (SJD(4), SJD(3, "gumbel"), SJD(3, initial="left"), SJD(3, settle=0.1), NextToken())),
        (SJD(3, rule=CoolSD(2)), {}),
    ],
    ids=str,
)
def test_a_graph_is_not_replayed_for_another_setting_or_method(method, changed):
    asked = request(ToyModel(plain(2, 3)), plain(2, 3), batch=2)
    with captured() as made:
        SJD(3).sample(asked)
        found = method.sample(replace(asked, **changed))
    assert len(made) == 2
    assert_same_run(found, method.sample(replace(asked, **changed)))


@torch.inference_mode()
@pytest.mark.parametrize(
    "method",
    [
        NextToken(),
        SJD(5),
        SJD(7, "gumbel", "repeat"),
        SJD(5, rule=Lantern(5, 0.3)),
        {"drafter": "eagle", "structure": STATIC, "rule": CoolSD(1.5)},
        {"drafter": "model", "structure": Chain(3)},
        {"drafter": "model", "structure": Chain(3, "block")},
    ],
    ids=str,
)
def test_replayed_runs_on_a_backbone(text_model, text_drafters, method, on_tape, monkeypatch):
    """Caches are written in place: prompts of other lengths need no other graph."""
    if isinstance(method, dict):
        method = DraftTree(**method | {"drafter": text_drafters[method["drafter"]]})
    asked = [prompted(text_model, seed, tokens) for seed, tokens in ((3, 7), (4, 6), (3, 6))]
    assert_as_plain(method, asked, monkeypatch)
    assert len(on_tape) == 1 and on_tape[0].replayed > 0 and on_tape[0].active
    assert on_tape[0].captured == 1 or isinstance(method, DraftTree)  # in fp64 no cache is used again


class Restless(Auto):
    """Looks at the counts in every round."""

    def next_extent(self, *state):
        return replace(super().next_extent(*state), lasts=1)


@pytest.mark.parametrize("stay", [0, 3])
def test_every_shape_of_a_changing_tree_is_captured(stay, on_tape, monkeypatch):
    """Shapes come back, in the same run and in others, and their graphs are replayed."""
    layout = plain(1, 9)
    target = ToyModel(layout, memory=1)
    method = DraftTree(ToyDrafter(target, noise=4.0), Restless(12, 4, COSTS))
    assert_as_plain(method, [request(target, layout, seed=n, batch=1 + stay) for n in (0, 1, 2, 0)], monkeypatch)
    (graphs,) = on_tape
    assert graphs.captured > 1 and graphs.replayed > 0


@pytest.mark.parametrize(
    ("structure", "skipping"), [(STATIC, Skipping("dynamic", threshold=0.1, guard=0)), (ADT, None)]
)
def test_rounds_that_the_host_chooses_are_captured(structure, skipping, on_tape, monkeypatch):
    """It reads once a round what it chooses by. (All kinds of rounds: test_run_laws.py.)"""
    layout, read_extent, reads = with_kept_tokens(2, 4), engine.read_extent, []
    target = ToyModel(layout)
    method = draft_tree(ToyDrafter(target, stale=skipping is not None), structure, skipping=skipping)
    masks = (None, None, None) if skipping is None else torch.rand(3, 1, layout.length) < 0.5
    asked = [replace(request(target, layout, seed=10 * n, batch=3), skippable=mask) for n, mask in enumerate(masks)]
    with monkeypatch.context() as counting:
        counting.setattr(
            engine, "read_extent", lambda state: reads.append(state.extent is not None) or read_extent(state)
        )
        rounds = sum(len(method.sample(each).trace.rounds["width"]) for each in asked)
    assert sum(reads) <= rounds, "the prompt's counts as the one that is launched in vain"
    assert_captured_as_plain(method, asked, monkeypatch)
    assert all(graphs.active and graphs.replayed for graphs in on_tape[:1])


def test_costs_of_captured_steps_are_measured_on_captured_passes(on_tape):
    method = DraftTree(ToyDrafter(MODEL), Auto(12, 4))
    found = method.sample(request(MODEL, LAYOUT, batch=2))
    runs, measuring = on_tape
    assert measuring.captured > 5 and not measuring._graphs, "these go when they have been timed"
    costs = found.trace.settings["structure"]["costs"]
    again = DraftTree(method.drafter, Auto(12, 4, costs)).sample(request(MODEL, LAYOUT, batch=2))
    assert len(on_tape) == 2, "given costs are no other session"
    MODEL.sessions.clear()
    assert torch.equal(again.tokens, found.tokens)


# A host that learns late


def test_a_late_host_launches_one_step_more_and_reports_what_it_knows():
    layout, seen = plain(2, 3), []
    asked = request(ToyModel(layout), layout, batch=3, callback=lambda p: seen.append((p.passes, p.committed.tolist())))
    with captured() as made:
        found = SJD(3).sample(asked)
    passes = found.trace.totals["target_passes"]
    assert [p for p, _ in seen] == list(range(passes + 1)) and seen[-1][1] == [6] * 3
    assert made[0].replayed == passes - 2, "one step warms up, one is recorded, and the last is launched in vain"
    assert (found.trace.rounds["committed"].sum(1) > 0).all() and len(found.trace.rounds["committed"]) == passes


class Fed(ToyModel):
    """Writes down what it is fed."""

    def step(self, state, tokens, *more, **named):
        self.fed.append(tokens.tolist())
        return super().step(state, tokens, *more, **named)


@pytest.mark.parametrize("reuse", REUSE)
def test_the_callback_is_shown_the_guesses_that_the_next_pass_feeds(reuse):
    """Also where the host learns late: tokens, guesses and their start are those of the newest pass."""
    layout = plain(2, 4)

    def run():
        model, seen = Fed(layout), []
        model.fed = []

        def look(p):
            seen.append((p.start.tolist(), p.draft.tolist(), p.tokens.tolist()))

        SJD(4, reuse).sample(request(model, layout, batch=2, callback=look))
        return model.fed, seen

    fed, seen = run()
    assert len(seen) == len(fed) + 1 > 3
    for (start, draft, tokens), given in zip(seen, fed, strict=False):
        roots = [row[n - 1] for row, n in zip(tokens, start, strict=True)]
        assert given == [[root, *guesses] for root, guesses in zip(roots, draft, strict=True)]
    with captured():
        late = run()[1]
    assert late[: len(seen)] == seen and len(late) == len(seen) + 1


def test_a_method_without_guesses_shows_none():
    layout, seen = plain(2, 3), []
    NextToken().sample(request(ToyModel(layout), layout, callback=lambda p: seen.append((p.draft, int(p.start)))))
    assert seen == [(None, n + 1) for n in range(6)]


# Compiled: whatever would have to ask the host is an error, and keeps a step from being captured


@pytest.mark.parametrize(
    "method",
    [
        SJD(4, initial="left", settle=0.3),
        SJD(4, "resample", rule=Lantern(2, 0.6, "paper")),
        {"structure": STATIC, "rule": CoolSD(1.5)},
        {"structure": Dynamic(2, 2, 3), "drafter": "eagle"},
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_step_compiles_as_one_graph(text_model, text_drafters, method, monkeypatch):
    steps = []
    monkeypatch.setattr(cpu, "packable", lambda layer: False)  # compiled code calls the layers

    class CompiledGraphs(Graphs):
        """Compiles the second step of a run."""

        def __init__(self, device):
            super().__init__(device)
            self.active = self.pads = True

        def __call__(self, key, step, state):
            steps.append(torch.compile(step, fullgraph=True, backend="eager", dynamic=False) if steps else step)
            return (steps[1] if len(steps) == 2 else step)(state)

    if "drafter" in (method if isinstance(method, dict) else ()):
        method = DraftTree(text_drafters[method["drafter"]], method["structure"])
        asked = prompted(text_model, 3)
    else:
        layout = with_line_ends(2, 2)
        target = ToyModel(layout, 2)
        method = DraftTree(ToyDrafter(target), **method) if isinstance(method, dict) else method
        asked = request(target, layout, SamplingParams(1.5, entropy=(2.5, 1.0, 0.6)), 3, batch=3)
    wanted = method.sample(asked)
    torch._dynamo.reset()
    monkeypatch.setattr(engine, "Poll", LatePoll)
    monkeypatch.setattr(session, "Graphs", CompiledGraphs)
    assert_same_tree_run(method.sample(asked), wanted)
    assert len(steps) >= 2


# Sessions and devices


def test_a_run_has_no_more_sessions_beside_it_than_are_kept(on_tape):
    """Each holds caches of gigabytes."""
    target = ToyModel(plain(1, 3))
    for batch in range(1, 4):
        with session.use_session(NextToken(), request(target, plain(1, 3), batch=batch)):
            assert len(target.sessions) < session.MAX_SESSIONS
    assert len(target.sessions) == session.MAX_SESSIONS


def test_a_device_has_its_number(monkeypatch, tmp_path):
    """That of tensors is cuda:0, which is another one than cuda: weights would seem to lie elsewhere."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args: self)
    monkeypatch.setattr(detect, "usable_device", torch.device)  # there is none here
    model = load_model(write_llamagen(tmp_path / "model.safetensors", False), device="cuda", dtype=torch.float32)
    assert model.device == torch.device("cuda:0")


def test_random_models_of_the_benchmark_are_wholly_on_the_gpu_they_name(monkeypatch, caplog):
    """Else their runs would go on without graphs, and what is measured would mean nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: False)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)  # also where other tests know other devices
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sizes.build(sizes.SIZES["llamagen-b"], torch.bfloat16, torch.device("cuda"))
        drafter = sizes.eagle(model)
        method = SimpleNamespace(session_key=lambda request: "kind")
        with session.use_session(method, SimpleNamespace(model=model), drafter) as opened:
            assert opened.graphs.active and "without CUDA graphs" not in caplog.text
