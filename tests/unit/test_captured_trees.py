"""Rounds of drafting without the host: compiled whole, and replayed as a CUDA graph would, they generate the same."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.kernels.graphs import Graphs
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.samplers.rules.lantern import Lantern

from ..support.captured_runs import assert_captured_as_plain, assert_same_tree_run
from ..support.rules import RELAXED
from ..support.tape import LatePoll
from ..support.tiny import CAPTION, caption_features, fill
from ..support.toy import ToyDrafter, ToyModel, chi_square, plain, request, with_kept_tokens, with_line_ends

STATIC = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
FIXED = {"chain": Chain(3), "blocks": Chain(3, "block"), "static": STATIC, "dynamic": Dynamic(3, 3, 6)}
ADT = {"depths": (1, 3), "widths": (1, 3), "width_step": 1, "first": (2, 2), "nodes": 5}
VARYING = {"adaptive": ADTTree(**ADT)}
SKIPS = {
    "uniform": Skipping(interval=2, guard=0),
    "stale": Skipping("dynamic", threshold=0.0, guard=0, truncate=False, refresh=False),
}
LAYOUTS = {"row": (plain(2, 3), 0), "line_ends": (with_line_ends(2, 2), 2), "kept": (with_kept_tokens(2, 3), 0)}
METHODS = {
    **{name: (structure, {}) for name, structure in (FIXED | VARYING).items()},
    **{f"skipping {name}": (FIXED["static"], {"skipping": skips}) for name, skips in SKIPS.items()},
    "skipping likeliest": (FIXED["dynamic"], {"skipping": SKIPS["uniform"], "rule": Lantern(2, 0.3)}),
    "skipping adaptive": (VARYING["adaptive"], {"skipping": SKIPS["uniform"]}),
}


class CompiledGraphs(Graphs):
    """Compiles the second round as one graph: whatever would have to ask the host is an error."""

    calls = 0

    def __init__(self, device):
        super().__init__(device)
        self.active = True

    def __call__(self, key, step, state):
        self.calls += 1
        if self.calls == 2:
            step = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
        return step(state)


def compiled(method, asked, monkeypatch):
    """A run with a compiled round."""
    torch._dynamo.reset()
    made = []

    class Compiled(CompiledGraphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "Poll", LatePoll)
        patch.setattr(session, "Graphs", Compiled)
        found = method.sample(asked)
    assert made[-1].calls >= 2
    return found


def toy(layout="row", **options):
    """A toy model of a layout, and a drafter for it."""
    shape, specials = LAYOUTS[layout]
    target = ToyModel(shape, specials)
    return target, ToyDrafter(target, **options), shape


def prompted(model, seed, tokens=7, batch=2):
    """What a tiny LlamaGen is asked: guided, with tokens of the user's own."""
    kept = torch.zeros((1, 4, 4), dtype=torch.bool)
    kept.view(-1)[[2, 3, 9, 15]] = True
    layout = model.layout().keeping(torch.full((1, 4, 4), 7), kept)
    negative = model.encode_features(fill("negative embedding", (1, 3, CAPTION)))
    prompt = model.encode_features(caption_features(tokens))
    return Request(model, prompt, layout, SamplingParams(cfg=2.0, top_k=12), negative, seed, batch)


@pytest.mark.parametrize(
    "structure, rule", [(Chain(2, "block"), Exact()), (STATIC, CoolSD(1.5))], ids=["blocks", "static"]
)
def test_compiled_rounds_are_plain_rounds(structure, rule, monkeypatch):
    target, drafter, shape = toy("line_ends")
    method, asked = DraftTree(drafter, structure, rule), request(target, shape, SamplingParams(cfg=1.5), 3, 3)
    wanted = method.sample(asked)
    assert_same_tree_run(compiled(method, asked, monkeypatch), wanted)


@torch.inference_mode()
def test_a_compiled_round_on_a_backbone(text_model, text_drafters, monkeypatch):
    method, asked = DraftTree(text_drafters["eagle"], Dynamic(2, 2, 3)), prompted(text_model, 3, batch=1)
    wanted = method.sample(asked)
    assert_same_tree_run(compiled(method, asked, monkeypatch), wanted)


@pytest.mark.parametrize("name", METHODS)
def test_replayed_rounds_are_plain_rounds(name, on_tape, monkeypatch):
    """Every structure and schedule; two runs of a kind share their graphs, and the first keeps what it drew."""
    structure, more = METHODS[name]
    target, drafter, shape = toy("line_ends", stale="skipping" in more)
    method = DraftTree(drafter, structure, **more)
    asked = [request(target, shape, SamplingParams(cfg=1.5), seed=seed, batch=3) for seed in (3, 30)]
    assert_captured_as_plain(method, asked, monkeypatch)
    assert len(on_tape) == 1 and (on_tape[0].replayed > 0) == (name in FIXED)


@pytest.mark.parametrize("rule", RELAXED, ids=str)
def test_replayed_rules_heed_the_strength_of_each_run(rule, on_tape, monkeypatch):
    target, drafter, shape = toy()
    structure = FIXED["dynamic" if isinstance(rule, Lantern) else "static"]
    method = DraftTree(drafter, structure, rule)
    asked = [
        replace(request(target, shape, seed=seed, batch=3), strength=strength)
        for seed, strength in ((3, torch.zeros(1, 6)), (9, torch.rand(1, 6)))
    ]
    assert_captured_as_plain(method, asked, monkeypatch)
    assert on_tape[0].replayed > 0


def test_images_may_keep_tokens_of_their_own(on_tape, monkeypatch):
    target, drafter, shape = toy("kept")
    rows = shape.forced.repeat(3, 1)
    rows[1, 2], rows[2] = 0, -1
    asked = [
        request(target, layout, seed=seed, batch=3)
        for seed, layout in ((3, shape), (4, replace(shape, forced=rows)), (5, replace(shape, forced=rows.flip(0))))
    ]
    assert_captured_as_plain(DraftTree(drafter, FIXED["static"]), asked, monkeypatch)
    assert on_tape[-1].replayed > 0


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_replayed_rounds_on_a_backbone(text_model, text_drafters, kind, on_tape, monkeypatch):
    """Caches are written in place: another prompt, other kept tokens."""
    structure = STATIC if kind == "eagle" else Chain(3)
    method = DraftTree(text_drafters[kind], structure, CoolSD(1.5))
    asked = [prompted(text_model, seed, tokens, batch=1) for seed, tokens in ((3, 7), (4, 6))]
    assert_captured_as_plain(method, asked, monkeypatch)
    assert on_tape[0].replayed > 0


@pytest.mark.parametrize("structure", [Chain(3), STATIC, Dynamic(3, 2, 5)], ids=["chain", "static", "dynamic"])
def test_replayed_rounds_sample_from_the_distribution(structure, on_tape):
    target, drafter, shape = toy("line_ends")
    tokens = DraftTree(drafter, structure).sample(request(target, shape, batch=2000)).tokens
    assert on_tape[0].replayed > 0
    assert chi_square(tokens, target.distribution(shape, SamplingParams())).z < 4
