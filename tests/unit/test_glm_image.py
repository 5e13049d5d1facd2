"""GLM-Image's autoregressive stage: its files, prompts and sizes, what is refused in words, and every method on a
sequence that begins with a preview."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.device.cpu import unpack
from comfyui_specar.model_loaders.detect import load_model, weight_file
from comfyui_specar.model_loaders.families import glm_image
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.model_loaders.files.errors import CheckpointError
from comfyui_specar.models.latents import quantize
from comfyui_specar.models.networks.quantised import quantise
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.trace_files import load_trace, save_trace
from safetensors.torch import load_file, save_file

from ..support import tiny_glm_image as tiny
from ..support.bad_files import refused
from ..support.tiny_folder import edited

LEAD, LENGTH = 4, 20  # a preview of 2 x 2 before an image of 4 x 4


def load(folder, grid=None, search=(), storage=None):
    checkpoint = replace(open_checkpoint(weight_file(folder)), storage=storage)
    return glm_image.load(checkpoint, torch.float32, grid, search)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("release"), shards=2)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def test_a_glm_that_reads_images_is_not_taken_for_it():
    tensors = tiny.weights(tiny.config())
    assert glm_image.recognise(tensors)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    assert not glm_image.recognise(tensors)


def test_other_parts_of_a_release_name_the_part_with_the_tokens(tmp_path):
    release = tiny.write_decoder(tiny.write(tmp_path / "GLM-Image").parent)
    with pytest.raises(CheckpointError, match="text_encoder does not generate.* its folder vision_language_encoder"):
        load_model(release / "text_encoder", torch.device("cpu"), torch.float32)


# Prompts


def test_guidance_is_refused(model):
    prompt = model.encode_prompt("a red cup")
    for negative in (None, model.encode_prompt("blue")):
        with pytest.raises(ValueError, match="cfg is 3.*guidance.*cfg to 1"):
            api.sample(model, prompt, negative=negative, cfg=3.0)
    with pytest.raises(ValueError, match="guidance.*cfg to 1"):
        model.prefix.unconditional(torch.zeros(1, 3, 1), model.grid)
    assert api.sample(model, prompt, negative=prompt).tokens.shape == (1, 4, 4)  # not read without guidance


# Sizes


def test_sizes(tmp_path):
    settings = tiny.config()
    del settings["specar"]["grid"]
    path = edited(tiny.write(tmp_path), specar=settings["specar"])
    model = load(path)
    assert model.grid == (32, 32) and len(model.grids) == len(set(model.grids))
    assert {(16, 16), (64, 64), (36, 24), (16, 64), (64, 16)} <= set(model.grids)
    assert load(path, (36, 24)).grid == (36, 24)
    for wrong in ((15, 32), (32, 65)):
        refused(path, f"{wrong[0]} x {wrong[1]} tokens", "nearest", loader=lambda f, wrong=wrong: load(f, wrong))
    with pytest.raises(ValueError, match="100 x 32 tokens|3200 x 1024 pixels"):
        model.layout(32, 100)


def test_a_sequence_that_begins_with_a_preview(model):
    layout = model.layout()
    numbers = torch.arange(LENGTH)[None]
    assert torch.equal(layout.to_grid(numbers), torch.arange(LEAD, LENGTH).view(1, 4, 4))
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[0, 1, 2] = True
    kept = layout.keeping(torch.full((1, 4, 4), 7), keep)
    assert kept.forced[0].nonzero().numel() == LENGTH and kept.forced[0].tolist().index(7) == LEAD + 6
    assert layout.spread(torch.ones(1, 4, 4), 0.5)[0].tolist() == [0.5] * LEAD + [1.0] * 16
    assert TokenLayout.with_row_ends(1, 2, [9], [8], lead=2).forced.tolist() == [[-1, -1, -1, -1, 9, 8]]


def test_the_trace_of_a_preview_is_kept(model, tmp_path):
    out = api.sample(model, model.encode_prompt("a red cup"), NextToken(), seed=1)
    assert out.trace.lead == LEAD and out.trace.positions["source"].shape == (1, LENGTH)
    assert out.trace.totals["target_passes"] == LENGTH and out.trace.grid("source").shape == (1, 4, 4)
    save_trace(out.trace, tmp_path / "run")
    found = load_trace(tmp_path / "run")
    assert found.lead == LEAD and torch.equal(found.grid("p"), out.trace.grid("p"))
    out.trace.lead = LEAD + 1  # more positions than were recorded
    save_trace(out.trace, tmp_path / "wrong")
    with pytest.raises(ValueError, match="wrong.safetensors is damaged"):
        load_trace(tmp_path / "wrong")


# Damage


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partial_rotary_factor": 1.0}, ("1.0", "[1, 1, 2]", "config.json")),
        ({"mrope_section": [1, 1, 1]}, ("[1, 1, 1]", "config.json")),
        ({"mrope_section": [2, 2]}, ("[2, 2]",)),
        ({"mrope_section": "xyz"}, ("xyz",)),
        ({"partial_rotary_factor": None}, ("None",)),
        ({"rope_type": "yarn"}, ("yarn", "not supported")),
    ],
)
def test_positions_of_another_kind(tmp_path, settings, words):
    text = tiny.config()["text_config"]
    text["rope_parameters"] |= settings
    refused(edited(tiny.write(tmp_path), text_config=text), *words, loader=load)


@pytest.mark.parametrize("begin", [41, "32", 0, True])
def test_a_head_that_does_not_fit_the_codes(tmp_path, begin):
    refused(edited(tiny.write(tmp_path), image_start_token_id=begin), "40", repr(begin), "config.json", loader=load)


@pytest.mark.parametrize("side", ["2", 0, 2.5, None])
def test_a_preview_that_cannot_be(tmp_path, side):
    folder = edited(tiny.write(tmp_path), specar={"grid": [4, 4], "preview_side": side})
    refused(folder, "preview_side", "1 to 64", loader=load, error=ValueError)


def test_rules_compare_codes_by_the_direction_of_their_vectors(tmp_path):
    """With latents that stay the ids."""
    path = tiny.write(tmp_path)
    weights = load_file(path / "model.safetensors")
    vectors = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    vectors[7] = 100 * vectors[3] + 0.01
    save_file(weights | {"model.vqmodel.quantize.embedding.weight": vectors}, path / "model.safetensors")
    model = load(path)
    assert model.neighbours(1)[3] == 7 and model.neighbours(1)[7] == 3
    tokens = torch.arange(16).view(1, 4, 4)
    assert model.latent_channels == 1 and torch.equal(quantize(model, model.dequantize(tokens)), tokens)
    save_file(weights | {"model.vqmodel.quantize.embedding.weight": vectors[:9].clone()}, path / "model.safetensors")
    refused(path, "codebook of 9 codes", "32", loader=load)
    weights.pop("model.vqmodel.quantize.embedding.weight")
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match="code vectors"):
        load(path).neighbours(1)


def test_storage_in_8_bits_permutes_scales_with_rows(folder, model):
    """Rows of queries and keys are rounded where they were, and moved with their scales."""
    narrow = load(folder, storage=torch.int8).backbone.layers[1].attention.wqkv
    unpack(model)
    weight, scale = quantise(model.backbone.layers[1].attention.wqkv.weight)
    assert torch.equal(narrow.weight, weight) and torch.equal(narrow.scale, scale)
