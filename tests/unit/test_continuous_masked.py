"""MAR behind the samplers' protocol: a tiny random model whose numbers stay of order one."""

import math

import pytest
import torch
from comfyui_specar.samplers.continuous_contract import ContinuousParams, masked_guidance, noises
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.rng import Stream

from ..support.tiny_masked import CHANNELS, LENGTH, SIDE, STEPS, prompt, request, tiny

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def models():
    return tiny(1), tiny(2)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def image(batch):
    return torch.randn(batch, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(4))


def known_rows(*counts):
    """Known tokens [B, S] (bool): of row i, counts[i] of them, at random places."""
    places = torch.rand(len(counts), LENGTH, generator=torch.Generator().manual_seed(8)).argsort(dim=1)
    return places < torch.tensor(counts)[:, None]


# What the transformer sees


def test_rows_that_know_different_numbers_of_tokens_do_not_disturb_each_other(models):
    model, counts = models[0], (0, 1, 4, 8)
    tokens, known = image(4), known_rows(*counts)
    together = model.condition(prompt(model, 0, 1, 2, 3), tokens, known)
    for i in range(4):
        alone = model.condition(prompt(model, i), tokens[i : i + 1], known[i : i + 1])
        assert torch.allclose(together[i], alone[0], **CLOSE)
    assert (together[0] - together[1]).abs().max() > 0.1


def test_unknown_tokens_are_not_seen_and_known_ones_are(models):
    model, tokens, known = models[0], image(2), known_rows(3, 5)
    z = model.condition(prompt(model, 3), tokens, known)
    hidden = torch.where(known[..., None], tokens, 1e4)
    assert torch.equal(model.condition(prompt(model, 3), hidden, known), z)
    shown = torch.where(known[..., None], tokens + 1, tokens)
    assert (model.condition(prompt(model, 3), shown, known) - z).abs().max() > 0.01
    assert (model.condition(prompt(model, 1), tokens, known) - z).abs().max() > 0.01


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


def test_slots_for_more_known_tokens_change_nothing(models):
    model, tokens, known = models[0], image(2), known_rows(2, 5)[:, None]
    query = torch.tensor([[[0, 4]], [[8, 1]]])
    state = model.start(prompt(model, 3), None, 2, model.grid, True)
    wanted = predict(model, state, tokens, known, query, 5)
    for seen in (6, LENGTH):
        assert_same(predict(model, state, tokens, known, query, seen), wanted)


def test_nothing_known_needs_no_slots(models):
    model, tokens, known = models[0], image(1), torch.zeros(1, 1, LENGTH, dtype=torch.bool)
    state = model.start(prompt(model, 3), None, 1, model.grid, True)
    query = torch.tensor([[[5]]])
    assert_same(predict(model, state, tokens, known, query, 0), predict(model, state, tokens, known, query, 4))


# Guidance


def test_linear_guidance_rises_with_the_share_of_the_image():
    """1 + (cfg - 1) known/S, the token itself counted, but never all: the last two sample at (S - 1)/S."""
    before = torch.arange(256)
    scale = masked_guidance(ContinuousParams(cfg=3.0), before, before + 1, 256)
    wanted = [1 + 2 * min(i + 1, 255) / 256 for i in range(256)]
    assert torch.allclose(scale, torch.tensor(wanted)) and scale.dtype == torch.float32
    assert scale[0] == 1 + 2 / 256 and scale[-1] == scale[-2] == 1 + 2 * 255 / 256
    assert (masked_guidance(ContinuousParams(cfg=3.0, cfg_schedule="constant"), before, before + 1, 256) == 3).all()


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


def test_guidance_without_a_negative_prompt_is_against_no_prompt(models):
    model = models[0]
    state = model.start(prompt(model, 3), None, 2, model.grid, True)
    assert state.branches == 2 and torch.equal(state.prompts[2:], model.backbone.unconditional(2))


def test_the_temperature_widens_the_last_step_but_not_the_path(models):
    model, tokens, known = models[0], image(1), known_rows(3)[:, None]
    state = model.start(prompt(model, 3), None, 1, model.grid, False)
    query = torch.tensor([[[5]]])
    for kind in ("ddpm", "ddim"):
        one, half = (predict(model, state, tokens, known, query, 3, kind=kind, temperature=t) for t in (1.0, 0.5))
        assert one.log_std.isfinite().all()
        if kind == "ddim":
            width = model.schedule(ContinuousParams(steps=STEPS, kind=kind)).last_width
            assert torch.equal(one.mean, half.mean) and (one.path == 0).all()
            assert torch.allclose(one.log_std, torch.full_like(one.log_std, math.log(width)))
        else:
            assert (one.mean - half.mean).abs().max() > 1e-3


# Samplers


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_a_model_that_drafts_for_itself_generates_the_plain_image(models, cfg):
    model = models[0]
    plain = ContinuousNextToken().sample(request(model, 2, cfg=cfg)).tokens
    for mode in ("block", "prefix"):
        method = ContinuousSpeculative(model, 4, mode=mode, condition="drafts")
        decoded = method.sample(request(model, 2, cfg=cfg))
        assert decoded.trace.summary()["acceptance_rate"] == 1
        assert torch.allclose(decoded.tokens, plain, atol=1e-4)
    assert 0.05 < plain.std() < 5


@pytest.mark.parametrize("mode", ["block", "prefix", "exact"])
def test_a_batch_equals_single_runs(models, mode):
    target, drafter = models
    method = ContinuousSpeculative(drafter, 3, 0.2, mode, tolerance=1.0)
    together = method.sample(request(target, 3, seed=7, cfg=2.0))
    assert together.tokens.isfinite().all()
    for i in range(3):
        alone = method.sample(request(target, 1, seed=7 + i, cfg=2.0))
        assert torch.allclose(together.tokens[i], alone.tokens[0], atol=1e-4)
        for name in ("source", "order", "block", "finalised_at"):
            assert torch.equal(together.trace.positions[name][i], alone.trace.positions[name][0]), name


def test_kept_tokens_stay_and_are_seen(models):
    target, drafter = models
    tokens, kept = image(2), known_rows(3, 5)
    for method in (ContinuousSpeculative(drafter, 3), ContinuousNextToken(4)):
        decoded = method.sample(request(target, 2, tokens=tokens, kept=kept)).tokens
        assert torch.equal(decoded[kept], tokens[kept])
        other = method.sample(request(target, 2, tokens=tokens + 1, kept=kept)).tokens
        assert ((decoded != other).any(-1)).all()


def test_tokens_and_latents_are_each_others_inverse(models):
    model, tokens = models[0], image(2)
    latent = model.to_latent(tokens, model.grid)
    assert latent.shape == (2, CHANNELS, SIDE, SIDE)
    assert torch.allclose(latent[1, :, 1, 2] * model.scale, tokens[1, SIDE + 2])
    assert torch.allclose(model.from_latent(latent), tokens)
