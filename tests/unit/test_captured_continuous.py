"""Denoising steps and passes of continuous models as they run on a GPU: captured, padded and replayed, in every method
and family. The images are those of the same steps called, up to round-off in fp64."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from comfyui_specar.device.continuous_steps import ROWS, padded_rows, padded_tokens
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models.networks.diffusion_head import DiffusionHead
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken

from ..support import tiny_masked
from ..support.captured_runs import captured
from ..support.closeness import fp64
from ..support.tape import TapeGraphs
from ..support.tiny_harmon import write_harmon, write_tokenizer
from ..support.tiny_xar import tiny_xar

pytestmark = pytest.mark.usefixtures("without_gradients")

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
METHODS = {
    "next token": lambda drafter: ContinuousNextToken(),
    "iterations": lambda drafter: ContinuousNextToken(2),
    "block": lambda drafter: ContinuousSpeculative(drafter, 2),
    "block, drafts": lambda drafter: ContinuousSpeculative(drafter, 2, condition="drafts"),
    "itself": lambda model: ContinuousSpeculative(model, 1),  # one graph for both passes
    "prefix": lambda drafter: ContinuousSpeculative(drafter, 3, mode="prefix"),
    "exact": lambda drafter: ContinuousSpeculative(drafter, 3, mode="exact", prefill=0.3),
}
OF_CELLS = ("next token", "block", "block, drafts", "itself")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Target and drafter of every family."""
    folder = tmp_path_factory.mktemp("models")
    write_tokenizer(folder)
    harmon = load_model(write_harmon(folder / "harmon.safetensors"))
    xar = [tiny_xar(tmp_path_factory.mktemp("xar"), dim=dim, blocks=1, hidden=24) for dim in (32, 16)]
    return {"mar": (tiny_masked.tiny(1), tiny_masked.tiny(2)), "harmon": (harmon, harmon), "xar": xar}


def request(model, features=(3,), seed=0, **params):
    prompt = model.encode_features(torch.tensor(features, dtype=torch.float32).view(1, -1, 1))
    params = ContinuousParams(**{"steps": 3, "cfg": 2.0} | params)
    grid = (2, 4) if model.family == "harmon" else model.grid
    return ContinuousRequest(model, prompt, grid, params, seed=seed, batch=1 + (model.family == "mar"))


def drawn(method, asked):
    """The images of runs one after the other, without what earlier ones left."""
    asked[0].model.sessions.clear()
    found = [method.sample(one) for one in asked]
    asked[0].model.sessions.clear()
    return found


def assert_same(found, wanted):
    torch.testing.assert_close(found.tokens, wanted.tokens, **CLOSE)
    for mine, its in ((found.trace.positions, wanted.trace.positions), (found.trace.rounds, wanted.trace.rounds)):
        for name in its:
            torch.testing.assert_close(mine[name], its[name], **CLOSE, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("mar", name) for name in METHODS),
        *(("harmon", name) for name in ("iterations", "block, drafts")),
        *(("xar", name) for name in OF_CELLS),
    ],
)
@fp64()
def test_captured_runs_are_called_ones(models, family, name):
    target, drafter = models[family]
    method = METHODS[name](drafter)
    if name == "itself":
        target = drafter
    asked = [
        request(target, kind="ddpm" if name == "exact" else "ddim"),
        request(target, cfg=1.0),
        request(target, seed=7, cfg=3.0, temperature=0.8, steps=4, cfg_schedule="constant"),
    ]
    wanted = drawn(method, asked)
    with captured() as made:
        found = drawn(method, asked)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    assert len(made) == 2, "one session with guidance, one without"
    assert all(graphs.active and graphs.captured > 0 < graphs.replayed for graphs in made)


@pytest.mark.parametrize(
    ("family", "name"), [("mar", "next token"), ("mar", "block"), ("harmon", "iterations"), ("xar", "block")]
)
@fp64()
def test_graphs_serve_every_number_of_steps_guidance_temperature_and_prompt(models, family, name):
    target, drafter = models[family]
    method = METHODS[name](drafter)
    if name == "block":
        method = replace(method, tolerance=math.inf)  # so that all runs have passes of the same shapes
    longer = tuple(range(1, 46)) if family == "harmon" else (4,)
    others = [{"steps": 5}, {"temperature": 0.7, "cfg": 4.0, "cfg_schedule": "constant"}]
    with captured() as made:
        drawn(method, [request(target)])
        first = len(made[0]._called)
        drawn(method, [request(target, longer if i else (3,), i, **one) for i, one in enumerate(others)])
    assert len(made) == 2 and len(made[1]._called) == first


@pytest.mark.parametrize("family", ["mar", "harmon", "xar"])
def test_the_session_stays_with_the_model_and_its_graphs_end_with_it(models, family):
    """At once: ComfyUI reads how much memory that gave back."""
    target, drafter = models[family]
    method, asked = METHODS["block"](drafter), request(target)
    with captured() as made:
        method.sample(asked)
        assert list(target.sessions) == [method.session_key(asked)]
        graphs = weakref.ref(made.pop())
        gc.disable()
        try:
            target.sessions.clear()
            assert graphs() is None
        finally:
            gc.enable()


def test_nothing_is_captured_or_padded_elsewhere(models, monkeypatch):
    target, _ = models["mar"]
    shapes = set()
    whole = DiffusionHead.step
    monkeypatch.setattr(
        DiffusionHead, "step", lambda self, kind, state: (shapes.add(len(state.mean)), whole(self, kind, state))[1]
    )
    ContinuousNextToken(2).sample(request(target))
    assert shapes == {2 * 3, 2 * 6} and not target.sessions
    with captured():
        drawn(ContinuousNextToken(2), [request(target)])
    assert shapes == {2 * 3, 2 * 6, 8, 16}


@fp64()
def test_what_a_call_returns_stays(models):
    """A drafter's distributions are kept until all drafts are there (MAR: test_captured_runs_are_called_ones)."""
    model, graphs = models["xar"][0], TapeGraphs(torch.device("cpu"))
    state = model.start(request(model).conditioning, None, 1, model.grid, True, graphs)
    length, query = math.prod(model.grid), model.order[: model.group]
    tokens, known = torch.zeros(1, length, model.channels), torch.zeros(1, 1, length, dtype=torch.bool)
    scale = torch.full((1, 1, len(query)), 2.0)

    def mean(seed):
        noise = torch.randn(4, 1, 1, len(query), model.channels, generator=torch.Generator().manual_seed(seed))
        schedule = model.schedule(ContinuousParams(steps=3))
        return model.predict(state, tokens, known, query[None, None], 0, scale, 1.0, noise[0], noise[1:], schedule).mean

    first = mean(1)
    before = first.clone()
    assert not torch.equal(mean(2), before) and torch.equal(first, before)


def test_padded_sizes_are_few_and_large_enough():
    rows = [padded_rows(count) for count in range(1, 200)]
    assert all(count <= padded < count + ROWS for count, padded in enumerate(rows, 1)) and rows == sorted(rows)
    assert len(set(rows)) == 4 + 13
    for length in (1, 7, 16, 256, 1024):
        tokens = [padded_tokens(count, length) for count in range(length + 1)]
        assert all(max(count, 1) <= padded <= length for count, padded in enumerate(tokens))
        assert len(set(tokens)) <= 8
