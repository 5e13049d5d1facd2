"""AR Image Prompt: what it hands to samplers, and what it refuses, in words."""

import gc
import weakref
from pathlib import Path

import comfy.model_management as mm
import folder_paths
import pytest
import torch
from comfyui_specar.model_loaders.detect import load_encoder, load_model
from comfyui_specar.model_loaders.families import IMAGE_READERS
from comfyui_specar.models.pictures import resize
from comfyui_specar.nodes.comfy_runtime.models import _parts
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from safetensors.torch import load_file, save_file

import nodes as core

from ..support import tiny_glm_image
from ..support.lora import write_lora
from ..support.simulated_gpu import GPU, load_half
from .conftest import defaults

TEXT = "make it red"


@pytest.fixture(scope="module")
def pictures():
    generator = torch.Generator().manual_seed(5)
    return [torch.rand((1, *size), generator=generator) for size in ((30, 31, 3), (24, 40, 4), (16, 16, 3))]


@pytest.fixture
def ask(nodes, run, emu35, pictures):
    """ask(**inputs) -> (positive, negative, latent)."""

    def ask(**inputs):
        node = nodes["SpecARImagePrompt"]
        common = {"model": emu35[0], "vae": emu35[2], "image1": pictures[0], "text": TEXT}
        return run(node, **defaults(node) | common | inputs).result

    return ask


def test_images_are_read_in_their_order_and_proportions(ask, emu35, pictures):
    positive, negative, latent = ask(image2=pictures[1], image3=pictures[2])
    found = positive[0][1]["ar"]["images"]
    assert [tuple(grid.shape) for grid in found] == [(4, 4), (3, 5), (4, 4)]
    for grid, picture in zip(found, pictures, strict=True):
        pixels = resize(picture[0], *(4 * side for side in grid.shape))
        assert torch.equal(emu35[0].decoder.decoder.encode(pixels[None])[0], grid)
    assert latent["samples"].shape == (1, 16, 4, 4) and not latent["samples"].any()
    assert negative[0][1]["ar"]["text"] == ""
    assert len(ask(image3=pictures[1])[0][0][1]["ar"]["images"]) == 2, "one of the others"
    with_text = ask(negative_text="blur")[1]
    assert with_text[0][1]["ar"]["text"] == "blur" and len(with_text[0][1]["ar"]["images"]) == 1


def test_what_is_no_word_of_either_text_is_said(ask, page):
    server = page()
    ask(text="a (red:1.2) cup", negative_text="<|image start|>")
    [notices] = [data["notices"] for event, data, _ in server.events if event == "specar.notices"]
    assert "(red:1.2)" in notices[0] and "<|image start|>" in notices[1]


@pytest.mark.parametrize("sampler", ["SpecARSampler", "SpecARNextTokenSampler", "SpecARSJDSampler"])
def test_samplers_run_on_it(ask, nodes, run, emu35, pictures, sampler):
    def sample(positive, negative, latent, **inputs):
        (latent,) = core.RepeatLatentBatch().repeat(latent, 2)
        common = {"model": emu35[0], "positive": positive, "negative": negative, "latent_image": latent, "seed": 3}
        node = nodes[sampler]
        return run(node, **defaults(node) | common | {"cfg": 3.0, "top_k": 8} | inputs).result[0]["ar_tokens"]

    one, two = ask(), ask(image1=pictures[1], negative_text="blur")
    drawn = sample(*one)
    assert drawn.shape == (2, 4, 4) and not torch.equal(drawn, sample(*two[:2], one[2]))
    text = core.CLIPTextEncode().encode(emu35[1], TEXT)[0]
    assert not torch.equal(drawn, sample(text, one[1], one[2]))
    assert torch.equal(drawn, sample(one[0], None, one[2])), "no negative: that with the images"


@pytest.mark.parametrize("sampler", ["SpecARSampler", "SpecARNextTokenSampler", "SpecARSJDSampler"])
def test_auto_is_the_authors_choice_for_images(ask, nodes, run, emu35, sampler):
    positive, _negative, latent = ask()
    for prompt, cfg in ((positive, 3), (core.CLIPTextEncode().encode(emu35[1], TEXT)[0], 5)):
        common = {"model": emu35[0], "positive": prompt, "latent_image": latent}
        assert run(nodes[sampler], **defaults(nodes[sampler]) | common).result[1].settings["cfg"] == cfg


def test_find_fastest_measures_it(ask, nodes, run, emu35):
    positive, _negative, latent = ask()
    node = nodes["SpecARFindFastest"]
    inputs = {"model": emu35[0], "positive": positive, "latent_image": latent, "seconds": 5}
    method, *_ = run(node, **defaults(node) | inputs).result
    assert method is not None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"text": "  "}, "text is empty"),
        ({"image1": torch.rand(2, 16, 16, 3)}, "image1 holds 2 images.*one"),
        ({"image2": torch.rand(1, 10, 50, 3)}, "image2.*50 x 10 pixels.*4:1"),
        ({"image1": torch.rand(1, 16, 16, 1)}, "image1 is a tensor.*IMAGE"),
    ],
)
def test_what_it_refuses(ask, inputs, words):
    with pytest.raises(ValueError, match=words):
        ask(**inputs)


def test_other_models_and_decoders(ask, tiny, continuous, monkeypatch, emu35):
    for loaded in (tiny, continuous):
        with pytest.raises(ValueError, match=f"cannot read images.*{IMAGE_READERS[0]}"):
            ask(model=loaded[0])
        with pytest.raises(ValueError, match="do not belong together.*VAE of Load AR Checkpoint"):
            ask(vae=loaded[2])

    class Other:
        encode = decode = None

    with pytest.raises(ValueError, match="vae is of type Other.*Load AR Checkpoint"):
        ask(vae=Other())


def test_short_of_memory_images_are_encoded_in_tiles(ask, emu35, monkeypatch):
    monkeypatch.setattr(emu35[2], "_in_batches", lambda *_inputs: None)
    [[_features, extra]] = ask()[0]
    assert extra["ar"]["images"][0].shape == (4, 4)


# GLM-Image, whose encoder is in its own files


@pytest.fixture
def ask_glm(ask, glm_image):
    """ask_glm(**inputs) -> (positive, negative, latent) of GLM-Image, with images that become 3 and 2 x 3 tokens."""
    images = [torch.rand((1, *size), generator=torch.Generator().manual_seed(7)) for size in ((90, 99, 3), (64, 90, 3))]

    def ask_glm(**inputs):
        return ask(**{"model": glm_image[0], "vae": glm_image[2], "image1": images[0], "image2": images[1]} | inputs)

    return ask_glm


def test_sources_are_what_the_decoder_reads(ask_glm, glm_image):
    positive, negative, latent = ask_glm()
    own = positive[0][1]["ar"]
    assert [tuple(source["tokens"].shape) for source in own["sources"]] == [(3, 3), (2, 3)]
    for source, tokens in zip(own["sources"], own["images"], strict=True):
        rows, cols = tokens.shape
        assert source["image"].shape == (32 * rows, 32 * cols, 3) and source["image"].dtype == torch.float32
        assert torch.equal(source["tokens"], tokens) and tokens.dtype == torch.int64
        assert 0 <= source["image"].min() < source["image"].max() <= 1
        assert {source["image"].device, tokens.device} == {torch.device("cpu")}
    assert latent["samples"].shape == (1, 1, 4, 4), "the only size of the tiny model"
    assert "sources" not in negative[0][1]["ar"] and "images" not in negative[0][1]["ar"]


@pytest.mark.parametrize("sampler", ["SpecARSampler", "SpecARNextTokenSampler", "SpecARSJDSampler"])
def test_samplers_run_on_sources(ask_glm, nodes, run, glm_image, sampler):
    def sample(positive, negative, latent):
        node = nodes[sampler]
        inputs = {"model": glm_image[0], "positive": positive, "negative": negative, "latent_image": latent, "seed": 3}
        return run(node, **defaults(node) | inputs).result[0]["ar_tokens"]

    both = ask_glm()
    drawn = sample(*both)
    assert drawn.shape == (1, 4, 4) and not torch.equal(drawn, sample(*ask_glm(image2=None)))
    text = core.CLIPTextEncode().encode(glm_image[1], TEXT)[0]
    assert not torch.equal(drawn, sample(text, None, both[2]))


def test_the_encoder_is_loaded_for_the_first_image(load, run, nodes, ask_glm, loads):
    """With memory for its activations; and its weights go with the model."""
    model = load("GLM-Image/vision_language_encoder")[0]
    assert model.model not in _parts
    ask_glm(model=model)
    held = _parts[model.model][load_encoder]
    asked = [options["memory_required"] for models, options in loads if models[0] is held.patcher]
    assert asked == [held.content.activation_bytes(9), held.content.activation_bytes(6)] and asked[1] > 0
    encoder = weakref.ref(held)
    del model, held
    loads.clear()
    mm.unload_all_models()
    mm.cleanup_models_gc()
    gc.collect()
    assert encoder() is None


def test_a_lora_changes_the_encoder_too(ask_glm, glm_image, nodes, run, models):
    name = "model.visual.blocks.0.mlp.fc1"
    [file] = [
        f for f in (models / "GLM-Image/vision_language_encoder").glob("*.safetensors") if has(f, f"{name}.weight")
    ]
    write_lora(models.parent / "loras/glasses", file, [name])
    model = run(nodes["SpecARLoadLora"], model=glm_image[0], lora_name="glasses", strength=30.0).result[0]
    before, after = (ask_glm(model=each)[0][0][1]["ar"]["images"][0] for each in (glm_image[0], model))
    assert not torch.equal(before, after)


def has(file, name):
    return name in load_file(file)


def test_what_it_refuses_of_sources(ask_glm, emu35, glm_image, load):
    with pytest.raises(ValueError, match="image2: The image is 50 x 10 pixels.*16 pixels a side and up to 4:1"):
        ask_glm(image2=torch.rand(1, 10, 50, 3))
    with pytest.raises(ValueError, match="vae is .*must be the VAE of Load AR Checkpoint"):
        ask_glm(vae=emu35[2])
    with pytest.raises(ValueError, match="vae is .*must be the VAE of Load AR Checkpoint"):
        ask_glm(model=emu35[0])
    folder = Path(folder_paths.get_folder_paths("ar_models")[0]) / "GLM-Image-text"
    model = tiny_glm_image.write(folder)
    weights = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.visual.")}
    save_file(kept, model / "model.safetensors")
    with pytest.raises(ValueError, match="without its vision encoder.*zai-org/GLM-Image"):
        ask_glm(model=load("GLM-Image-text/vision_language_encoder")[0])


def test_the_encoder_runs_when_half_of_it_stays_in_main_memory(tmp_path, request):
    folder = tiny_glm_image.write(tmp_path)
    module = load_encoder(folder, load_model(folder), operations=Operations)
    request.getfixturevalue("gpu")
    load_half(module)
    module.device = GPU
    assert module(torch.rand(48, 32, 3)).device == GPU
