"""The sampler nodes: results, batches, masks, progress, interruption, errors."""

import pytest
import torch
from comfyui_specar.models.conditions import VERSION
from comfyui_specar.nodes.comfy_runtime.models import SERVER
from comfyui_specar.samplers.trace import Source

from .conftest import WITH_DRAFTER

EACH_KIND = pytest.mark.parametrize("method", ["NextToken", "SJD", "DraftTree"])  # the others share their code
BOTH_KINDS = pytest.mark.parametrize("method", ["NextToken", "SJD", "DraftTree", "Continuous", "ContinuousNextToken"])


@pytest.mark.parametrize("method", ["NextToken", "SJD", *WITH_DRAFTER])
def test_latent_holds_the_code_vectors_of_the_tokens(method, sample, tiny):
    latent, trace = sample(method, batch=2)
    assert latent["ar_tokens"].shape == (2, 4, 4) and latent["ar_tokens"].dtype == torch.int64
    assert torch.equal(latent["samples"], tiny[0].model.dequantize(latent["ar_tokens"]))
    assert trace.settings["prompt"] == "red apple" and trace.settings["model"] == "tiny"
    assert trace.settings.items() >= {"dtype": "fp32", "device": "cpu", "pack": VERSION, "server": SERVER}.items()
    assert trace.settings["lossless"] == (method not in ("Lantern", "CoolSD", "VVS"))
    if method in WITH_DRAFTER:
        assert trace.settings["drafter_name"] == "eagle" and trace.totals["draft_passes"] > 0


def test_the_trace_has_the_words_that_the_model_ignored(sample, tiny):
    clip = tiny[1]
    prompts = {
        name: clip.encode_from_tokens_scheduled(text)
        for name, text in (("positive", "a red aple"), ("negative", "apple quark"))
    }
    assert sample("NextToken", **prompts)[1].settings["unknown_words"] == ["aple", "quark"]
    assert "unknown_words" not in sample("NextToken")[1].settings


@BOTH_KINDS
def test_a_batch_equals_single_runs_with_the_following_seeds(method, draw):
    together, _ = draw(method, batch=2, seed=11)
    alone = torch.cat([draw(method, seed=11 + i)[0]["samples"] for i in range(2)])
    second = {"samples": torch.zeros_like(alone[:1]), "batch_index": [1]}  # taken from a batch
    latent, _ = draw(method, latent_image=second, seed=11)
    rounding = 1e-3 if method.startswith("Continuous") else 0
    torch.testing.assert_close(together["samples"], alone, rtol=rounding, atol=1e-5 * rounding)
    torch.testing.assert_close(latent["samples"], alone[1:], rtol=rounding, atol=1e-5 * rounding)
    assert latent["batch_index"] == [1]


def test_seeds_out_of_order_are_refused(sample):
    with pytest.raises(ValueError, match="one by one"):
        sample("NextToken", latent_image={"samples": torch.zeros(2, 8, 4, 4), "batch_index": [2, 0]})


def test_settling_is_set_and_measured(sample):
    _, trace = sample("SJD", window=8, settling=0.5)
    assert trace.settings["settle"] == 0.5 and not trace.settings["lossless"] and trace.drift_bound > 0


@BOTH_KINDS
def test_mask_keeps_the_tokens_outside_it(method, draw):
    first, _ = draw(method, batch=2)
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 16:, :] = 1  # the lower half
    again, trace = draw(method, seed=99, latent_image={**first, "noise_mask": mask})
    assert torch.equal(again["samples"][..., :2, :], first["samples"][..., :2, :])
    changed = (again["samples"] != first["samples"])[..., 2:, :].any(1)
    assert changed.all() if method.startswith("Continuous") else changed.any()
    assert torch.equal(again["noise_mask"], mask) and trace.totals["tokens"] == 2 * 8
    assert (trace.grid("source")[:, :2] == Source.FORCED).all()


def test_tokens_are_recovered_from_the_code_vectors(sample):
    first, _ = sample("NextToken")
    mask = torch.zeros(1, 4, 4)  # keep everything; a mask may come in any size and without a channel
    for latent in ({"samples": first["samples"]}, {**first, "samples": first["samples"].flip(-1)}):
        again, _ = sample("NextToken", seed=99, latent_image={**latent, "noise_mask": mask})
        assert torch.equal(again["samples"], latent["samples"])


def test_model_s_own_parameters_and_given_ones(sample):
    _, trace = sample("NextToken")
    assert trace.settings["cfg"] == 2.0 and trace.settings["temperature"] == 0.9
    _, trace = sample("NextToken", cfg=1.0, temperature=0.0, top_k=5, top_p=0.5)
    given = {"cfg": 1.0, "temperature": 0.0, "top_k": 5, "top_p": 0.5}
    assert {name: trace.settings[name] for name in given} == given


@pytest.mark.parametrize("method", ["NextToken", "ContinuousNextToken"])
def test_negative_prompt_counts_and_an_empty_one_does_not(method, draw, tiny, continuous):
    clip = (continuous if method.startswith("Continuous") else tiny)[1]
    plain, _ = draw(method)
    for text in (" ", "apple"):
        drawn, _ = draw(method, negative=clip.encode_from_tokens_scheduled(text))
        assert torch.equal(drawn["samples"], plain["samples"]) == (text == " ")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"cfg": 0.5}, "cfg.* 0.5.*-1 .auto.*at least 1 .no guidance"),
        ({"top_k": 65}, "top_k.*65.*64"),
        ({"top_p": 0.0}, "top_p.* 0"),
        ({"temperature": -0.5}, "temperature.* -0.5.*-1 .auto.*at least 0"),
        ({"window": 17}, "window.*17.*2 to 16"),
        ({"front_drafts": 2}, "front_drafts is 2.*removed.*Recreate"),
        ({"settling": 0.1, "refinement": "redraw (SJD, exact)"}, "settle.* 0.1.*settling.*coupled"),
        ({"refinement": "magic"}, "refinement.*'magic'"),
        ({"initialisation": "magic"}, "initialisation.*'magic'"),
        ({"latent_image": {"samples": torch.zeros(1, 4, 8, 8)}}, "8 x 8 tokens.*32 x 32 pixels"),
        ({"positive": [[torch.zeros(1, 77, 768), {"pooled_output": None}]]}, "CLIP"),
    ],
)
def test_illegal_inputs_are_named(sample, inputs, message):
    with pytest.raises(ValueError, match=message):
        sample("SJD", **inputs)


def test_a_model_without_a_decoder_generates_ids_that_any_decoder_reads(load, sample, tiny):
    loaded, clip, _ = load("classes.safetensors")
    latent, _ = sample("SJD", model=loaded, positive=clip.encode_from_tokens_scheduled("1"))
    assert latent["samples"].shape == (1, 1, 4, 4)
    assert torch.equal(latent["samples"][:, 0].long(), latent["ar_tokens"])
    decoder = tiny[0].decoder.decoder
    assert torch.equal(tiny[2].decode(latent["samples"]), decoder.decode(decoder.dequantize(latent["ar_tokens"])))


@EACH_KIND
def test_progress_counts_tokens_once_per_pass(method, sample, progress, hurried):
    _, trace = sample(method)
    values = [value for value, _, _ in progress]
    assert len(values) == trace.totals["target_passes"]
    assert values == sorted(values) and values[-1] == 16
    assert {total for _, total, _ in progress} == {16}
