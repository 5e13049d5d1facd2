"""GLM-Image's decoder: batches, memory, what it reads of a prompt, and what is refused. Its pixels: tests/parity."""

import pytest
import torch
from comfyui_specar.model_loaders.families import glm_image_diffusion as glm_image
from comfyui_specar.model_loaders.families.glm_image_diffusion import glyph_ids, quotations
from safetensors.torch import load_file, save_file

from ..support import tiny_glm_image as tiny
from ..support.bad_files import refused
from ..support.closeness import fp64
from ..support.tiny_folder import edited


def load(folder):
    return glm_image.load(folder, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_decoder(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def decoder(folder):
    return load(folder)


@pytest.fixture(scope="module")
def sources(folder):
    """Of 2 x 1 and of 1 x 3 tokens."""
    encoder, seeded = glm_image.load_latent_encoder(folder), torch.Generator().manual_seed(1)
    codes = torch.tensor([[3], [1]]), torch.tensor([[4, 1, 5]])
    images = (torch.rand(1, *(32 * side for side in each.shape), 3, generator=seeded) for each in codes)
    return [
        glm_image.SourceImage(encoder.encode_latent(image), each) for image, each in zip(images, codes, strict=True)
    ]


@fp64()
def test_an_image_does_not_depend_on_its_batch(decoder):
    tokens = torch.arange(12).view(2, 2, 3)
    both, second = (tiny.pixels_of(decoder, of, "a sign", seed, steps=2) for of, seed in ((tokens, 3), (tokens[1:], 4)))
    torch.testing.assert_close(second, both[1:], rtol=0, atol=1e-9)


def latents(decoder, tokens, sources, seed=3, cfg=1.5):
    return decoder.latents(tokens, *decoder.read("a sign"), seed, 2, cfg, "cpu", sources=sources)


@fp64()
def test_a_batch_shares_its_source_images(decoder, sources):
    tokens = torch.arange(12).view(2, 2, 3)
    both, second = latents(decoder, tokens, sources), latents(decoder, tokens[1:], sources, seed=4)
    torch.testing.assert_close(second, both[1:], rtol=0, atol=1e-9)
    assert not torch.allclose(latents(decoder, tokens, sources[:1]), both, atol=1e-3)
    swapped = latents(decoder, tokens, sources[::-1])  # sources do not see each other
    torch.testing.assert_close(swapped, both, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_source_images(folder, sources, dtype):
    """Their keys and values, and a layer's once more beside those of the image."""
    dit = glm_image.load(folder, dtype).dit
    kept = [dit.read(source.latent.to(dtype), source.tokens[None]) for source in sources]
    held = sum(part.nbytes for source in kept for layer in source for part in layer)
    assert {part.dtype for source in kept for layer in source for part in layer} == {dtype}
    lengths = [4 * source.tokens.numel() for source in sources]
    assert dit.activation_bytes(20, lengths) - dit.activation_bytes(20) == held * 3 // 2  # of two layers
    assert dit.activation_bytes(1, [100]) > dit.activation_bytes(100)  # a source larger than the image


def test_half_precision_weights(tmp_path, decoder):
    """The transformer and the reader are in bf16, the VAE stays in fp32."""
    half = glm_image.load(tiny.write_decoder(tmp_path), torch.bfloat16)
    assert half.vae.dtype == torch.float32 and half.dit.proj_out.weight.dtype == torch.bfloat16
    tokens = torch.arange(6).view(1, 2, 3)
    found, wanted = (tiny.pixels_of(each, tokens, '"a"', steps=2) for each in (half, decoder))
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert (found - wanted).square().mean() < wanted.var() / 4  # the same image


def test_what_is_quoted():
    assert quotations("no words") == [""] == quotations("")
    assert quotations("\"two\" 'one' \u201cthree\u201d \u300cfour\u300d") == ["one", "three", "two", "four"]
    assert glyph_ids("no words") == [[1]]
    assert glyph_ids('"ab"') == [[100, 101, 1]]
    assert glyph_ids('"a" "b"') == [[0, 100, 1], [0, 101, 1]]
    assert [len(ids) for ids in glyph_ids(f'"{"a" * 5000}"')] == [2048]


@pytest.mark.parametrize(
    ("part", "settings", "words"),
    [
        ("transformer", {"num_attention_heads": 3}, ("num_attention_heads 3", "32")),
        ("transformer", {"num_attention_heads": "two"}, ("num_attention_heads", "two")),
        ("vae", {"latents_mean": None}, ("latents_mean", "config.json")),
        ("vae", {"latents_std": [1.0, 1.0]}, ("latents_std", "4 channels")),
        ("vae", {"latents_std": [1.0, 1.0, 1.0, 0.0]}, ("latents_std", "4 channels")),
        ("vae", {"latents_std": "x"}, ("config.json",)),
    ],
)
def test_settings_that_cannot_be(tmp_path, part, settings, words):
    refused(edited(tiny.write_decoder(tmp_path), f"{part}/config.json", **settings), *words, loader=load)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_missing_folders(tmp_path, part):
    folder = tiny.write_decoder(tmp_path)
    next((folder / part).glob("*.safetensors")).unlink()
    refused(folder, part, "zai-org/GLM-Image", loader=load)


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("transformer", "transformer_blocks.1.norm1.linear.weight", ("transformer_blocks.1.norm1.linear.weight",)),
        ("transformer", "image_projector.proj.weight", ("image_projector.proj.weight", "incomplete")),
        ("vae", "decoder.mid_block.resnets.1.conv2.bias", ("mid.block_2.conv2.bias",)),
        ("vae", "decoder.conv_in.weight", ("conv_in.weight", "incomplete")),
        ("text_encoder", "shared.weight", ("shared.weight", "GLM-Image")),
    ],
)
def test_missing_and_broken_tensors(tmp_path, part, name, words):
    folder = tiny.write_decoder(tmp_path)
    file = next((folder / part).glob("*.safetensors"))
    weights = load_file(file)
    broken = weights[name].clone()
    broken.flatten()[0] = float("nan")
    save_file(weights | {name: broken}, file)
    refused(folder, "NaN or infinite", loader=load)
    save_file({key: tensor for key, tensor in weights.items() if key != name}, file)
    refused(folder, *words, loader=load)


def test_a_vae_without_encoder_makes_images_but_reads_none(tmp_path, decoder):
    folder = tiny.write_decoder(tmp_path)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if name.startswith("decoder.")}, file)
    tokens = torch.arange(6).view(1, 2, 3)
    images = (tiny.pixels_of(each, tokens, "a sign", steps=1) for each in (load(folder), decoder))
    assert torch.equal(*images)
    refused(folder, "VAE without encoder", "source images", "zai-org/GLM-Image", loader=glm_image.load_latent_encoder)
    save_file({name: tensor for name, tensor in weights.items() if name != "encoder.conv_out.bias"}, file)
    refused(folder, "encoder.conv_out.bias", "incomplete", loader=glm_image.load_latent_encoder)
    save_file(weights | {"encoder.mid_block.attentions.0.to_q.bias": torch.zeros(64)}, file)
    refused(folder, "attentions.0.to_q.bias", loader=glm_image.load_latent_encoder)


def test_parts_of_different_models(tmp_path):
    folder = tiny.write_decoder(tmp_path)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_in.weight"] = weights["decoder.conv_in.weight"][:, :3].contiguous()
    save_file(weights, file)
    edited(folder, "vae/config.json", latents_mean=[0.0] * 3, latents_std=[1.0] * 3)
    refused(folder, "3 channels", "4", loader=load)
    other = tiny.write_decoder(tmp_path / "other")
    weights = tiny.decoder_weights()["text_encoder"]
    narrow = {"shared.weight": weights["shared.weight"][:, :16].contiguous()}
    save_file(weights | narrow, other / "text_encoder" / "model.safetensors")
    refused(other, "16 features", "24", "GLM-Image's text_encoder", loader=load)
