"""KL autoencoders in the naming of latent diffusion (KL-16 of MAR, xAR and Harmon, and the pack's own)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ...models.image_decoder import LatentDecoder, encoder_sizes
from ...models.networks.kl_vae import KLConfig, KLModel
from ..declarations import DecoderKind, ReleasedDecoder
from ..files.checkpoint import Checkpoint
from ..files.errors import incomplete_without


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the autoencoder alone: Harmon's files contain one under ``vae.``; training leaves ``loss.*``."""
    if "vae.quant_conv.weight" in tensors:
        return {n.removeprefix("vae."): tensor for n, tensor in tensors.items() if n.startswith("vae.")}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("loss.")}


def recognise(tensors: Collection[str]) -> bool:
    """Whether this is, or contains, a KL autoencoder in the naming of latent diffusion."""
    root = "vae." if "vae.quant_conv.weight" in tensors else ""
    return f"{root}decoder.mid.block_1.norm1.weight" in tensors and f"{root}quantize.embedding.weight" not in tensors


def config_of(tensors: dict[str, Tensor]) -> KLConfig:
    """Sizes of an autoencoder from its tensor names and shapes."""
    base, multiples, blocks = encoder_sizes(tensors, "down", "block")
    deepest = len(multiples) - 1
    return KLConfig(
        channels=tensors["post_quant_conv.weight"].shape[0],
        ch_mult=multiples,
        base_channels=base,
        num_res_blocks=blocks,
        encoder_attention=f"encoder.down.{deepest}.attn.0.q.weight" in tensors,
        decoder_attention=f"decoder.up.{deepest}.attn.0.q.weight" in tensors,
    )


def load(checkpoint: Checkpoint, dtype: torch.dtype, operations=nn) -> LatentDecoder:
    """Build the autoencoder on the CPU.

    Raises CheckpointError for missing, unknown, misshapen or non-finite tensors.
    """
    tensors = own_names(checkpoint.tensors)
    with incomplete_without("encoder and decoder", checkpoint.path):
        config = config_of(tensors)
    with torch.device("meta"):
        module = KLModel(config, operations)
    return LatentDecoder.load(module, config.factor, config.channels, tensors, checkpoint, dtype)


KIND = DecoderKind(recognise, load)
KL16 = ReleasedDecoder(("kl16",), "kl16.ckpt (repository wusize/harmon)")
