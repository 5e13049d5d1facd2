"""VQGANs: LlamaGen's, Chameleon's and Emu3.5's, in separate files or inside a Janus or Anole model.

All sizes are read from tensor shapes. Code vectors of LlamaGen and Janus have unit length; those of VQGANs that number
their levels as CompVis did are used as stored. Emu3.5's is known by its config.json or by its number of codes: it
encodes by dot products.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ...limits.limits import LEVELS
from ...models.image_decoder import ImageDecoder, encoder_sizes
from ...models.networks.vq import VQConfig, VQModel
from ..declarations import DecoderKind
from ..files.checkpoint import Checkpoint
from ..files.errors import incomplete_without
from ..files.names import count_modules, root_of

_ROOTS = ("", "gen_vision_model.", "model.vqmodel.", "vqmodel.")  # prefixes of the names, in files and in models
_COMPVIS = (  # (pattern, replacement) from CompVis's names, which transformers uses too
    (r"^(encoder|decoder)\.(?:down|up)\.(\d+)\.", r"\1.conv_blocks.\2."),
    (r"\.block\.(\d+)\.", r".res.\1."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)
_LEVEL = r"decoder\.conv_blocks\.(\d+)\."
_IBQ, _IBQ_CODES = "Emu3p5VisionVQ", 131072  # model_type and number of codes of Emu3.5's


def recognise(tensors: Collection[str]) -> bool:
    """Whether this is a VQGAN, or a model that contains one."""
    return _root(tensors) is not None


def _root(tensors: Collection[str]) -> str | None:
    """Prefix of the names of the tokenizer's tensors; None if there is no tokenizer, or only its encoder."""
    return root_of(tensors, _ROOTS, "quantize.embedding.weight", "decoder.norm_out.weight")


def is_mirrored(tensors: Collection[str], root: str) -> bool:
    """Whether the decoder's deepest level is the last, as in CompVis (Chameleon), not the first (Janus)."""
    level = f"{root}decoder.up.0."
    return any(name.startswith(level) for name in tensors) and f"{level}upsample.conv.weight" not in tensors


def tensors_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tokenizer's tensors under LlamaGen's names, without other tensors of a model or of training."""
    root, named = _root(tensors) or "", {}
    for name, tensor in tensors.items():
        if name.startswith(root) and not name.startswith(f"{root}loss."):
            name = name.removeprefix(root)
            for pattern, replacement in _COMPVIS:
                name = re.sub(pattern, replacement, name)
            named[name] = tensor
    if is_mirrored(tensors, root):
        deepest = count_modules(named, r"decoder\.conv_blocks\.", LEVELS) - 1
        named = {
            re.sub(_LEVEL, lambda m: f"decoder.conv_blocks.{deepest - int(m[1])}.", name): tensor
            for name, tensor in named.items()
        }
    return named


def config_of(tensors: Mapping[str, Tensor], unit_codes: bool = True, by_product: bool = False) -> VQConfig:
    """Sizes of a tokenizer from its tensor shapes, under LlamaGen's names."""
    base, multiples, blocks = encoder_sizes(tensors, "conv_blocks", "res")
    codes, dim = tensors["quantize.embedding.weight"].shape
    return VQConfig(
        codebook_size=codes,
        codebook_dim=dim,
        ch_mult=multiples,
        base_channels=base,
        z_channels=tensors["post_quant_conv.weight"].shape[0],
        num_res_blocks=blocks,
        attention=any(".attn." in name for name in tensors),
        unit_codes=unit_codes,
        by_product=by_product or codes == _IBQ_CODES,
    )


def load(checkpoint: Checkpoint, dtype: torch.dtype, operations=nn) -> ImageDecoder:
    """Build the tokenizer on the CPU. Raises CheckpointError for missing, unknown, misshapen or non-finite tensors."""
    tensors = tensors_of(checkpoint.tensors)
    with incomplete_without("encoder, decoder and codebook", checkpoint.path):
        unit_codes = not is_mirrored(checkpoint.tensors, _root(checkpoint.tensors) or "")
        config = config_of(tensors, unit_codes, checkpoint.settings.get("model_type") == _IBQ)
    with torch.device("meta"):
        module = VQModel(config, operations)
    return ImageDecoder.load(module, config.factor, config.codebook_dim, tensors, checkpoint, dtype)


KIND = DecoderKind(recognise, load)
