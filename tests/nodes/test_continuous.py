"""Continuous models: loading, the two samplers, inpainting, their VAE, what does not go together."""

import numpy as np
import pytest
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfyui_specar.nodes import continuous as samplers
from comfyui_specar.nodes.comfy_runtime import runs
from comfyui_specar.nodes.comfy_runtime.models import SERVER
from comfyui_specar.samplers.trace import Source

import nodes as core

BOTH = pytest.mark.parametrize("method", ["NextToken", ""])
BLOCK, PREFIX, EXACT, PRINTED, PUBLISHED = samplers.MODES
LOWER = torch.zeros(1, 1, 32, 32)
LOWER[..., 16:, :] = 1


# Sampling


@BOTH
def test_samplers_generate_and_say_how(method, draw_vectors):
    latent, trace = draw_vectors(method, batch=2)
    assert latent["samples"].shape == (2, 6, 4, 4) and latent["samples"].isfinite().all()
    assert (latent["samples"].abs().amax(1) > 0).all()
    assert trace.continuous and trace.settings["model"] == "vectors" and trace.settings["prompt"] == "red apple"
    assert trace.settings["server"] == SERVER and trace.settings.get("lossless", True) == (method != "")
    if not method:
        assert trace.settings["drafter_name"] == "vectors.safetensors"
        assert trace.totals["draft_passes"] > 0 and trace.totals["target_passes"] < 16


def test_widgets_reach_the_model(draw_vectors):
    own, trace = draw_vectors("NextToken")
    names = ("cfg", "temperature", "cfg_schedule", "kind", "steps", "iterations")
    assert [trace.settings[name] for name in names] == [2.0, 0.9, "linear", "ddpm", 5, None]
    assert trace.totals["target_passes"] == 16
    given, trace = draw_vectors(
        "NextToken", cfg=3.0, temperature=0.5, guidance="constant", head_sampler="ddim", head_steps=3, iterations=4
    )
    assert [trace.settings[name] for name in names] == [3.0, 0.5, "constant", "ddim", 3, 4]
    assert trace.totals["target_passes"] == 4 and not torch.equal(own["samples"], given["samples"])


def test_widgets_reach_the_method(draw_vectors):
    _, trace = draw_vectors(
        "", draft_length=3, prefill=0.25, mode=PREFIX, tolerance=0.5, sigma="as in the paper", alignment=False
    )
    wanted = {"length": 3, "prefill": 0.25, "mode": "prefix", "condition": "drafts", "tolerance": 0.5}
    assert trace.settings.items() >= (wanted | {"path": "paper", "aligned": False, "lossless": False}).items()
    assert (trace.positions["source"] == Source.PREFILL).sum() == 4
    _, trace = draw_vectors("", mode=EXACT)
    assert trace.settings["mode"] == "exact" and trace.settings["lossless"] and "tolerance" not in trace.settings
    for option, mode, path in ((PRINTED, "printed", "paper"), (PUBLISHED, "published", "official")):
        _, trace = draw_vectors("", mode=option)  # which has a Sigma of its own
        assert trace.settings.items() >= {"mode": mode, "path": path, "lossless": False}.items()
    _, trace = draw_vectors("", target_sees="what is decided, and earlier guesses")
    assert trace.settings["mode"] == "block" and trace.settings["condition"] == "drafts"


# Inpainting


def test_an_encoded_image_is_kept(draw_vectors, continuous):
    (encoded,) = core.VAEEncode().encode(continuous[2], torch.rand(1, 32, 32, 3))
    (masked,) = core.SetLatentNoiseMask().set_mask(encoded, LOWER[0])
    latent, _ = draw_vectors("", latent_image=masked)
    assert torch.equal(latent["samples"][..., :2, :], encoded["samples"][..., :2, :])


def test_mask_errors(draw_vectors):
    image = torch.ones(1, 6, 4, 4)
    for latent, message in (
        ({"samples": 0 * image, "noise_mask": LOWER}, "no image to keep"),
        ({"samples": image, "noise_mask": 0 * LOWER}, "mask.*nothing to generate"),
        ({"samples": image, "noise_mask": LOWER.repeat(3, 1, 1, 1)}, r"3 masks for a batch of 1\. Use 1\.$"),
        ({"samples": image.repeat(2, 1, 1, 1), "noise_mask": LOWER.repeat(3, 1, 1, 1)}, r"batch of 2\. Use 1 or 2\.$"),
        ({"samples": image[:, :4], "noise_mask": LOWER}, r"\[1, 4, 4, 4\].*6 channels"),
        ({"samples": image[:, :, None], "noise_mask": LOWER}, r"\[1, 6, 1, 4, 4\].*rows"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_vectors("", latent_image=latent)


# What cannot work


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"cfg": 0.5}, "cfg.* 0.5"),
        ({"iterations": -3}, "iterations.* -3"),
        ({"temperature": 0.0}, "temperature.* 0.*above 0"),
        ({"guidance": "magic"}, "guidance.*'magic'"),
        ({"head_sampler": "magic"}, "head_sampler.*'magic'"),
        ({"head_steps": 1}, "2 to 501 steps"),
        ({"head_steps": 5000}, "head_steps.*5000.*0 to 1000"),
        ({"draft_length": 0}, "draft_length.* 0"),
        ({"prefill": 1.5}, "prefill.* 1.5"),
        ({"mode": "magic"}, "mode.*'magic'"),
        ({"target_sees": "magic"}, "target_sees.*'magic'"),
        ({"sigma": "magic"}, "sigma.*'magic'"),
        ({"tolerance": -0.1}, "tolerance.* -0.1"),
        ({"mode": EXACT, "sigma": "as in the paper"}, "Sigma.*off"),
        ({"mode": EXACT, "head_sampler": "ddim"}, "ddpm"),
        ({"mode": PRINTED, "head_sampler": "ddim"}, "ddpm"),
        ({"mode": PREFIX, "target_sees": "what is decided"}, "drafts"),
        ({"latent_image": {"samples": torch.zeros(1, 6, 8, 8)}}, "only 32 x 32 pixels"),
        ({"positive": [[torch.zeros(1, 77, 768), {"pooled_output": None}]]}, "CLIP"),
    ],
)
def test_illegal_inputs_are_named(inputs, message, draw_vectors):
    with pytest.raises(ValueError, match=message):
        draw_vectors("NextToken" if "iterations" in inputs else "", **inputs)


def test_an_empty_prompt_samples_what_the_model_knows(draw_vectors, continuous):
    empty = continuous[1].encode_from_tokens_scheduled("  ")
    latent, trace = draw_vectors("", positive=empty, cfg=3.0)
    assert len(trace.notices) == 1 and "prompt is empty" in trace.notices[0]
    alone, _ = draw_vectors("", positive=empty, cfg=1.0)
    guided, plain = (draw_vectors("", cfg=cfg)[0] for cfg in (3.0, 1.0))
    changes = [(a["samples"] - b["samples"]).abs().max() for a, b in ((latent, alone), (guided, plain))]
    assert 1000 * changes[0] < changes[1], "both branches of guidance are the same"


def test_samplers_of_the_other_kind_name_the_right_node(sample, draw_vectors, tiny, continuous, small_vectors, drafter):
    for method, more in (("SJD", {}), ("DraftTree", {"drafter": small_vectors})):
        with pytest.raises(ValueError, match="vectors.*Continuous Speculative Sampler"):
            sample(method, model=continuous[0], **more)
    for method, more in (("NextToken", {}), ("", {"drafter": drafter})):
        with pytest.raises(ValueError, match="tiny.*SJD"):
            draw_vectors(method, model=tiny[0], **more)
    with pytest.raises(ValueError, match="Load AR Checkpoint"):
        draw_vectors("", drafter=drafter)


@BOTH
def test_tokens_that_are_no_numbers_are_reported(method, draw_vectors, continuous):
    weights = continuous[0].model.head.net.final_layer.linear.weight
    before = weights.detach().clone()
    try:
        weights.data.fill_(1e38)  # overflows, as fp16 does in a large model
        with pytest.raises(ValueError, match="tokens.*fp32 or bf16"):
            draw_vectors(method)
    finally:
        weights.data.copy_(before)
    draw_vectors(method)


# Memory, progress, interruption


def test_previews_show_known_tokens_and_grey(draw_vectors, progress, hurried, monkeypatch):
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    first, trace = draw_vectors("NextToken")
    kind, image, _ = progress[3][2]  # after four tokens, wherever they are
    drawn = trace.grid("order")[0] < 4
    pixels = torch.from_numpy(np.array(image)).unflatten(0, (4, 8)).unflatten(2, (4, 8))
    grey = (pixels == 128).flatten(-1).all(-1).all(3).all(1)
    assert kind == "JPEG" and image.size == (32, 32) and torch.equal(grey, ~drawn)
    progress.clear()
    draw_vectors("", latent_image={**first, "noise_mask": LOWER})
    pixels = np.array(progress[0][2][1])
    assert not (pixels[:16] == 128).all()  # what is kept is there from the start


def test_model_and_drafter_are_loaded_together_with_space_for_the_widest_pass(
    draw_vectors, continuous, small_vectors, loads
):
    draw_vectors("", batch=2)
    draw_vectors("", batch=2, target_sees="what is decided, and earlier guesses")
    (models, narrow), (_, wide) = loads
    assert continuous[0].patcher in models and small_vectors.patcher in models
    assert narrow["memory_required"] > continuous[0].model.run_bytes(4, 16, 4)
    assert wide["memory_required"] > 2 * narrow["memory_required"]


def test_what_comfyui_leaves_in_main_memory_is_moved_too(continuous):
    model = continuous[0].model
    left = {
        name
        for name, parameter in model.named_parameters()
        if not hasattr(model.get_submodule(name.rpartition(".")[0]), "comfy_cast_weights")
    }
    assert {"backbone.mask_token", "backbone.fake_latent", "backbone.encoder_pos_embed_learned"} <= left
    moved = torch.nn.Module()
    moved.table = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    moved.inner = type(model.backbone.z_proj)(2, 2)
    moved.register_buffer("numbers", torch.zeros(2))
    runs.bring_the_rest(moved, torch.device("meta"))
    assert moved.table.is_meta and moved.numbers.is_meta and not moved.inner.weight.is_meta


def test_lower_precision(load, load_drafter, vectors, draw_vectors):
    loaded = load("vectors", dtype="bf16")[0]
    assert {p.dtype for p in loaded.model.backbone.parameters()} == {torch.bfloat16}
    small = load_drafter(loaded, "vectors.safetensors")
    latent, _ = draw_vectors("", model=loaded, drafter=small)
    assert latent["samples"].dtype == torch.float32 and latent["samples"].isfinite().all()
