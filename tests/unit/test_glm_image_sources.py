"""GLM-Image's source images: their sizes, files without what reads them, and layouts without a preview."""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_encoder
from comfyui_specar.model_loaders.families.glm_image_sources import _NAMES, Scaling, config_of
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from comfyui_specar.model_loaders.files.names import rename
from comfyui_specar.models.networks.glm_image_vision import SourceEncoder, VisionConfig
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file, save_file

from ..support import tiny_glm_image as tiny
from ..support import tiny_simplear
from ..support.bad_files import refused
from ..support.tiny_folder import edited

IMAGES = [torch.arange(12).view(3, 4), torch.arange(8).view(2, 4) + 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return api.load_model(tiny.write(tmp_path_factory.mktemp("release")))


# Sizes


def test_an_image_is_scaled_to_whole_tokens():
    scaling = Scaling()
    assert scaling.grid(1024, 768, 32) == (32, 24) and scaling.grid(1030, 700, 32) == (32, 22)
    assert scaling.grid(100, 50, 32) == (32, 16) and scaling.grid(4096, 8192, 32) == (32, 64)
    image = torch.rand(520, 517, 3)
    assert scaling.scale(image, 32).shape == (512, 512, 3) and scaling.scale_to_encode(image, 32).shape == (256, 256, 3)


def test_an_image_of_whole_tokens_reaches_the_decoder_as_it_is():
    image = (torch.rand(544, 512, 3) * 255).round() / 255
    assert torch.equal(Scaling().scale(image, 32), image)


@pytest.mark.parametrize(("height", "width"), [(15, 40), (100, 401), (4, 4)])
def test_shapes_that_are_not_read(height, width):
    with pytest.raises(ValueError, match=f"{width} x {height} pixels.*16 pixels a side and up to 4:1. Crop"):
        Scaling().grid(height, width, 32)


def test_settings_of_the_release_and_of_its_files(tmp_path):
    folder = tiny.write(tmp_path)
    file = folder.parent / "processor/preprocessor_config.json"

    def grid(**settings):
        file.write_text(json.dumps(settings), encoding="utf-8")
        return api.load_model(folder).image_prompts.scaled(torch.rand(40, 40, 3), 32).shape[:2]

    assert grid() == (512, 512)
    assert grid(min_pixels=64**2, max_pixels=96**2) == (64, 64)
    assert grid(size={"shortest_edge": 96**2, "longest_edge": 96**2}) == (96, 96)
    file.unlink()
    assert api.load_model(folder).image_prompts.scaled(torch.rand(40, 40, 3), 32).shape[:2] == (512, 512)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": "many"},
        {"max_pixels": 10**12},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.5, 0.5, -0.1]},
        {"image_std": [0.5, 0.5, float("nan")]},
        {"size": 3},
    ],
)
def test_settings_that_cannot_be(tmp_path, settings):
    folder = tiny.write(tmp_path)
    edited(folder.parent / "processor", "preprocessor_config.json", **{"min_pixels": None} | settings)
    refused(folder, "preprocessor_config.json", "not as released")


# Files


def test_files_without_the_encoder_say_so(tmp_path, model):
    folder = tiny.write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    for part in ("model.visual.", "model.vqmodel."):
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith(part)}
        save_file(kept, folder / "model.safetensors")
        assert api.sample(api.load_model(folder), model.encode_prompt("a")).tokens.shape == (1, 4, 4)
        refused(folder, "without its vision encoder", "zai-org/GLM-Image", loader=lambda f: load_encoder(f, model))


def test_other_models_have_no_encoder_of_their_own(tmp_path):
    path = tiny_simplear.TINY["simplear"].write(tmp_path)
    refused(path, "simplear", "image decoder", loader=lambda f: load_encoder(f, api.load_model(f)))


def test_damaged_encoders(tmp_path, model):
    folder = tiny.write(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def refuse(*words, **tensors):
        changed = {name: tensor for name, tensor in (weights | tensors).items() if tensor is not None}
        save_file(changed, folder / "model.safetensors")
        refused(folder, *words, loader=lambda f: load_encoder(f, model))

    root = "model.visual"
    refuse("q_norm", **{f"{root}.blocks.0.attn.q_norm.weight": torch.ones(2)})
    refuse("blocks.1.mlp.fc1.bias", **{f"{root}.blocks.1.mlp.fc1.bias": None})
    refuse("NaN", **{f"{root}.blocks.1.norm1.weight": torch.full((32,), torch.nan)})
    refuse("15 positions", **{f"{root}.embeddings.position_embedding.weight": torch.zeros(15, 32)})
    refuse("8 pixels", "32", **{f"{root}.patch_embed.proj.weight": torch.zeros(32, 3, 8, 8)})
    for heads in (5, 0, "16"):
        edited(folder, vision_config=tiny.config()["vision_config"] | {"num_heads": heads})
        refuse(f"{heads} heads")


def test_sizes_of_the_release():
    """Names and shapes are transformers' own."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    with torch.device("meta"):
        whole = transformers.GlmImageModel(transformers.GlmImageConfig(text_config={"num_hidden_layers": 1}))
        ours = SourceEncoder(VisionConfig(), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).state_dict()
    named = {f"model.{name}": tensor for name, tensor in whole.state_dict().items()}
    found = rename({n: t for n, t in named.items() if n.startswith(tuple(_NAMES))}, _NAMES)
    settings = {"vision_config": whole.config.vision_config.to_dict()}
    assert config_of(Checkpoint(found, settings, Path("model.safetensors")), found) == VisionConfig()
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in ours.items()}


# Prompts


def test_an_image_prompt_has_no_preview(model):
    prompt = model.encode_prompt("a red cup", IMAGES)
    ids = prompt[0][0].flatten().int().tolist()
    assert ids[:14] == [tiny.BEGIN, *range(12), tiny.END] and ids[14:24] == [tiny.BEGIN, *range(20, 28), tiny.END]
    assert ids[-1] == tiny.BEGIN and ids.count(tiny.vocabulary()["<sop>"]) == 1
    out = api.sample(model, prompt, SJD(window=5), seed=2)
    assert out.trace.lead == 0 and out.trace.positions["source"].shape == (1, 16)
    again = api.sample(model, prompt, SJD(window=5), seed=2, layout=model.layout(images=IMAGES))
    assert torch.equal(out.tokens, again.tokens)
    with pytest.raises(ValueError, match=r"4 tokens of a preview.*model\.layout\(rows, cols, images\)"):
        api.sample(model, prompt, layout=model.layout())


def test_parts_of_an_image_are_kept(model):
    prompt = model.encode_prompt("a red cup", IMAGES[:1])
    tokens, kept = torch.full((1, 4, 4), 9), torch.zeros(1, 4, 4, dtype=torch.bool)
    kept[0, 1:3] = True
    found = api.sample(model, prompt, tokens=tokens, kept=kept).tokens
    assert (found[kept] == 9).all() and not (found == 9).all()


@torch.inference_mode()
def test_captured_steps_of_prompts_with_other_images(model, request):
    """Two runs of as many tokens whose positions differ share what was captured, not positions."""
    prompts = [model.encode_prompt("a red cup", each) for each in (IMAGES[:1], [IMAGES[0].T.contiguous()], IMAGES)]
    prompts.append(model.encode_prompt("a red cup"))

    def images():
        return [api.sample(model, prompt, NextToken(), seed=3).tokens for prompt in prompts * 2]

    plain = images()
    request.getfixturevalue("on_tape")
    assert all(map(torch.equal, images(), plain))
    model.sessions.clear()
    assert len({str(tokens) for tokens in plain}) == len(prompts)
