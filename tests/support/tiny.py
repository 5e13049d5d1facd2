"""LlamaGen-shaped models and drafters small enough for a test.

Their weights are such that any program can rebuild them from a tensor's name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.prefix import CaptionPrefix, ClassPrefix
from comfyui_specar.models.networks.vq import VQConfig, VQModel
from comfyui_specar.tools.training.export import split_gates
from safetensors.torch import save_file
from torch import Tensor, nn

GRID = (4, 4)
VOCAB, CLASSES, CAPTION, SLOTS = 32, 10, 24, 120
HEADS = 4
VQ = VQConfig(codebook_size=VOCAB, codebook_dim=8, ch_mult=(1, 1), base_channels=32, z_channels=32)


def named_shapes(make: Callable[[], Mapping[str, nn.Module]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of modules, made without memory, each under the prefix of its names in a file.
    That these are a released file's, tests/unit/test_released.py shows."""
    with torch.device("meta"):
        parts = make()
    return {
        f"{prefix}{name}": tuple(tensor.shape)
        for prefix, module in parts.items()
        for name, tensor in split_gates(module.state_dict()).items()
    }


def llamagen_shapes(
    text: bool,
    dim: int = 64,
    layers: int = 2,
    ffn: int = 256,
    vocab: int = VOCAB,
    classes: int = CLASSES,
    caption: int = CAPTION,
    slots: int = SLOTS,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released LlamaGen file."""
    return named_shapes(
        lambda: {
            "": Backbone(BackboneConfig(dim, layers, HEADS, ffn, vocab)),
            "cls_embedding.": CaptionPrefix(caption, slots, dim, nn) if text else ClassPrefix(classes, dim, nn),
        }
    )


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 values of the tensor ``name``: numpy's frozen Mersenne normal stream, seeded by the CRC-32 of the name.

    Vectors are 1 + x/10 (weights) or x/10 (biases); matrices and filters x / sqrt(inputs); token, class and code tables
    and the null caption x; the head 3x / sqrt(inputs), so that arg-maxima are clear.
    """
    x = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        x = x / 10 + name.endswith("weight")
    elif "embedding" not in name:
        x = x * (3 if name == "output.weight" else 1) / np.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(x.astype(np.float32))


def llamagen_weights(text: bool, **sizes: int) -> dict[str, Tensor]:
    return {name: fill(name, shape) for name, shape in llamagen_shapes(text, **sizes).items()}


def vq_weights(config: VQConfig = VQ) -> dict[str, Tensor]:
    return {name: fill(name, shape) for name, shape in named_shapes(lambda: {"": VQModel(config, nn)}).items()}


def write_llamagen(path: Path, text: bool, **metadata) -> Path:
    """A safetensors file of the tiny model, with the metadata that its size needs."""
    header = {"heads": HEADS, "grid": GRID} | metadata
    save_file(llamagen_weights(text), str(path), metadata={"specar": json.dumps(header)})
    return path


def write_words(folder: Path, width: int, **more: bool) -> None:
    """The text encoder of a model of ours, text_encoder.safetensors: a few words of ``width`` numbers."""
    words = ["red", "cat", "bg_blue"]
    header = {"words": words, "stop_words": ["a"], "synonyms": {"crimson": "red"}} | more
    save_file(
        {"word_embeddings.weight": fill("words embedding", (3, width))},
        str(folder / "text_encoder.safetensors"),
        metadata={"specar": json.dumps(header)},
    )


def llamagen(folder: Path, text: bool) -> DiscreteModel:
    """The tiny model, written to ``folder`` and loaded from there."""
    return load_model(write_llamagen(folder / "model.safetensors", text))


def caption_features(tokens: int = 7) -> Tensor:
    """Features [1, tokens, CAPTION] of a made-up caption."""
    return fill("caption embedding", (1, tokens, CAPTION))


def eagle_shapes(
    dim: int = 64, ffn: int = 256, vocab: int = VOCAB, bias: bool = True, head_norms: int = 0, heads: int = HEADS
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released EAGLE drafter; head_norms: 0 (LlamaGen), ``heads`` (Anole) or 1 (Lumina-mGPT)."""
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    shapes = {
        "embed_tokens.weight": (vocab, dim),
        "fc.weight": (dim, 2 * dim),
        f"{mlp}.gate_proj.weight": (ffn, dim),
        f"{mlp}.up_proj.weight": (ffn, dim),
        f"{mlp}.down_proj.weight": (dim, ffn),
        "layers.0.post_attention_layernorm.weight": (dim,),
    }
    shapes |= {f"{attention}.{part}_proj.weight": (dim, dim) for part in "qkvo"}
    if bias:
        shapes["fc.bias"] = (dim,)
    if head_norms:
        shapes["layers.0.input_layernorm.weight"] = (dim,)
        shapes |= {
            f"{attention}.{part}_norm.{kind}": (head_norms, dim // heads)
            for part in "qk"
            for kind in ("weight", "bias")
        }
    return shapes


def eagle_weights(**options) -> dict[str, Tensor]:
    return {name: fill(name, shape) for name, shape in eagle_shapes(**options).items()}


def eagle_config(**changes) -> dict:
    """config.json of the tiny drafter, with the entries of the released ones."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 64,
        "input_type": "t2i",
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    } | changes


def write_eagle(folder: Path, weights: dict[str, Tensor] | None = None, **changes) -> Path:
    """A drafter's folder: config.json (with ``changes``) and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(eagle_config(**changes)), encoding="utf-8")
    save_file(eagle_weights() if weights is None else weights, str(folder / "model.safetensors"))
    return folder


def millions(module: torch.nn.Module) -> float:
    """Numbers that a module holds, buffers included, in millions."""
    return sum(tensor.numel() for tensor in module.state_dict().values()) / 1e6
