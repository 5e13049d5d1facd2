"""How Janus-Pro reads images (arXiv:2501.17811): its SigLIP tower, the aligner and the text head.

Both layouts of its files: DeepSeek's, with one projection of queries, keys and values, and transformers', with three.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.image_reader import PatchReader
from ...models.networks.siglip import Reading, VisionConfig
from ...models.text.tokenizer import Tokenizer
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import count
from ..files.weights import load_weights
from ..llama import matrix, tensor_of

_HEADS = 16  # of all towers of DeepSeek's layout, whose config.json does not say so
_STACKED = ("q_proj", "k_proj", "v_proj")
_TOWERS = ("vision_model.vision_tower.", "model.vision_model.")
_NAMES = (  # names in either layout, as regular expressions -> ours
    (r"vision_model\.vision_tower\.patch_embed\.proj\.", "tower.patch_embed."),
    (r"vision_model\.vision_tower\.(pos_embed$|blocks\.|norm\.)", r"tower.\1"),
    (r"model\.vision_model\.embeddings\.patch_embedding\.", "tower.patch_embed."),
    (r"model\.vision_model\.embeddings\.position_embedding\.weight$", "tower.pos_embed"),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.layer_norm", r"tower.blocks.\1.norm"),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.projection_layer\.", r"tower.blocks.\1.attn.proj."),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.", r"tower.blocks.\1.attn."),
    (r"model\.vision_model\.encoder\.layers\.", "tower.blocks."),
    (r"model\.vision_model\.post_layernorm\.", "tower.norm."),
    (r"(?:model\.)?aligner\.(?:layers\.0|fc1)\.", "aligner.fc1."),
    (r"(?:model\.)?aligner\.(?:layers\.2|hidden_layers\.0)\.", "aligner.fc2."),
    (r"(?:model\.)?(aligner\.)", r"\1"),
    (r"(?:language_model\.)?lm_head\.", "head."),
)
_EOS = "<｜end▁of▁sentence｜>"  # after every answer
_POOLED = "vision_model.vision_tower.attn_pool."  # of SigLIP's training; Janus reads the patches themselves


def load_patch_reader(
    checkpoint: Checkpoint,
    model: DiscreteModel,
    tokenizer: Tokenizer,
    write: Callable[[str, int], tuple[list[int], int]],
    operations=nn,
) -> PatchReader:
    """The part of a Janus that reads images, on the CPU and in the model's dtype. write: see PatchReader. Raises
    CheckpointError for a file without it, and for tensors that are missing, unknown, misshapen or not finite."""
    tensors = tensors_of(checkpoint)
    with torch.device("meta"):
        reading = Reading(config_of(checkpoint, tensors), operations)
    load_weights(reading, tensors, checkpoint, model.dtype)
    return PatchReader(model, reading, tokenizer, write, _EOS)


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """The tensors that read images and answer, under the names of a Reading. Raises CheckpointError without them."""
    path = checkpoint.path
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        pattern, ours = next((pair for pair in _NAMES if re.match(pair[0], name)), ("", ""))
        if pattern:
            found[re.sub(pattern, ours, name)] = tensor
        elif name.startswith(_TOWERS) and not name.startswith(_POOLED):
            found[name] = tensor  # which load_weights refuses
    if "tower.patch_embed.weight" not in found or "head.weight" not in found:
        part = "vision tower" if "tower.patch_embed.weight" not in found else "head for words"
        raise CheckpointError(
            f"{title(path)} was saved without its {part}, so it only generates images. To describe them, use all files "
            "of deepseek-community/Janus-Pro-1B or -7B, or of the release that it was made from."
        )
    if "tower.pos_embed" in found and found["tower.pos_embed"].ndim == 3:
        found["tower.pos_embed"] = found["tower.pos_embed"][0]
    return _stacked(found, path)


def _stacked(found: dict[str, Tensor], path: Path) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """The tensors, with transformers' three projections as one."""
    joined: dict[str, Tensor | tuple[Tensor, ...]] = {}
    for name, tensor in found.items():
        match = re.fullmatch(r"(tower\.blocks\.\d+\.attn\.)([qkv]_proj)\.(.+)", name)
        if match is None:
            joined[name] = tensor
        else:
            before, _, kind = match.groups()
            joined[f"{before}qkv.{kind}"] = tuple(tensor_of(found, f"{before}{part}.{kind}", path) for part in _STACKED)
    return joined


def config_of(checkpoint: Checkpoint, tensors: dict[str, Tensor | tuple[Tensor, ...]]) -> VisionConfig:
    """Sizes of the tower, by its weights. Raises CheckpointError for impossible ones."""
    path = checkpoint.path
    plain: dict[str, Tensor] = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, tuple)}
    patch_embed, places = plain["tower.patch_embed.weight"], matrix(plain, "tower.pos_embed", path)
    head = matrix(plain, "head.weight", path)
    dim, patches = places.shape[1], len(places)
    stated = (checkpoint.settings.get("vision_config") or {}).get("num_attention_heads", _HEADS)
    sound = patch_embed.ndim == 4 and isqrt(patches) ** 2 == patches
    if not sound or type(stated) is not int or stated < 1 or dim % stated:
        raise CheckpointError(
            f"{title(path)} has a vision tower of {patches} patches, width {dim} and {stated} heads, which is "
            "impossible. Download config.json and the weights again."
        )
    layers = count(plain, "tower.blocks.")
    return VisionConfig(dim, layers, stated, patch_embed.shape[-1], patches, head.shape[1], len(head))
