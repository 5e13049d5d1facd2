"""The KL autoencoder: published names, sizes from shapes, latents and pixels, and the bundled file."""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import kl_vae
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.models.kl_vae import KLConfig, KLModel
from comfyui_specar.tools.training.contact_sheet import border_colour
from safetensors.torch import save_file

TINY = KLConfig(channels=4, ch_mult=(1, 2), base_channels=32, num_res_blocks=1)


def tiny(config: KLConfig = TINY) -> KLModel:
    torch.manual_seed(0)
    return KLModel(config).eval()


@pytest.mark.parametrize(
    "config", [KLConfig(), TINY, KLConfig(8, (1, 1, 2), 64, 2, False, True), KLConfig(16, (1, 1, 2, 4, 4), 32, 1)]
)
def test_sizes_are_read_from_names_and_shapes(config):
    with torch.device("meta"):
        assert kl_vae.config_of(KLModel(config).state_dict()) == config


def test_moments_and_pixels_have_their_shapes():
    model = tiny()
    mean, log_variance = model.encode_moments(torch.rand(2, 3, 8, 12) * 2 - 1)
    assert mean.shape == log_variance.shape == (2, 4, 4, 6)
    assert model.decode(mean).shape == (2, 3, 8, 12)
    with pytest.raises(ValueError, match="12 x 7 pixels.*multiples of 2"):
        model.encode_moments(torch.zeros(1, 3, 7, 12))


def test_log_variance_is_clamped():
    model = tiny()
    torch.nn.init.constant_(model.quant_conv.bias, 50.0)
    assert model.encode_moments(torch.zeros(1, 3, 4, 4))[1].unique().tolist() == [20.0]


def test_files_load_with_the_conventions_of_the_pack(tmp_path):
    model = tiny()
    weights = model.state_dict()
    torch.save({"model": weights | {"loss.logvar": torch.zeros(())}}, tmp_path / "kl16.ckpt")
    decoder = api.load_image_decoder(tmp_path / "kl16.ckpt")
    assert (decoder.factor, decoder.channels, decoder.name, decoder.margin) == (2, 4, "kl16.ckpt", 0)
    pixels = torch.rand(1, 8, 8, 3)
    latent = decoder.encode_latent(pixels)
    with torch.inference_mode():
        planes = pixels.permute(0, 3, 1, 2) * 2 - 1
        assert torch.allclose(latent, model.encode_moments(planes)[0], atol=1e-6)
        expected = (model.decode(latent) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert torch.allclose(decoder.decode(latent), expected, atol=1e-6)
    save_file({n: t for n, t in weights.items() if not n.startswith("encoder")}, str(tmp_path / "half.safetensors"))
    with pytest.raises(CheckpointError, match="half.safetensors.*incomplete.*encoder and decoder"):
        api.load_image_decoder(tmp_path / "half.safetensors")


def test_the_bundled_file_brings_images_back():
    """A disc on a plain background, which the file was not trained on: much better than tokens of one colour each."""
    decoder, side = api.load_image_decoder(api.bundled("continuous")), 8
    axis = torch.linspace(-1, 1, side * decoder.factor)
    disc = (axis.square()[:, None] + axis.square() < 0.4).float()[..., None]
    pixels = disc * torch.tensor([0.9, 0.15, 0.15]) + (1 - disc) * torch.tensor([52.0, 112.0, 216.0]) / 255
    back = decoder.decode(decoder.encode_latent(pixels[None]))
    assert back.shape == (1, *pixels.shape)
    tokens = pixels.unflatten(1, (side, -1)).unflatten(0, (side, -1))
    flat = tokens.mean((1, 3), keepdim=True).expand_as(tokens).reshape(pixels.shape)
    assert (back - pixels).square().mean() < (flat - pixels).square().mean() / 4
    assert border_colour(back[0]) == "blue"
