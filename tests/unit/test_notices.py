"""What a run does not do of what it was asked for, said in its trace, its report, the log and Python's Output."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families.harmon import HarmonModel
from comfyui_specar.model_loaders.text.t5 import T5Encoder
from comfyui_specar.models.changed_latents import is_off_codebook, is_repeated
from comfyui_specar.models.sizes import unsupported_size
from comfyui_specar.models.text import prompt_settings
from comfyui_specar.samplers.methods.next_token import NextToken
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ..support.tiny import CAPTION, GRID, write_llamagen, write_words

PIXELS = 16 * GRID[0], 16 * GRID[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that reads two of its words."""
    folder = tmp_path_factory.mktemp("model")
    write_words(folder, CAPTION)
    model = api.load_model(write_llamagen(folder / "model.safetensors", True, caption_slots=2))
    model.prompt_encoder.slots = 2
    return model


def sample(model, positive, negative=None, **options):
    return api.sample(model, positive, NextToken(), negative=negative, **options)


def test_every_reader_has_the_same_notices(model, caplog):
    with caplog.at_level(logging.WARNING):
        out = sample(model, model.encode_prompt("a crimsn cat on a blue background, red"))
    unknown, left_out = out.notices
    assert "crimsn (crimson?)" in unknown and left_out.endswith("at most 2 words of a prompt and leaves out: red.")
    assert out.trace.notices == out.trace.report()["settings"]["notices"] == out.notices
    assert api.run_report(out.trace).splitlines()[-2:] == out.notices == caplog.messages


def test_a_negative_prompt_without_guidance_is_not_used(model):
    [notice] = sample(model, model.encode_prompt("a cat"), model.encode_prompt("red quark"), cfg=1.0).notices
    assert "negative prompt is not used" in notice and "cfg" in notice


@pytest.mark.parametrize("cfg, said", [(1.0, False), (4.0, False), (4.5, True)])
def test_guidance_far_above_the_models_own_is_said(model, monkeypatch, cfg, said):
    monkeypatch.setattr(model, "defaults", replace(model.defaults, cfg=2.0))
    notices = sample(model, model.encode_prompt("a cat"), cfg=cfg).notices
    expected = ["cfg is 4.5, but this model's own is 2. So high, the image may fall apart."]
    assert notices == (expected if said else [])


# Captions of T5


class Words:
    """A tokenizer of words."""

    def specials_in(self, text):
        return []

    def beyond(self, text, count):
        return " ".join(text.split()[count:])


@pytest.mark.parametrize(("count", "rest"), [(4, ""), (5, "w4"), (7, "w4 w5 w6")])
def test_tokens_beyond_the_slots_of_t5_are_named(count, rest):
    encoder = T5Encoder(None, Words(), slots=5, width=CAPTION)
    found = encoder.notices(" ".join(f"w{i}" for i in range(count)))
    assert [notice.split("leaves out: ")[1] for notice in found] == [f"{rest}."] * bool(rest)


@pytest.mark.parametrize(
    ("text", "removed"),
    [
        ("a Red cat, 'old'", ""),
        ("a cat 猫", "猫"),
        ("free shipping of cats", "free, shipping"),
        ("AT&amp;T&nbsp;logo", ""),
        ("a \ufb01sh, \uff26\uff35\uff2c\uff2c", ""),
        ("a_b_c_d_e", ""),
        ("cafe\u0301", ""),
    ],
)
def test_words_that_cleaning_removes_from_a_caption_are_named(text, removed):
    found = T5Encoder(None, Words(), slots=20, width=CAPTION).notices(text)
    assert [notice.split("learned: ")[1] for notice in found] == [f"{removed}."] * bool(removed)


def test_prompts_that_were_joined_to_more_than_the_slots_are_named(model):
    [[features, own]] = model.encode_prompt("a red cat")
    slots = model.prompt_encoder.slots
    joined = [features.repeat(1, slots, 1)[:, :length] for length in (slots, slots + 1)]
    fitting, longer = (sample(model, [[each, own]]).notices for each in joined)
    assert fitting == []
    [notice] = longer
    assert f"has {slots + 1} words" in notice and f"{slots} at most" in notice


# Settings of prompts


WHOLE = ("percentage", 1.0, 1.0, 0, 0)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"area": (4, 4, 0, 0), "strength": 1.0, "set_area_to_bounds": False}, ["area"]),
        ({"area": (PIXELS[0] // 8, PIXELS[1] // 8, 0, 0), "strength": 1.0}, []),
        ({"area": (PIXELS[0] // 8, PIXELS[1] // 8, 0, 1)}, ["area"]),
        ({"area": ("percentage", 1.0, 0.5, 0, 0.5), "strength": 0.7}, ["area", "strength"]),
        ({"area": WHOLE}, []),
        ({"area": ("percentage", 1.0, 1.0, 1.0, 0, 0, 0)}, []),
        ({"area": ("percentage",)}, []),
        ({"mask": torch.ones(1, 8, 8), "mask_strength": 1.0, "set_area_to_bounds": True}, []),
        ({"mask": torch.zeros(1, 8, 8), "mask_strength": 0.5, "set_area_to_bounds": True}, ["mask", "strength"]),
        ({"start_percent": 0.0, "end_percent": 1.0}, []),
        ({"start_percent": 0.2, "end_percent": 0.8}, ["time range"]),
        ({"guidance": None}, []),
        ({"guidance": 3.5}, ["guidance (set cfg on the sampler)"]),
        ({"mine": 3}, ["'mine'"]),
    ],
)
def test_settings_of_a_prompt_are_named_unless_they_restrict_nothing(entries, words, model):
    assert prompt_settings.describe_ignored({"ar": {}} | entries, PIXELS) == words
    [[features, own]] = model.encode_prompt("a cat")
    notices = sample(model, [[features, own | entries]]).notices
    assert [notice.split(": ")[1] for notice in notices] == [f"{', '.join(words)}."] * bool(words)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("control", object(), "ControlNet"),
        ("gligen", ("position", object(), []), "GLIGEN"),
        ("reference_latents", [torch.zeros(1, 4, 8, 8)], "reference pictures"),
        ("mine", {"a": torch.zeros(1)}, "'mine'"),
        ("unclip_conditioning", [{"clip_vision_output": object(), "strength": 1.0}], "unCLIP"),
    ],
)
def test_a_picture_or_a_model_on_a_prompt_is_refused(entry, value, words, model):
    [[features, own]] = model.encode_prompt("a cat")
    with pytest.raises(ValueError, match=f"positive.*{words}.*CLIP Text Encode"):
        sample(model, [[features, own | {entry: value}]])


# Sizes


def test_the_nearest_sizes_of_whole_tokens_are_named():
    model = SimpleNamespace(grids=((16, 16), (32, 32)), any_grid=False, pixels_per_token=16)
    found = unsupported_size(model, 250, 256)
    assert "250 x 256 pixels (15.625 x 16 tokens)" in found and "256 x 256, 512 x 512 pixels" in found
    harmon = HarmonModel.__new__(HarmonModel)
    torch.nn.Module.__init__(harmon)
    harmon.pixels_per_token, harmon.grids = 16, ((32, 32),)
    assert "264 x 250 pixels" in (found := unsupported_size(harmon, 264, 250)) and "272 x 256, 256 x 256" in found


# Latents


SIDES = st.integers(6, 24)


def image(rows, cols, codebook, batch=1):
    """A latent without repetitions: neighbouring tokens differ."""
    tokens = (torch.arange(rows)[:, None] * 3 + torch.arange(cols) * 5).remainder(len(codebook)).expand(batch, -1, -1)
    return codebook[tokens].movedim(-1, 1)


def book(kind):
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(61, 6, generator=generator)
    levels = vectors.sign() * torch.arange(1, 62)[:, None]
    return {"any": vectors, "unit": F.normalize(vectors, dim=1), "levels": levels}[kind]


KINDS = st.sampled_from(["any", "unit", "levels"])


@given(SIDES, SIDES, st.integers(1, 3), KINDS, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
@settings(deadline=None, max_examples=40)
def test_a_latent_as_it_was_generated_is_no_changed_one(rows, cols, batch, kind, dtype):
    """Nor one stored in half precision, turned or cropped."""
    latent = image(rows, cols, book(kind), batch).to(dtype)
    for each in (latent, latent.flip(-1), latent.rot90(1, (-2, -1)), latent[..., 1:-2, 2:]):
        assert not is_off_codebook(each, book(kind)) and not is_repeated(each)
    blank = latent[..., :1, :1].expand_as(latent)
    assert not is_off_codebook(blank, book(kind)) and not is_repeated(blank)


@given(SIDES, SIDES, KINDS, st.sampled_from([1.25, 1.5, 2.0, 3.0]), st.sampled_from(["nearest-exact", "bilinear"]))
@settings(deadline=None, max_examples=60)
def test_a_latent_that_was_scaled_is_told(rows, cols, kind, factor, mode):
    latent = image(rows, cols, book(kind))
    scaled = F.interpolate(latent, (round(rows * factor), round(cols * factor)), mode=mode)
    assert is_off_codebook(scaled, book(kind)) or is_repeated(scaled)


@given(KINDS, st.floats(0.1, 0.9))
@settings(deadline=None, max_examples=20)
def test_a_latent_that_was_blended_is_told(kind, share):
    latent = image(8, 8, book(kind))
    assert is_off_codebook(torch.lerp(latent, latent.roll(1, -1), share), book(kind))


def test_notices_of_an_untrusted_trace_do_nothing_to_a_terminal(model):
    trace = api.sample(model, model.encode_prompt("cat"), NextToken()).trace
    trace.settings["notices"] = ["red\x1b[31m"]
    assert api.run_report(trace).splitlines()[-1] == "red\\x1b[31m"
