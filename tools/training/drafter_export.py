"""Writes drafters in the published layouts: EAGLE as LANTERN's authors released it, small models as LlamaGen.

Blocks of language models may have additional tensors (biases, grouped-query heads), which are named as in transformers.
"""

import json
from dataclasses import asdict
from pathlib import Path

from ...device.cpu import unpack
from ...models.discrete_model import DiscreteModel
from ...models.networks.eagle import Eagle
from ...models.networks.positions import GridPositions
from ...models.networks.prefix import CaptionPrefix
from .export import half, llamagen_tensors, save


def write_eagle(module: Eagle, model: DiscreteModel, out: Path) -> None:
    """``out``/config.json and model.safetensors (fp16) of a drafter of ``model``; both contain the settings."""
    unpack(module)
    block = module.layer
    tensors = {"embed_tokens.weight": module.tok_embeddings.weight, "fc.weight": module.fc.weight}
    if module.fc.bias is not None:
        tensors["fc.bias"] = module.fc.bias
    config, attention = module.config, block.attention
    gate, value = block.feed_forward.w1_w3.weight.chunk(2)
    heights = [heads * config.head_dim for heads in (config.heads, config.cached_heads, config.cached_heads)]
    for kind, joined in attention.wqkv.named_parameters():
        for part, own in zip("qkv", joined.split(heights), strict=True):
            tensors[f"layers.0.self_attn.{part}_proj.{kind}"] = own
    for part in ("q_norm", "k_norm"):
        for kind, own in getattr(attention, part).named_parameters():
            tensors[f"layers.0.self_attn.{part}.{kind}"] = own
    if config.attention_norm:
        tensors["layers.0.input_layernorm.weight"] = block.attention_norm.weight
    tensors |= {
        "layers.0.self_attn.o_proj.weight": attention.wo.weight,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": value,
        "layers.0.mlp.down_proj.weight": block.feed_forward.w2.weight,
        "layers.0.post_attention_layernorm.weight": block.ffn_norm.weight,
    }
    settings = {
        "family": "eagle",
        "target": model.family,
        "grid": list(model.grid),
        "prompt": "cropped",
        "num_hidden_layers": 1,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.cached_heads,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_eps,
        "bias": module.fc.bias is not None,
    }
    out.mkdir(parents=True, exist_ok=True)
    save(out / "model.safetensors", half(tensors), settings)
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_small(module: DiscreteModel, out: Path) -> None:
    """``out``/model.safetensors (fp16) of a small LlamaGen model, with the metadata for its size."""
    settings = {
        "family": "llamagen",
        "heads": module.backbone.config.heads,
        "grid": list(module.grid),
        "pixels_per_token": module.pixels_per_token,
        "prompt_keys": module.positions == GridPositions(prompt_keys=True),
        "defaults": asdict(module.defaults),
    }
    if isinstance(module.prefix, CaptionPrefix):
        settings["caption_slots"] = module.prefix.slots
    out.mkdir(parents=True, exist_ok=True)
    save(out / "model.safetensors", half(llamagen_tensors(module.backbone, module.prefix)), settings)
