"""MoVQ image tokenizers (arXiv:2209.09002), built from transformers' class: Emu3's (arXiv:2409.18869) and MoVQGAN 270M,
which Lumina-mGPT 2.0 uses.

Emu3's was made for video: one latent frame decodes to four frames, and an image is four equal frames. Only the temporal
layers mix frames, and they work on latents. So the wide layers run on one frame, which gives the same image with a
quarter of the memory and time. MoVQGAN is the same without temporal layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from ...limits.limits import LEVELS
from ...models.image_decoder import ImageDecoder, encoder_sizes
from ...models.networks.vq import nearest_codes
from ..declarations import DecoderKind
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError, incomplete_without
from ..files.names import count_modules, root_of

_ROOTS = ("model.vqmodel.", "vqmodel.", "")  # in a transformers model, in one of older versions, in a separate file
_ORIGINAL = (  # (pattern, replacement) from the names of BAAI/Emu3-VisionTokenizer
    (r"^encoder\.down\.", "encoder.down_block.down."),
    (r"^decoder\.up\.", "decoder.up_block.up."),
    (r"^(encoder|decoder)\.mid\.", r"\1.middle_block."),
    (r"\.attn_1\.norm\.", ".attn_norm."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.(attn_1|attn\.\d+)\.([qkv])\.", r".\1.\2_proj."),
    (r"\.(attn_1|attn\.\d+)\.proj_out\.", r".\1.out_proj."),
)
_TIME = r"encoder\.time_conv\."
_SMALLER = 128  # base channels of MoVQGAN 67M and 102M; that of 270M has 256


def recognise(tensors: Collection[str]) -> bool:
    """Whether this is a MoVQ image tokenizer, or a transformers model that contains Emu3's."""
    return _root(tensors) is not None


def _root(tensors: Collection[str]) -> str | None:
    return root_of(tensors, _ROOTS, "quantize.embedding.weight", "decoder.norm_out.conv_y.weight")


def native_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tokenizer's tensors under the names of transformers' class, for every known layout.

    The original attention projects with 1 x 1 convolutions, that of transformers with matrices.
    """
    root, found = _root(tensors) or "", {}
    for name, tensor in tensors.items():
        if not name.startswith(root):
            continue
        name = name.removeprefix(root)
        for pattern, replacement in _ORIGINAL:
            name = re.sub(pattern, replacement, name)
        matrix = name.endswith("_proj.weight") and tensor.ndim == 4
        found[name] = tensor[..., 0, 0] if matrix else tensor
    return found


def config_settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Settings of transformers' class from tensor shapes. Raises KeyError or ValueError if a part is missing."""
    base, multiples, blocks = encoder_sizes(tensors, "down_block.down", "block")
    codes, dim = tensors["quantize.embedding.weight"].shape
    channels = len(tensors["post_quant_conv.weight" if is_still(tensors) else "post_quant_conv.conv.weight"])
    levels = {int(m[1]) for name in tensors if (m := re.match(r"encoder\.down_block\.down\.(\d+)\.attn\.", name))}
    return {
        "codebook_size": codes,
        "embed_dim": dim,
        "latent_channels": channels,
        "base_channels": base,
        "double_latent": len(tensors["encoder.conv_out.weight"]) == 2 * channels,
        "channel_multiplier": list(multiples),
        "num_res_blocks": blocks,
        "attn_resolutions": sorted(levels),
        "hidden_size": len(tensors["encoder.middle_block.attn_1.q_proj.weight"]),
        "temporal_downsample_factor": 2 ** (0 if is_still(tensors) else count_modules(tensors, _TIME, LEVELS)),
    }


def is_still(tensors: Collection[str]) -> bool:
    """Whether this tokenizer has no temporal layers, as MoVQGAN."""
    return "post_quant_conv.weight" in tensors


class MoVQ(nn.Module):
    """Emu3's tokenizer for single images. ``config`` is transformers', with codebook_size and base_channels."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__()
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        self.config = Emu3VQVAEConfig(**settings)
        self.vq = Emu3VQVAE(self.config)

    @property
    def factor(self) -> int:
        """Pixels per token side."""
        return 2 ** (len(self.config.channel_multiplier) - 1)

    def codebook(self) -> Tensor:
        """Code vectors [V, C], not normalised."""
        return self.vq.quantize.embedding.weight

    def dequantize(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] -> code vectors [B, C, h, w]."""
        return rearrange(self.codebook()[tokens], "b h w c -> b c h w").contiguous()

    def decode(self, latent: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] -> pixels [B, 3, H, W] in about [-1, 1]: the first of four frames."""
        decoder, codes = self.vq.decoder, latent[:, :, None]
        both = torch.cat((self.vq.post_quant_conv(codes), codes))
        for block in decoder.time_res_stack:
            both = block(both)
        for upsample in decoder.time_conv:
            both = F.silu(upsample(both))
        return self._decode_frame(*both[:, :, 0].chunk(2))

    def _decode_frame(self, x: Tensor, codes: Tensor) -> Tensor:
        """The layers that see one frame: x and codes [B, C, h, w] -> pixels [B, 3, H, W]."""
        decoder = self.vq.decoder
        x = decoder.middle_block(decoder.conv_in(x), codes)
        return decoder.conv_out(F.silu(decoder.norm_out(decoder.up_block(x, codes), codes)))

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> latents [B, C, h, w] before quantisation."""
        encoder = self.vq.encoder
        x = repeat(self._encode_frame(pixels), "b c h w -> b c t h w", t=self.config.temporal_downsample_factor)
        for downsample in encoder.time_conv:
            x = F.silu(downsample(x))
        for block in encoder.time_res_stack:
            x = block(x)
        return self.vq.quant_conv(x)[:, :, 0]

    def _encode_frame(self, pixels: Tensor) -> Tensor:
        """The layers that see one frame: pixels [B, 3, H, W] -> [B, C, h, w]."""
        encoder = self.vq.encoder
        x = encoder.middle_block(encoder.down_block(encoder.conv_in(pixels)))
        return encoder.conv_out(F.silu(encoder.norm_out(x)))

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> tokens [B, h, w]: the codes with the least Euclidean distance."""
        return nearest_codes(self.encode_latent(pixels), self.codebook())


class StillMoVQ(MoVQ):
    """MoVQGAN: no temporal layers, and 1 x 1 convolutions of two dimensions around the codes."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__(settings)
        channels, dim = self.config.latent_channels, self.config.embed_dim
        for coder in (self.vq.encoder, self.vq.decoder):
            coder.time_conv, coder.time_res_stack = nn.ModuleList(), nn.ModuleList()
        self.vq.quant_conv, self.vq.post_quant_conv = nn.Conv2d(channels, dim, 1), nn.Conv2d(dim, channels, 1)

    def decode(self, latent: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] -> pixels [B, 3, H, W] in about [-1, 1]."""
        return self._decode_frame(self.vq.post_quant_conv(latent), latent)

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> latents [B, C, h, w] before quantisation."""
        return self.vq.quant_conv(self._encode_frame(pixels))


def load(checkpoint: Checkpoint, dtype: torch.dtype, operations=nn) -> ImageDecoder:
    """Build the tokenizer on the CPU; other tensors of a whole model's checkpoint are not read.

    Raises CheckpointError for missing, unknown, misshapen or non-finite tensors, and for the smaller MoVQGANs.
    """
    tensors = native_tensors(checkpoint.tensors)
    with incomplete_without("encoder, decoder and codebook", checkpoint.path):
        settings = config_settings(tensors)
    still = is_still(tensors)
    if still and settings["base_channels"] == _SMALLER:
        raise CheckpointError(
            f"{checkpoint.path.name} is one of the smaller MoVQGANs (67M or 102M), whose codes have other meanings. "
            "Lumina-mGPT 2.0 was trained with movqgan_270M.ckpt of ai-forever/MoVQGAN."
        )
    with torch.device("meta"):
        module = (StillMoVQ if still else MoVQ)(settings)
    weights = {f"vq.{name}": tensor for name, tensor in tensors.items()}
    return ImageDecoder.load(module, module.factor, module.config.embed_dim, weights, checkpoint, dtype)


KIND = DecoderKind(recognise, load)
