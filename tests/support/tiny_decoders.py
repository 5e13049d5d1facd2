"""A tiny image decoder of every kind."""

from safetensors.torch import save_file

from . import tiny_chameleon, tiny_emu3, tiny_emu35, tiny_mar
from .tiny import vq_weights
from .tiny_simplear import write_cosmos


def saved(path, tensors, **metadata):
    save_file(tensors, str(path), **metadata)
    return path


WRITE = {  # (folder) -> the file; pixels of a token, channels of a latent
    "LlamaGen's VQGAN": (lambda folder: saved(folder / "vq.safetensors", vq_weights()), 2, 8),
    "Chameleon's VQGAN": (lambda folder: tiny_chameleon.write_vqgan(folder / "vqgan.safetensors"), 4, 6),
    "Emu3.5's IBQ": (lambda folder: tiny_emu35.write_decoder(folder) / "model.safetensors", 4, 16),
    "Emu3's MoVQ": (lambda folder: tiny_emu3.write_decoder(folder) / "model.safetensors", 2, 4),
    "MoVQGAN": (lambda folder: saved(folder / "movqgan_270M.safetensors", tiny_chameleon.movq_weights()), 2, 4),
    "Cosmos": (lambda folder: write_cosmos(folder, ("autoencoder",)) / "autoencoder.safetensors", 16, 3),
    "KL": (lambda folder: tiny_mar.write_kl_vae(folder) or folder / "kl16.safetensors", 2, 16),
}
