"""Janus-Pro small enough for a test, in the layouts of its two releases."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_specar.models.vq import VQConfig, VQModel
from tokenizers import processors
from torch import Tensor

from .tiny_family import Files, Tiny, Workflow
from .tiny_folder import byte_tokenizer, layer_shapes, write_folder

SIDE = 4  # tokens a side
CODES, CODE_DIM, WORDS, FIRST = 32, 8, 288, 260  # image codes; rows of the text embedding, and the first special token
HEADS = 4
VQ = VQConfig(codebook_size=CODES, codebook_dim=CODE_DIM, ch_mult=(1, 1), base_channels=32, z_channels=32)
SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<begin_of_image>",
    "<end_of_image>",
    "<image_placeholder>",
    "<|User|>",
    "<|Assistant|>",
)
BEGIN, _, PAD, IMAGE = range(FIRST, FIRST + 4)
_VQ_NAMES = (  # released -> transformers
    (r"encoder\.conv_blocks", "encoder.down"),
    (r"decoder\.conv_blocks", "decoder.up"),
    (r"\.res\.", ".block."),
    (r"mid\.0", "mid.block_1"),
    (r"mid\.1", "mid.attn_1"),
    (r"mid\.2", "mid.block_2"),
)
_NAMES = (  # transformers -> released
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.generation_embeddings", "gen_embed"),
    (r"^model\.generation_aligner\.fc1", "gen_aligner.layers.0"),
    (r"^model\.generation_aligner\.hidden_layers\.0", "gen_aligner.layers.2"),
    (r"^model\.generation_head\.proj_out", "gen_head.output_mlp_projector"),
    (r"^model\.generation_head\.", "gen_head."),
    (r"^model\.vqmodel\.", "gen_vision_model."),
    (r"^model\.aligner\.fc1", "aligner.layers.0"),
    (r"^model\.aligner\.hidden_layers\.0", "aligner.layers.2"),
    (r"^model\.vision_model\.embeddings\.patch_embedding", "vision_model.vision_tower.patch_embed.proj"),
)


def shapes(
    dim: int = 64,
    layers: int = 2,
    ffn: int = 96,
    vision: int = 32,
    codes: int = CODES,
    words: int = WORDS,
    vq: VQConfig = VQ,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes in transformers' layout, with a few of the vision tower's."""
    lm = "model.language_model"
    found = {
        f"{lm}.embed_tokens.weight": (words, dim),
        f"{lm}.norm.weight": (dim,),
        "lm_head.weight": (words, dim),
        "model.generation_embeddings.weight": (codes, CODE_DIM),
        "model.vision_model.embeddings.patch_embedding.weight": (vision, 3, 16, 16),
        "model.vision_model.embeddings.patch_embedding.bias": (vision,),
    }
    for name, inner, outer in (
        ("generation_aligner.fc1", CODE_DIM, dim),
        ("generation_aligner.hidden_layers.0", dim, dim),
        ("generation_head.proj_out", dim, dim),
        ("generation_head.vision_head", dim, codes),
        ("aligner.fc1", vision, dim),
        ("aligner.hidden_layers.0", dim, dim),
    ):
        found |= {f"model.{name}.weight": (outer, inner), f"model.{name}.bias": (outer,)}
    found |= layer_shapes(f"{lm}.", layers, dim, ffn)
    return found | tokenizer_shapes(vq)


@cache
def tokenizer_shapes(vq: VQConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the image tokenizer in transformers' layout."""
    found = {}
    with torch.device("meta"):
        tokenizer = VQModel(vq).state_dict()
    for name, tensor in tokenizer.items():
        for pattern, replacement in _VQ_NAMES:
            name = re.sub(pattern, replacement, name)
        found[f"model.vqmodel.{name}"] = tuple(tensor.shape)
    return found


def weights(seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    """Random tensors (fp32) in transformers' layout; its head is sharp enough for clear arg-maxima."""
    generator, found = np.random.RandomState(seed), {}
    for name, shape in shapes(**sizes).items():
        tensor = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
        if len(shape) == 1:
            tensor = tensor / 10 + name.endswith("weight")
        elif "embed" not in name or "patch" in name:
            tensor *= (3 if "vision_head" in name else 1) / torch.Size(shape[1:]).numel() ** 0.5
        found[name] = tensor
    return found


def released(tensors: dict[str, Any]) -> dict[str, Any]:
    """transformers' layout -> the one DeepSeek released, with the statistics that its tokenizer keeps."""
    found = {"gen_vision_model.quantize.codebook_used": torch.zeros(65536)}
    for name, tensor in tensors.items():
        if name.startswith("model.vqmodel."):
            for pattern, replacement in _VQ_NAMES:
                name = re.sub(re.escape(replacement), pattern.replace("\\", ""), name)
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def config(original: bool, dim: int = 64, layers: int = 2, ffn: int = 96, vision: int = 32) -> dict:
    """config.json with the entries that matter, in either layout."""
    language = {
        "hidden_size": dim,
        "intermediate_size": ffn,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "vocab_size": WORDS,
    }
    if original:
        return {
            "architectures": ["MultiModalityCausalLM"],
            "model_type": "multi_modality",
            "language_config": language,
            "gen_vision_config": {"cls": "VQ-16", "params": {"image_token_size": CODES, "n_embed": CODE_DIM}},
            "vision_config": {"cls": "CLIPVisionTower", "params": {"image_size": 16 * SIDE}},
        }
    return {
        "architectures": ["JanusForConditionalGeneration"],
        "model_type": "janus",
        "text_config": language,
        "image_token_id": FIRST + 5,
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": vision,
            "image_size": 16 * SIDE,
            "model_type": "janus_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_image_tokens": SIDE * SIDE,
            "patch_size": 16,
            "projection_dim": dim,
        },
        "vq_config": {
            "base_channels": VQ.base_channels,
            "channel_multiplier": list(VQ.ch_mult),
            "embed_dim": CODE_DIM,
            "image_token_embed_dim": dim,
            "latent_channels": VQ.z_channels,
            "model_type": "janus_vqgan",
            "num_embeddings": CODES,
            "projection_dim": dim,
        },
    }


def write(
    folder: Path, seed: int = 0, shards: int = 1, original: bool = False, pickled: bool = False, **sizes: int
) -> Path:
    """A model's folder. original: DeepSeek's layout instead of transformers'; pickled: .bin files."""
    tensors = weights(seed, **sizes)
    write_folder(folder, released(tensors) if original else tensors, config(original, **sizes), shards, pickled)
    (folder / "processor_config.json").write_text(f'{{"num_image_tokens": {SIDE * SIDE}}}', encoding="utf-8")
    tokenizer = byte_tokenizer(SPECIALS, FIRST)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], BEGIN)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


TINY = {"janus-pro": Tiny(write)}
FILES = {
    "Janus-Pro": Files(partial(write, shards=2)),
    "Janus-Pro as released": Files(partial(write, original=True, pickled=True)),
    "Janus-Pro in int8": Files(write, storage=torch.int8),
}
WORKFLOWS = {
    "23 Janus-Pro (download)": Workflow("Janus-Pro 1B, 7B", lambda models: write(models / "ar_models/Janus-Pro-1B"))
}
