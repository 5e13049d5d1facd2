"""Encoders, decoders and readers of images: the order in which numbers lie in memory changes no result, and images of
one colour, whose group norms divide by next to nothing, are as exact as others."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_encoder, load_image_decoder, load_reader
from comfyui_specar.model_loaders.families import glm_image_diffusion as glm_image
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.models.image_decoder import ImageDecoder
from torch import Tensor

from ..support import tiny_glm_image, tiny_janus
from ..support.closeness import assert_as_exact, fp64
from ..support.tiny import fill
from ..support.tiny_decoders import WRITE

OTHERS = ("GLM-Image's VAE", "GLM-Image's source encoder", "Janus's tower")
COLOUR = torch.tensor([0.2, 0.5, 0.8])


@dataclass
class Subject:
    """Functions of images [B, H, W, 3] of ``height`` x ``width`` pixels, and of latents of so many channels."""

    height: int
    width: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor] | None = None
    channels: int = 0


def of_decoder(decoder, encode=None):
    def before_codes(pixels):
        return decoder.module.encode_latent(decoder.planes(pixels))

    encode = encode or (before_codes if isinstance(decoder, ImageDecoder) else decoder.encode_latent)
    return Subject(4 * decoder.factor, 6 * decoder.factor, encode, decoder.decode, decoder.channels)


def made(name, folder):
    if name == "GLM-Image's VAE":
        tiny_glm_image.write_decoder(folder)
        vae = glm_image.load(folder, torch.float32).vae
        return of_decoder(vae, glm_image.load_latent_encoder(folder).encode_latent)
    if name == "GLM-Image's source encoder":
        path = tiny_glm_image.write(folder)
        encoder = load_encoder(path, api.load_model(path))
        scaled = api.load_model(path).image_prompts.seen
        return Subject(64, 96, lambda images: torch.stack([encoder.features(scaled(image, 32)) for image in images]))
    if name == "Janus's tower":
        path = tiny_janus.write(folder)
        reader = load_reader(path, api.load_model(path))
        return Subject(40, 60, lambda images: reader.reading(torch.stack([reader.scale(x, 16) for x in images])))
    return of_decoder(load_image_decoder(WRITE[name][0](folder)))


@pytest.fixture(scope="module", params=[*WRITE, *OTHERS])
def subject(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("subject"))


def images(subject):
    noise = fill("images embedding", (2, subject.height, subject.width, 3)).sigmoid()
    colour = COLOUR.expand_as(noise).contiguous()
    return {"noise": noise, "one colour": colour, "nearly": colour + (noise - 0.5) / 255}


def views(whole):
    """Tensors [a, b, c, d] with the same numbers in other places."""
    yield whole.contiguous()
    for order in ((0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0), (0, 2, 1, 3)):
        back = [order.index(axis) for axis in range(4)]
        yield whole.permute(order).contiguous().permute(back)
    yield torch.cat((whole, whole[..., :1]), dim=-1)[..., :-1]  # images with a transparency
    yield torch.stack((whole, whole), dim=1)[:, 0]  # every second image of a batch
    yield whole.flip(1, 2).contiguous().flip(1, 2)


@torch.inference_mode()
def test_the_order_in_memory_changes_nothing(subject):
    for image in images(subject).values():
        first, *others = map(subject.encode, views(image))
        assert all(torch.equal(first, other) for other in others)
    plain = COLOUR.expand(1, subject.height, subject.width, 3)
    assert torch.equal(subject.encode(plain), subject.encode(plain.contiguous()))
    if subject.decode:
        for grid in ((4, 6), (1, 5), (5, 1), (1, 1)):
            latent = fill("latents embedding", (2, subject.channels, *grid))
            first, *others = map(subject.decode, views(latent))
            assert all(torch.equal(first, other) for other in others)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_in_half_precision_are_not_rounded_again(subject, dtype):
    image = images(subject)["noise"].to(dtype)
    assert torch.equal(subject.encode(image), subject.encode(image.float()))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["one colour", "nearly", "noise"])
def test_images_of_one_colour_are_as_exact_as_others(subject, kind):
    image = images(subject)[kind]
    with fp64():
        exact = subject.encode(image)
    assert_as_exact(lambda: subject.encode(image), exact)


@torch.inference_mode()
def test_weights_in_another_order(tmp_path):
    path = WRITE["KL"][0](tmp_path)
    tensors = {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for name, tensor in open_checkpoint(path).tensors.items()
    }
    torch.save(tensors, tmp_path / "kl.ckpt")
    plain, other = map(of_decoder, map(load_image_decoder, (path, tmp_path / "kl.ckpt")))
    image = images(plain)["one colour"]
    assert torch.equal(plain.encode(image), other.encode(image))
