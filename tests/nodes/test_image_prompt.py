"""AR Image Prompt: what it hands to samplers, and what it refuses, in words."""

import gc
import weakref

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.model_loaders.detect import load_encoder, load_model
from comfyui_specar.model_loaders.families import IMAGE_PROMPT_MODELS
from comfyui_specar.models.pictures import resize
from comfyui_specar.nodes.comfy_runtime.models import _parts
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from safetensors.torch import load_file

import nodes as core

from ..support import tiny_glm_image
from ..support.comfy_quant import rewritten
from ..support.lora import write_lora
from ..support.simulated_gpu import GPU, load_half

TEXT = "make it red"
SAMPLERS = pytest.mark.parametrize("sampler", ["NextTokenSampler", "SJDSampler"])


@pytest.fixture(scope="module")
def pictures():
    generator = torch.Generator().manual_seed(5)
    return [torch.rand((1, *size), generator=generator) for size in ((30, 31, 3), (24, 40, 4), (16, 16, 3))]


@pytest.fixture
def ask(run_node, emu35, pictures):
    """ask(**inputs) -> (positive, negative, latent)."""
    common = {"model": emu35[0], "vae": emu35[2], "image1": pictures[0], "text": TEXT}
    return lambda **inputs: run_node("ImagePrompt", **common | inputs).result


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


@SAMPLERS
def test_samplers_run_on_it(ask, run_node, emu35, pictures, sampler):
    def sample(positive, negative, latent):
        (latent,) = core.RepeatLatentBatch().repeat(latent, 2)
        prompts = {"positive": positive, "negative": negative, "latent_image": latent}
        return run_node(sampler, model=emu35[0], **prompts, seed=3, cfg=3.0, top_k=8).result[0]["ar_tokens"]

    one, two = ask(), ask(image1=pictures[1], negative_text="blur")
    drawn = sample(*one)
    assert drawn.shape == (2, 4, 4) and not torch.equal(drawn, sample(*two[:2], one[2]))
    text = core.CLIPTextEncode().encode(emu35[1], TEXT)[0]
    assert not torch.equal(drawn, sample(text, one[1], one[2]))
    assert torch.equal(drawn, sample(one[0], None, one[2])), "no negative: that with the images"


@SAMPLERS
def test_auto_is_the_authors_choice_for_images(ask, run_node, emu35, sampler):
    positive, _negative, latent = ask()
    for prompt, cfg in ((positive, 3), (core.CLIPTextEncode().encode(emu35[1], TEXT)[0], 5)):
        _, trace = run_node(sampler, model=emu35[0], positive=prompt, latent_image=latent).result
        assert trace.settings["cfg"] == cfg


def test_find_fastest_measures_it(ask, run_node, emu35):
    positive, _negative, latent = ask()
    out = run_node("FindFastest", model=emu35[0], positive=positive, latent_image=latent, seconds=5)
    assert out.result[0] is not None


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


def test_other_models_and_decoders(ask, tiny, continuous):
    for loaded in (tiny, continuous):
        with pytest.raises(ValueError, match=f"cannot read images.*{IMAGE_PROMPT_MODELS[0]}"):
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


@SAMPLERS
def test_samplers_run_on_sources(ask_glm, run_node, glm_image, sampler):
    def sample(positive, negative, latent):
        prompts = {"positive": positive, "negative": negative, "latent_image": latent}
        return run_node(sampler, model=glm_image[0], **prompts, seed=3).result[0]["ar_tokens"]

    both = ask_glm()
    drawn = sample(*both)
    assert drawn.shape == (1, 4, 4) and not torch.equal(drawn, sample(*ask_glm(image2=None)))
    text = core.CLIPTextEncode().encode(glm_image[1], TEXT)[0]
    assert not torch.equal(drawn, sample(text, None, both[2]))


def test_the_encoder_is_loaded_for_the_first_image(load, ask_glm, loads):
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


def test_a_lora_changes_the_encoder_too(ask_glm, glm_image, run_node, models):
    name, files = "model.visual.blocks.0.mlp.fc1", (models / "GLM-Image/vision_language_encoder").glob("*.safetensors")
    [file] = [file for file in files if f"{name}.weight" in load_file(file)]
    write_lora(models.parent / "loras/glasses", file, [name])
    model = run_node("LoadLora", model=glm_image[0], lora_name="glasses", strength=30.0).result[0]
    before, after = (ask_glm(model=each)[0][0][1]["ar"]["images"][0] for each in (glm_image[0], model))
    assert not torch.equal(before, after)


def test_what_it_refuses_of_sources(ask_glm, emu35, models, load):
    with pytest.raises(ValueError, match="image2: The image is 50 x 10 pixels.*16 pixels a side and up to 4:1"):
        ask_glm(image2=torch.rand(1, 10, 50, 3))
    for other in ({"vae": emu35[2]}, {"model": emu35[0]}):
        with pytest.raises(ValueError, match="vae is .*must be the VAE of Load AR Checkpoint"):
            ask_glm(**other)
    rewritten(
        tiny_glm_image.write(models / "GLM-Image-text"),
        lambda tensors: ({name: tensors[name] for name in tensors if not name.startswith("model.visual.")}, {}),
    )
    with pytest.raises(ValueError, match="without its vision encoder.*zai-org/GLM-Image"):
        ask_glm(model=load("GLM-Image-text/vision_language_encoder")[0])


def test_the_encoder_runs_when_half_of_it_stays_in_main_memory(tmp_path, request):
    folder = tiny_glm_image.write(tmp_path)
    module = load_encoder(folder, load_model(folder), operations=Operations)
    request.getfixturevalue("gpu")
    load_half(module)
    module.device = GPU
    assert module(torch.rand(48, 32, 3)).device == GPU
