"""MAR behind the samplers' protocol: a tiny random model whose numbers stay of order one."""

import json
import math
from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.samplers.continuous_contract import ContinuousParams, noises
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.rng import Stream
from safetensors.torch import save_file

from ..support.tiny_mar import MAR, write_mar
from ..support.tiny_masked import CHANNELS, LENGTH, STEPS, prompt, request, tiny

pytestmark = pytest.mark.usefixtures("without_gradients")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def models():
    return tiny(1), tiny(2)


def image(batch):
    return torch.randn(batch, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(4))


def known_rows(*counts):
    """Known tokens [B, S] (bool): of row i, counts[i] of them, at random places."""
    places = torch.rand(len(counts), LENGTH, generator=torch.Generator().manual_seed(8)).argsort(dim=1)
    return places < torch.tensor(counts)[:, None]


# What the transformer sees


def predict(model, state, tokens, known, query, seen, cfg=2.0, seed=0, kind="ddpm", temperature=1.0):
    """The distribution at query [B, V, M] with noise that belongs to the positions."""
    schedule = model.schedule(ContinuousParams(steps=STEPS, kind=kind))
    noise0, noise_t = noises(Stream.of(seed, len(tokens), "cpu"), query.flatten(1), CHANNELS, STEPS)
    shape = (*query.shape, CHANNELS)
    return model.predict(
        state,
        tokens,
        known,
        query,
        seen,
        torch.full(query.shape, cfg),
        temperature,
        noise0.reshape(shape),
        noise_t.reshape(STEPS, *shape),
        schedule,
    )


def assert_same(one, other):
    for name in ("mean", "log_std", "path"):
        assert torch.allclose(getattr(one, name), getattr(other, name), **CLOSE), name


@pytest.mark.parametrize("guided", [False, True])
def test_variants_of_one_call_equal_calls_of_their_own(models, guided):
    model, tokens = models[0], image(2)
    known = torch.stack([known_rows(0, 2), known_rows(3, 4), known_rows(5, 7)], dim=1)
    query = torch.arange(2 * 3 * 2).reshape(2, 3, 2) % LENGTH
    state = model.start(prompt(model, 3), None, 2, model.grid, guided)
    together = predict(model, state, tokens, known, query, 7)
    assert together.mean.shape == (2, 3, 2, CHANNELS) and together.path.shape == (2, 3, 2)
    for v in range(3):
        alone = predict(model, state, tokens, known[:, v : v + 1], query[:, v : v + 1], 7)
        assert_same(together.map(lambda t, v=v: t[:, v : v + 1]), alone)


@pytest.mark.parametrize(("counts", "slots"), [((2, 5), (5, 6, LENGTH)), ((0, 0), (0, 4))])
def test_slots_for_more_known_tokens_change_nothing(models, counts, slots):
    model, tokens, known = models[0], image(2), known_rows(*counts)[:, None]
    query = torch.tensor([[[0, 4]], [[8, 1]]])
    state = model.start(prompt(model, 3), None, 2, model.grid, True)
    wanted, *others = (predict(model, state, tokens, known, query, seen) for seen in slots)
    for other in others:
        assert_same(other, wanted)


# Guidance


def test_guidance_mixes_the_predictions_of_both_prompts(models):
    """A scale of 1 is no guidance, of 0 the other prompt's; the variance is always the prompt's own."""
    model, tokens, known = models[0], image(1), known_rows(3)[:, None]
    query = torch.tensor([[[5, 6]]])
    other = prompt(model, 1)
    guided = model.start(prompt(model, 3), other, 1, model.grid, True)
    alone = model.start(prompt(model, 3), None, 1, model.grid, False)
    turned = model.start(other, None, 1, model.grid, False)
    assert guided.branches == 2 and alone.branches == 1
    plain = predict(model, alone, tokens, known, query, 3)
    assert_same(predict(model, guided, tokens, known, query, 3, cfg=1.0), plain)
    ddim = {"kind": "ddim"}  # without noise, whose width is that of the prompt in any case
    assert torch.allclose(
        predict(model, guided, tokens, known, query, 3, cfg=0.0, **ddim).mean,
        predict(model, turned, tokens, known, query, 3, **ddim).mean,
        **CLOSE,
    )
    assert (predict(model, guided, tokens, known, query, 3, cfg=4.0).mean - plain.mean).abs().max() > 1e-3


# Samplers


def test_kept_tokens_stay_and_are_seen(models):
    target, drafter = models
    tokens, kept = image(2), known_rows(3, 5)
    for method in (ContinuousSpeculative(drafter, 3), ContinuousNextToken(4)):
        decoded = method.sample(request(target, 2, tokens=tokens, kept=kept)).tokens
        assert torch.equal(decoded[kept], tokens[kept])
        other = method.sample(request(target, 2, tokens=tokens + 1, kept=kept)).tokens
        assert ((decoded != other).any(-1)).all()


def test_a_noiseless_head_needs_no_temperature(models):
    method = ContinuousSpeculative(models[1], 4)
    tokens = [method.sample(request(models[0], kind="ddim", temperature=t)).tokens for t in (0.0, 1.0)]
    assert torch.equal(*tokens)


def test_a_huge_tolerance_ends_as_an_infinite_one(models):
    for tolerance in (1e300, math.inf):
        trace = api.sample(models[0], prompt(models[0], 3), ContinuousSpeculative(models[1], tolerance=tolerance)).trace
        assert trace.summary()["accepted_drafts"] > 0


def test_a_drafter_with_another_table_of_words_is_refused(tmp_path):
    config = replace(MAR, captions=True, conditions=8)
    for number, (name, words) in enumerate((("own", ["red", "apple"]), ("other", ["sky", "sea"]))):
        (tmp_path / name).mkdir()
        write_mar(tmp_path / name / "model.safetensors", config)
        table = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        header = {"words": words, "stop_words": [], "synonyms": {}}
        save_file(
            {"word_embeddings.weight": table},
            tmp_path / name / "text_encoder.safetensors",
            {"specar": json.dumps(header)},
        )
    with pytest.raises(CheckpointError, match="text_encoder.safetensors"):
        load_drafter(tmp_path / "other", load_model(tmp_path / "own"))


@pytest.mark.parametrize("scale", [0, -1, math.nan, "large"])
def test_an_illegal_scale_is_refused(tmp_path, scale):
    with pytest.raises(CheckpointError, match="scale"):
        load_model(write_mar(tmp_path / "model.safetensors", scale=scale))
