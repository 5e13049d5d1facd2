"""xAR: files, cells, and what a sampler may rely on. Agreement with the official code is tests/parity/test_xar.py."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.families import xar
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from comfyui_specar.models.drafters import as_drafter
from comfyui_specar.models.networks import xar as net
from comfyui_specar.models.networks.xar import Flow, FlowNumbers, XARConfig, cell_order
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.methods.continuous import MODES, ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken

from ..support.tiny import fill
from ..support.tiny_xar import HEADS, tiny_xar, write, xar_weights

PARAMS = ContinuousParams(cfg=3.0, steps=3)
CELLS, CELL = XARConfig().cells, XARConfig().cell


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_xar(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return tiny_xar(tmp_path_factory.mktemp("drafter"), dim=16, blocks=1, hidden=24)


def request(model, batch=1):
    prompt = model.encode_features(torch.tensor([3.0, 8.0]).view(2, 1, 1)[:batch])
    return ContinuousRequest(model, prompt, model.grid, PARAMS, batch=batch)


@torch.inference_mode()
def predict(model, known, cells, cfg=3.0, temperature=1.0, kind="ddpm", tokens=None):
    """The distribution of cells [B, V, n] where every variant knows its first known [B, V] cells."""
    known, cells = torch.tensor(known), torch.tensor(cells)
    batch, variants = known.shape
    order = cell_order(8)
    query = order.view(CELLS, CELL)[cells].flatten(2)
    tokens = fill("tokens embedding", (2, 256, 16))[:batch] if tokens is None else tokens
    noise = fill("noise embedding", (4, 2, 256, 16))[:, :batch]  # by position, as the samplers' noise is
    noise = torch.stack([noise[:, i][:, query[i]] for i in range(batch)], dim=1)
    state = model.start(request(model, batch).conditioning, None, batch, model.grid, guided=cfg != 1)
    asked = tokens, order.argsort() < CELL * known[..., None], query, CELL * int(known.max())
    schedule = model.schedule(ContinuousParams(steps=3, kind=kind))
    return model.predict(state, *asked, torch.full(query.shape, cfg), temperature, noise[0], noise[1:], schedule)


# Files


def spoilt(change, **sizes):
    weights = xar_weights(**sizes)
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("weights", "metadata", "words"),
    [
        (lambda w: [w.pop(name) for name in list(w) if "_blocks." in name], {}, "blocks"),
        (lambda w: w.update(encoder_pos_embed_learned=torch.ones(1, 64, 32)), {}, "64 tokens.*256"),
        (lambda w: None, {"heads": None}, "width 32.*2 encoder blocks.*released"),
        (lambda w: None, {"heads": 5}, "5 heads.*width 32"),
        (lambda w: None, {"cell": 3}, "cells 3 tokens wide.*1, 2, 4, 8"),
        (lambda w: None, {"cell": 16}, "cells 16"),
        (lambda w: None, {"cell": True}, "cells True"),
        (lambda w: None, {"defaults": {"steps": 10, "top_k": 3}}, "top_k"),
        (lambda w: None, {"defaults": {"cfg": 0.5}}, "cfg.*0.5"),
    ],
)
def test_spoilt_files_are_refused_in_words(weights, metadata, words):
    checkpoint = Checkpoint(spoilt(weights), {"heads": HEADS} | metadata, Path("model.pth"))
    with pytest.raises(CheckpointError, match=words):
        xar.load(checkpoint, torch.float32, None, ())


def test_another_grid_is_refused(model):
    checkpoint = Checkpoint(xar_weights(), {"heads": HEADS}, Path("model.pth"))
    with pytest.raises(CheckpointError, match="32 x 32 tokens.*nearest.* 16 x 16"):
        xar.load(checkpoint, torch.float32, (32, 32), ())
    assert xar.load(checkpoint, torch.float32, (16, 16), ()).grid == (16, 16)
    with pytest.raises(ValueError, match="only 256 x 256 pixels"):
        model.start(model.encode_prompt("3"), None, 1, (8, 16), guided=True)


# Prompts, units, order


def test_classes_by_name_and_number(model):
    assert [model.encode_prompt(text)[0][0].item() for text in ("goldfish", "207")] == [1, 207]
    with pytest.raises(ValueError, match="1000.*class"):
        model.encode_prompt("1000")  # the null class is for guidance only


def test_guidance_rises_from_cell_to_cell(model):
    before = torch.arange(0, 256, CELL)
    params = ContinuousParams(cfg=4.0)
    assert model.guidance(params, before, before + CELL, 256).tolist() == [1.0, 2.0, 3.0, 4.0]
    constant = ContinuousParams(cfg=4.0, cfg_schedule="constant")
    assert model.guidance(constant, before, before + CELL, 256).tolist() == [4.0] * 4


# Prediction


def test_variants_that_know_different_cells_do_not_mix(model):
    """Five variants of two images in one pass, against each of them alone without any padding."""
    known, cells = [[0, 1, 2, 3, 1], [3, 0, 1, 2, 1]], [[[0], [1], [2], [3], [3]], [[3], [0], [2], [2], [2]]]
    found = predict(model, known, cells)
    assert found.mean.shape == found.log_std.shape == (2, 5, CELL, 16) and found.path.shape == (2, 5, CELL)
    for v in range(5):
        for b in range(2):
            row = [[known[i][v]] if i == b else [0] for i in range(2)]
            alone = predict(model, row, [[cells[0][v]], [cells[1][v]]])
            assert torch.allclose(found.mean[b, v], alone.mean[b, 0], atol=1e-5)


def test_what_is_not_known_is_not_seen(model):
    """Whatever stands in the cells that are not known."""
    tokens = fill("tokens embedding", (2, 256, 16))
    changed = tokens.clone()
    changed[:, model.order[CELL:]] += 100
    distribution, other = (predict(model, [[1], [1]], [[[2]], [[1]]], tokens=t) for t in (tokens, changed))
    assert torch.equal(distribution.mean, other.mean)
    changed[:, model.order[0]] += 1
    other = predict(model, [[1], [1]], [[[2]], [[1]]], tokens=changed)
    assert ((distribution.mean - other.mean).abs().amax((1, 2, 3)) > 1e-4).all()


def test_the_width_is_that_of_the_last_step(model):
    width = 0.04 * math.sqrt(2)
    for temperature in (1.0, 0.7):
        found = predict(model, [[0], [0]], [[[0]], [[0]]], temperature=temperature)
        assert torch.allclose(found.log_std.exp(), torch.tensor(width * temperature)) and not found.path.any()
    flow = predict(model, [[0], [0]], [[[0]], [[0]]], temperature=0.7, kind="ddim")
    assert torch.allclose(flow.log_std.exp(), torch.tensor(math.sqrt(2) / 3))  # nominal: there is no noise to scale


def test_cells_must_be_asked_for_whole(model):
    state = model.start(model.encode_prompt("3"), None, 1, model.grid, guided=False)
    tokens, noise = torch.zeros(1, 256, 16), torch.zeros(4, 1, 1, 8, 16)
    asked = tokens, tokens[None, ..., 0] > 0, torch.arange(8)[None, None], 0
    with pytest.raises(ValueError, match="cells of 64 tokens.* 8 "):
        model.predict(state, *asked, torch.ones(1, 1, 8), 1.0, noise[0], noise[1:], Flow.of(3))


def test_half_precision_computes_the_flow_in_fp32(tmp_path):
    model = tiny_xar(tmp_path, dtype=torch.bfloat16)
    found, exact = predict(model, [[1], [0]], [[[1]], [[0]]]), predict(tiny_xar(tmp_path), [[1], [0]], [[[1]], [[0]]])
    assert found.mean.dtype == torch.float32
    assert 0 < (found.mean - exact.mean).abs().mean() < 0.1 * exact.mean.abs().mean()


# The flow


def test_illegal_steps():
    for steps in (1, 1001):
        with pytest.raises(ValueError, match=rf"2 to 1000 steps.* {steps}\b"):
            Flow.of(steps)
    with pytest.raises(ValueError, match="ddpm or ddim.*'heun'"):
        Flow.of(10, "heun")


# Samplers


@pytest.fixture(scope="module")
def plain(model):
    return ContinuousNextToken().sample(request(model, 2))


@pytest.mark.parametrize(("length", "passes"), [(1, 4), (2, 3), (3, 2)])
def test_a_target_that_drafts_for_itself_generates_its_own_image(model, plain, length, passes):
    """One cell alone, then blocks of up to ``length`` cells, each judged by a variant that knows the drafts before."""
    method = ContinuousSpeculative(model, length=length, prefill=0.25, condition="drafts")
    out = method.sample(request(model, 2))
    assert torch.allclose(out.tokens, plain.tokens, atol=1e-4)
    assert out.trace.totals["target_passes"] == passes and out.trace.totals["draft_passes"] == CELLS - 1
    assert out.trace.positions["log_ratio"].abs().max() < 1e-2


def test_a_smaller_model_drafts_and_the_target_judges(model, smaller, plain):
    """An infinite tolerance keeps every draft, none at all gives the target's own cells."""
    method = ContinuousSpeculative(smaller, length=3, prefill=0.25, condition="prefix", tolerance=math.inf)
    methods = method, replace(method, condition="drafts", tolerance=0.0)
    loose, strict = (each.sample(request(model, 2)) for each in methods)
    first = model.order[:CELL]
    rest = model.order[CELL : 2 * CELL]
    for out in (loose, strict):
        assert torch.allclose(out.tokens[:, first], plain.tokens[:, first], atol=1e-4)
        assert out.trace.totals["target_passes"] == 2 and out.tokens.isfinite().all()
    assert torch.allclose(strict.tokens[:, rest], plain.tokens[:, rest], atol=1e-4)
    assert (loose.tokens[:, rest] - plain.tokens[:, rest]).abs().mean() > 0.1


# One token at a time (k = 1): the xAR rows of table 1 of "Continuous speculative decoding".


@pytest.fixture(scope="module")
def ones(tmp_path_factory):
    """Target and drafter whose cells are single tokens, from files that say so."""
    target, drafter = (
        xar.load(open_checkpoint(write(tmp_path_factory.mktemp("ones"), sizes, cell=1)), torch.float32, None, ())
        for sizes in ({"blocks": 1}, {"dim": 16, "blocks": 1, "hidden": 24})
    )
    return target, as_drafter(drafter, target, Path("xar.safetensors"))


def test_files_say_how_large_cells_are(ones, model, tmp_path):
    assert ones[0].group == 1 and torch.equal(ones[0].order, torch.arange(256))
    middle = xar.load(open_checkpoint(write(tmp_path, cell=4)), torch.float32, None, ())
    rows = [first + i for first in (0, 16, 32, 48, 4) for i in range(4)]
    assert middle.group == 16 and middle.order[:20].tolist() == rows
    with pytest.raises(CheckpointError, match="cells of 1 tokens.*cells of 64 tokens"):
        as_drafter(ones[1], model, Path("xar.safetensors"))


@torch.inference_mode()
def test_a_token_sees_the_tokens_before_it(ones):
    """Whatever else its neighbours in the pass see; guidance rises from token to token."""
    target, query = ones[0], torch.tensor([[[5], [9]]])
    noise, tokens = fill("noise embedding", (4, 1, 2, 1, 16)), fill("tokens embedding", (1, 256, 16))
    state = target.start(target.encode_prompt("3"), None, 1, target.grid, guided=True)

    def mean(tokens, known):
        known = torch.arange(256) < torch.tensor(known)[None, :, None]
        given = tokens, known, query, int(known.sum(-1).max()), torch.full((1, 2, 1), 2.0), 1.0, noise[0], noise[1:]
        return target.predict(state, *given, Flow.of(3)).mean[0, :, 0]

    found = mean(tokens, [5, 7])
    for at, changes in ((4, [True, True]), (5, [False, True]), (6, [False, True]), (7, [False, False])):
        other = tokens.clone()
        other[:, at] += 1
        assert ((mean(other, [5, 7]) - found).abs().amax(-1) > 1e-5).tolist() == changes, at
    assert torch.allclose(mean(tokens, [5, 5])[0], found[0], atol=1e-5)
    scales = target.guidance(ContinuousParams(cfg=4.0), torch.tensor([0, 51, 255]), torch.tensor([1, 52, 256]), 256)
    torch.testing.assert_close(scales, torch.tensor([1.0, 1.6, 4.0]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [4, 32])
def test_single_tokens_go_through_every_mode(monkeypatch, mode, length):
    """A drafter that is the target is always right, if the target sees the drafts. Images of 4 x 4 tokens."""
    for module in (xar, net):
        monkeypatch.setattr(module, "GRID", 4)
    target, drafter = (
        xar.load(Checkpoint(spoilt(shrink, **sizes), {"heads": HEADS, "cell": 1}, Path("x")), torch.float32, None, ())
        for sizes in ({"blocks": 1}, {"dim": 16, "blocks": 1, "hidden": 24})
    )
    out = ContinuousSpeculative(drafter, length, 0.25, mode).sample(request(target))
    assert out.tokens.isfinite().all() and out.trace.totals["draft_passes"] > 0
    assert out.trace.positions["order"].tolist() == [[*range(16)]]
    itself = ContinuousSpeculative(target, length, 0.25, mode, "drafts", tolerance=1.0).sample(request(target))
    assert itself.trace.summary()["acceptance_rate"] == 1
    assert itself.trace.totals["target_passes"] == 4 + math.ceil(12 / (length + (not MODES[mode].in_place)))


def shrink(weights):
    """Weights for images of 4 x 4 tokens."""
    weights.update({name: table[:, :16] for name, table in weights.items() if name.endswith("_learned")})


@pytest.mark.parametrize(("kind", "steps"), [("ddpm", 500), ("ddim", 100)])
def test_the_flow_of_gaussian_data_ends_in_its_distribution(kind, steps):
    """For data N(m, s^2) the best velocity is known: E[noise - x | x_t] = (t - (1 - t) s^2)/var (x_t - (1-t) m) - m."""
    m, s, flow = 1.5, 0.5, Flow.of(steps, kind)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20000, generator=generator)
    for index, (t, numbers) in enumerate(zip(flow.times, flow.numbers(1.0, "cpu"), strict=False)):
        gain = (t - (1 - t) * s**2) / ((1 - t) ** 2 * s**2 + t**2)
        x = FlowNumbers(*numbers).mean(kind, x, gain * (x - (1 - t) * m) - m)
        if kind == "ddpm" and index < flow.steps - 1:
            x = x + flow.width(index) * torch.randn(x.shape, generator=generator)
    assert abs(x.mean() - m) < 0.02 and abs(x.std() - s) < 0.02
