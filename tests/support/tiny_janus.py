"""Janus-Pro small enough for a test, in the layouts of its two releases."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_specar.models.networks.vq import VQConfig, VQModel
from tokenizers import processors
from torch import Tensor

from .tiny import fill
from .tiny_family import FREE, Files, Language, Tiny, Workflow
from .tiny_folder import byte_tokenizer, layer_shapes, write_folder

SIDE = 4  # tokens a side
CODES, CODE_DIM, WORDS, FIRST = 32, 8, 288, 260  # image codes; rows of the text embedding, and the first special token
HEADS = 4
TOWER_LAYERS, TOWER_HEADS = 2, 16  # DeepSeek's config.json does not state the latter
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
    (r"^model\.vision_model\.embeddings\.position_embedding\.weight", "vision_model.vision_tower.pos_embed"),
    (r"^model\.vision_model\.encoder\.layers\.", "vision_model.vision_tower.blocks."),
    (r"^model\.vision_model\.post_layernorm", "vision_model.vision_tower.norm"),
    (r"\.layer_norm(\d)", r".norm\1"),
    (r"\.self_attn\.projection_layer", ".attn.proj"),
)


def shapes(
    dim: int = 64,
    layers: int = 2,
    ffn: int = 96,
    vision: int = 32,
    codes: int = CODES,
    words: int = WORDS,
    vq: VQConfig = VQ,
    tower: int = TOWER_LAYERS,
    patches: int = SIDE * SIDE,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes in transformers' layout."""
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
    return found | tokenizer_shapes(vq) | tower_shapes(vision, tower, patches)


def tower_shapes(dim: int, layers: int, patches: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower in transformers' layout, but for its first layer."""
    root = "model.vision_model"
    found: dict[str, tuple[int, ...]] = {f"{root}.embeddings.position_embedding.weight": (patches, dim)}
    linears = {f"self_attn.{part}": (dim, dim) for part in ("q_proj", "k_proj", "v_proj", "projection_layer")}
    linears |= {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
    norms = [f"encoder.layers.{layer}.layer_norm{number}" for layer in range(layers) for number in (1, 2)]
    for layer in range(layers):
        for name, shape in linears.items():
            part = f"{root}.encoder.layers.{layer}.{name}"
            found |= {f"{part}.weight": shape, f"{part}.bias": shape[:1]}
    for norm in (*norms, "post_layernorm"):
        found |= {f"{root}.{norm}.weight": (dim,), f"{root}.{norm}.bias": (dim,)}
    return found


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


def pool_shapes(dim: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of SigLIP's pooling in DeepSeek's layout, which nothing uses."""
    root = "vision_model.vision_tower.attn_pool"
    linears = {"q": (dim, dim), "kv": (2 * dim, dim), "proj": (dim, dim)}
    linears |= {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
    found = {f"{root}.latent": (1, 1, dim), f"{root}.norm.weight": (dim,), f"{root}.norm.bias": (dim,)}
    for name, shape in linears.items():
        found |= {f"{root}.{name}.weight": shape, f"{root}.{name}.bias": shape[:1]}
    return found


def picture(height: int, width: int) -> Tensor:
    """An image [height, width, 3] in 0..1 of 8 bits, that any program can rebuild."""
    waves = fill(f"picture {height} {width} embedding", (height, width, 3)).tanh()
    return ((waves / 2 + 0.5) * 255).round() / 255


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
    """transformers' layout -> the one DeepSeek released, with the statistics that its tokenizer keeps, and with a part
    of SigLIP that Janus does not use. Of tensors, or of their shapes."""
    first = tensors["model.vision_model.embeddings.patch_embedding.weight"]
    unused = {"gen_vision_model.quantize.codebook_used": (65536,)} | pool_shapes(
        tuple(getattr(first, "shape", first))[0]
    )
    found: dict[str, Any] = {name: torch.zeros(s) if isinstance(first, Tensor) else s for name, s in unused.items()}
    for name, tensor in fused(tensors).items():
        if name.startswith("model.vqmodel."):
            for pattern, replacement in _VQ_NAMES:
                name = re.sub(re.escape(replacement), pattern.replace("\\", ""), name)
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The projections of the vision tower as one, and its table of positions with a dimension for images."""
    found = {}
    for name, tensor in tensors.items():
        if "vision_model" in name and "k_proj" not in name and "v_proj" not in name:
            if "position_embedding" in name:
                tensor = tensor[None] if isinstance(tensor, Tensor) else (1, *tensor)
            if "q_proj" in name:
                parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                tensor = torch.cat(parts) if isinstance(tensor, Tensor) else (3 * tensor[0], *tensor[1:])
            found[name.replace("self_attn.q_proj", "attn.qkv")] = tensor
        elif "vision_model" not in name:
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
            "num_attention_heads": TOWER_HEADS,
            "num_hidden_layers": TOWER_LAYERS,
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
LANGUAGE = {
    "janus-pro": Language(
        ("<image_placeholder>", "<begin_of_image>"),
        FREE * 4,
        {"cfg": 5.0},
        (16384, 8, 2),
        prompts=("<｜begin▁of▁sentence｜><|User|>: {}\n\n<|Assistant|>:<begin_of_image>",),
        repository="deepseek-ai/Janus-Pro",
        stated=("<image_placeholder>", "<｜▁pad▁｜>", "<begin_of_image>", "<｜begin▁of▁sentence｜>"),
        other="<|User|>",
        nonsense=(("text_config", "x"), ("vision_config", [1]), ("vision_config", {"num_image_tokens": 10**30})),
    )
}
FILES = {
    "Janus-Pro": Files(partial(write, shards=2)),
    "Janus-Pro as released": Files(partial(write, original=True, pickled=True)),
    "Janus-Pro in int8": Files(write, storage=torch.int8),
}
WORKFLOWS = {
    "09 Janus-Pro (download)": Workflow("Janus-Pro 1B, 7B", lambda models: write(models / "ar_models/Janus-Pro-1B"))
}
