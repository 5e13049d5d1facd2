"""AR Image Prompt: what it hands to samplers, and what it refuses, in words."""

import pytest
import torch
from comfyui_specar.model_loaders.families import IMAGE_READERS
from comfyui_specar.model_loaders.pictures import resized

import nodes as core

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
        pixels = resized(picture[0], *(4 * side for side in grid.shape))
        assert torch.equal(emu35[0].decoder.decoder.encode(pixels[None])[0], grid)
    assert latent["samples"].shape == (1, 16, 4, 4) and not latent["samples"].any()
    assert negative[0][1]["ar"]["text"] == ""
    assert len(ask(image3=pictures[1])[0][0][1]["ar"]["images"]) == 2, "one of the others"
    with_text = ask(negative_text="blur")[1]
    assert with_text[0][1]["ar"]["text"] == "blur" and len(with_text[0][1]["ar"]["images"]) == 1


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


def test_find_fastest_measures_it(ask, nodes, run, emu35):
    positive, _negative, latent = ask()
    node = nodes["SpecARFindFastest"]
    inputs = {"model": emu35[0], "positive": positive, "latent_image": latent}
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
