"""What core's own nodes ask for and an AR model does not do: said on the node, or refused with the node to use."""

import importlib
import inspect
import logging

import pytest
import torch
from comfyui_specar.nodes.latents import EVERYTHING, NOTHING

import nodes as core

PARTS = {  # module -> nodes that encode text for other models, with what they need besides texts
    "clip_sdxl": {"CLIPTextEncodeSDXL": {}, "CLIPTextEncodeSDXLRefiner": {}},
    "flux": {"CLIPTextEncodeFlux": {}},
    "sd3": {"CLIPTextEncodeSD3": {"empty_padding": "none"}},
    "hidream": {"CLIPTextEncodeHiDream": {}},
    "hunyuan": {"CLIPTextEncodeHunyuanDiT": {}},
    "pixart": {"CLIPTextEncodePixArtAlpha": {}},
    "cond": {"CLIPTextEncodeControlnet": {"conditioning": []}},
    "kandinsky5": {"CLIPTextEncodeKandinsky5": {}},
    "qwen": {"TextEncodeQwenImageEdit": {"image1": None}},
    "ace": {"TextEncodeAceStepAudio": {}},
}
TEXTS = [(module, name) for module, found in PARTS.items() for name in found]


def called(module, name, clip):
    """Run a node of core's extras, with a text for each of its texts and a number for each number."""
    try:
        node = getattr(importlib.import_module(f"comfy_extras.nodes_{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this ComfyUI has no {name}")
    function = getattr(node, "execute", None) or getattr(node(), node.FUNCTION)
    extra = {"clip": clip, "image": torch.rand(1, 32, 32, 3)} | PARTS[module][name]
    numbers = ("width", "height", "crop_w", "crop_h", "target_width", "target_height", "ascore", "guidance")
    given = {
        parameter: extra.get(parameter, 8 if parameter in numbers else "a red apple")
        for parameter, about in inspect.signature(function).parameters.items()
        if about.default is about.empty or parameter in extra
    }
    return function(**given)


@pytest.mark.parametrize(("module", "name"), TEXTS)
def test_nodes_that_encode_text_for_other_models_name_the_one_to_use(module, name, tiny):
    with pytest.raises((ValueError, AttributeError), match="AR image model.*straight to CLIP Text Encode"):
        called(module, name, tiny[1])


# Settings on prompts


def test_settings_on_a_prompt_are_notices_unless_they_restrict_nothing(sample, positive, page, caplog):
    """Those of core's nodes, all on one prompt."""
    (restricted,) = core.ConditioningSetArea().append(positive, 16, 32, 0, 0, 0.5)
    (restricted,) = core.ConditioningSetMask().append(restricted, torch.zeros(1, 8, 8), "default", 1.0)
    (restricted,) = core.ConditioningSetTimestepRange().set_range(restricted, 0, 0.5)
    (free,) = core.ConditioningSetAreaPercentage().append(positive, 1.0, 1.0, 0, 0, 1.0)
    (free,) = core.ConditioningSetMask().append(free, torch.ones(1, 8, 8), "mask bounds", 1.0)
    (free,) = core.ConditioningSetTimestepRange().set_range(free, 0, 1)
    server = page()
    with caplog.at_level(logging.WARNING):
        _, trace = sample("NextToken", positive=restricted)
    notice = "AR models do not use what is set on the positive prompt: area, strength, mask, time range."
    assert trace.notices == [notice] and notice in caplog.text
    assert ("specar.notices", {"node": "7", "notices": [notice]}, "a page") in server.events
    server.events.clear()
    assert sample("NextToken", positive=free)[1].notices == []
    assert ("specar.notices", {"node": "7", "notices": []}, "a page") in server.events


def test_what_brings_a_picture_or_a_model_is_refused(sample, positive):
    class Control:
        def copy(self):
            return self

        def set_cond_hint(self, *_, **__):
            return self

        def set_previous_controlnet(self, _):
            pass

    hint = torch.rand(1, 32, 32, 3)
    controlled, _ = core.ControlNetApplyAdvanced().apply_controlnet(positive, positive, Control(), hint, 1.0, 0.0, 1.0)
    (unclip,) = core.unCLIPConditioning().apply_adm(positive, object(), 1.0, 0.0)
    for prompt, words in ((controlled, "a ControlNet"), (unclip, "a picture .unCLIP.")):
        with pytest.raises(ValueError, match=f"positive comes with {words}.*CLIP Text Encode"):
            sample("NextToken", positive=prompt)
    free, _ = core.ControlNetApplyAdvanced().apply_controlnet(positive, positive, Control(), hint, 0.0, 0.0, 1.0)
    assert sample("NextToken", positive=free)[1].notices == []


def test_an_image_to_keep_that_was_changed_is_said_to_be_torn(sample, tiny):
    (encoded,) = core.VAEEncode().encode(tiny[2], torch.rand(1, 32, 32, 3))
    mask = torch.zeros(1, 32, 32)
    mask[:, :, 16:] = 1
    (kept,) = core.SetLatentNoiseMask().set_mask(encoded, mask)
    (smaller,) = core.LatentUpscaleBy().upscale(kept, "nearest-exact", 0.5)
    (scaled,) = core.LatentUpscaleBy().upscale(smaller, "bilinear", 2.0)
    [notice] = sample("NextToken", latent_image=scaled)[1].notices
    assert "torn" in notice and "before VAE Encode" in notice
    assert sample("NextToken", latent_image=kept)[1].notices == []


def test_an_image_without_a_mask_is_said_to_be_unused(sample):
    latent, trace = sample("NextToken")
    assert trace.notices == []
    [notice] = sample("NextToken", latent_image=latent)[1].notices
    assert "only its size" in notice and "Set Latent Noise Mask" in notice
    masked = {**latent, "noise_mask": torch.ones(1, 4, 4).triu()}
    assert sample("NextToken", latent_image=masked)[1].notices == []


# Sizes


@pytest.mark.parametrize(("pixels", "words"), [(250, "248 x 248 pixels"), (264, "264 x 264"), (272, "272 x 272")])
def test_an_empty_latent_of_no_whole_tokens_is_refused_as_empty_ar_latent_does(pixels, words, tiny, sample, run_node):
    """Newer cores have cells of 8 pixels, and round what they are asked for down to these."""
    side, model = 16, tiny[0].model
    own, model.pixels_per_token = model.pixels_per_token, side
    latent = {"samples": torch.zeros(1, 4, pixels // 8, pixels // 8), "downscale_ratio_spacial": 8}
    try:
        with pytest.raises(ValueError, match=f"{words}.*only 64 x 64 pixels"):
            sample("NextToken", latent_image=latent)
        with pytest.raises(ValueError, match=f"{pixels} x {pixels} pixels.*only 64 x 64 pixels"):
            run_node("EmptyLatent", model=tiny[0], width=pixels, height=pixels)
    finally:
        model.pixels_per_token = own


# Latents


@pytest.mark.parametrize(("method", "factor"), [("nearest-exact", 2.0), ("bilinear", 1.5), ("bislerp", 2.0)])
def test_a_scaled_latent_is_told_when_it_is_decoded(method, factor, tiny, page, caplog):
    tokens = (torch.arange(8)[:, None] * 3 + torch.arange(8) * 5).remainder(64)[None]
    latent = {"samples": tiny[0].model.dequantize(tokens)}
    (scaled,) = core.LatentUpscaleBy().upscale(latent, method, factor)
    server = page()
    with caplog.at_level(logging.WARNING):
        core.VAEDecode().decode(tiny[2], scaled)
        core.VAEDecodeTiled().decode(tiny[2], scaled, 512)
    first, second = (event for event in server.events if event[0] == "specar.notices")
    assert first == second and "Upscale Image" in first[1]["notices"][0] in caplog.text
    server.events.clear()
    core.VAEDecode().decode(tiny[2], latent)
    assert server.events == [("specar.notices", {"node": "7", "notices": []}, "a page")]


def test_ids_that_were_blended_are_refused(tiny):
    ids = {"samples": torch.arange(16.0).view(1, 1, 4, 4)}
    core.VAEDecode().decode(tiny[2], ids)
    (blended,) = core.LatentBlend().blend(ids, {"samples": ids["samples"].flip(-1)}, 0.3)
    with pytest.raises(ValueError, match="no whole numbers.*Upscale Image"):
        core.VAEDecode().decode(tiny[2], blended)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a (red:1.2) apple", ["weights", "(red:1.2)"]), ("<lora:some style:0.8> a red apple", ["LoRA", "some style"])],
)
def test_weights_and_loras_have_a_sentence_of_their_own(text, words, tiny):
    clip = tiny[1]
    [notice] = clip._model.text_notices(text)
    assert all(word in notice for word in words)
    plain, other = (clip.encode_from_tokens_scheduled(each)[0][0] for each in ("a red apple", text))
    assert torch.equal(plain, other)


@pytest.mark.parametrize(("grey", "notice"), [(0.0, NOTHING), (0.3, NOTHING), (0.5, EVERYTHING), (1.0, EVERYTHING)])
def test_a_mask_that_selects_no_token_or_every_one_is_said_to(grey, notice, sample):
    first, _ = sample("NextToken")
    latent, trace = sample("SJD", latent_image={**first, "noise_mask": torch.full((1, 4, 4), grey)})
    assert trace.notices == [notice]
    assert notice == EVERYTHING or torch.equal(latent["ar_tokens"], first["ar_tokens"])


def test_an_image_of_another_vae_is_refused_before_its_size(sample):
    latent = {"samples": torch.ones(1, 4, 8, 8), "noise_mask": torch.ones(1, 8, 8)}
    with pytest.raises(ValueError, match="VAE of Load AR Checkpoint"):
        sample("SJD", latent_image=latent)
