"""A T5 encoder under the released names, small enough for a test, and a tokenizer that knows three words."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from .tiny import CAPTION
from .tiny_folder import write_folder

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat"]


def weights(
    dim: int, layers: int = 2, heads: int = 2, head_dim: int = 4, ffn: int = 32, words: int = len(WORDS)
) -> dict[str, Tensor]:
    """Random weights of an encoder with features of ``dim`` numbers."""
    inner, generator = heads * head_dim, torch.Generator().manual_seed(0)
    shapes = {
        "shared.weight": (words, dim),
        "encoder.final_layer_norm.weight": (dim,),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, heads),
    }
    for i in range(layers):
        attention, mlp = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        shapes |= {f"{attention}.SelfAttention.{part}.weight": (inner, dim) for part in "qkv"}
        shapes |= {
            f"{attention}.SelfAttention.o.weight": (dim, inner),
            f"{attention}.layer_norm.weight": (dim,),
            f"{mlp}.DenseReluDense.wi_0.weight": (ffn, dim),
            f"{mlp}.DenseReluDense.wi_1.weight": (ffn, dim),
            f"{mlp}.DenseReluDense.wo.weight": (dim, ffn),
            f"{mlp}.layer_norm.weight": (dim,),
        }
    return {
        name: 0.3 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
        for name, shape in shapes.items()
    }


def write_words(folder: Path) -> None:
    """tokenizer.json of the words."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write(folder: Path, dim: int = CAPTION) -> Path:
    """A folder with config.json, weights and tokenizer, as flan-t5-xl's."""
    write_folder(folder, weights(dim), {"model_type": "t5"})
    write_words(folder)
    return folder
