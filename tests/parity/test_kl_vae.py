"""Our KL autoencoder against the official code of MAR, on the same random weights, in fp32.

kl_vae.json holds what https://github.com/LTH14/mar gave at commit fe470ac on a CPU (torch 2.13): AutoencoderKL with
embed_dim=4 and Encoder and Decoder(ch=32, ch_mult=(1, 1, 2), resolution=64, z_channels=4), filled with the values that
``fill`` in tests/support/tiny.py derives from the names of the parameters. Attention at the deepest level is in the
encoder, as in KL-16; under *_decoder_attention in the decoder instead.
  mean, log_variance   encode of two images of 24 x 16 pixels
  decode               decode of two latents of 3 x 2
  released             tensors, numbers, and a SHA-256 of all names and shapes of AutoencoderKL(16, (1, 1, 2, 2, 4))
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.decoders import kl_vae
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel

from ..support.closeness import assert_as_exact
from ..support.tiny import fill

OFFICIAL = json.loads((Path(__file__).parent / "kl_vae.json").read_text(encoding="utf-8"))
TINY = {"channels": 4, "ch_mult": (1, 1, 2), "base_channels": 32, "num_res_blocks": 2}


@pytest.fixture(scope="module", params=["", "_decoder_attention"], ids=["released", "decoder attention"])
def variant(request):
    config = KLConfig(**TINY, encoder_attention=not request.param, decoder_attention=bool(request.param))
    with torch.device("meta"):
        model = KLModel(config)
    weights = {name: fill(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    assert kl_vae.recognise(weights) and kl_vae.config_of(weights) == config
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False), request.param


def close(compute, *names):
    assert_as_exact(compute, [torch.tensor(OFFICIAL[name]) for name in names])


def test_moments(variant):
    model, name = variant
    image = fill("picture embedding", (2, 3, 24, 16)) / 2
    close(lambda: model.encode_moments(image), f"mean{name}", f"log_variance{name}")


def test_decoded_pixels(variant):
    model, name = variant
    latent = fill("latent embedding", (2, 4, 3, 2))
    close(lambda: model.decode(latent), f"decode{name}")
