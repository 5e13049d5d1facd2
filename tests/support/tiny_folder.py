"""Folders as Hugging Face lays them out, and tokenizers small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor


def write_folder(
    folder: Path, weights: dict[str, Tensor], config: dict, shards: int = 1, pickled: bool = False
) -> Path:
    """config.json, and weights in one file or in shards with their index: safetensors, or pickles of older uploads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    names = sorted(weights)
    size = -(-len(names) // shards)
    where = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}{suffix}" if shards > 1 else stem + suffix
        part = {name: weights[name].contiguous() for name in names[i * size : (i + 1) * size]}
        if pickled:
            torch.save(part, folder / file)
        else:
            save_file(part, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def edited(folder: Path, file: str = "config.json", **settings: Any) -> Path:
    """Change entries of a JSON file in a folder; None takes one away. Returns the folder."""
    content = json.loads((folder / file).read_text(encoding="utf-8")) | settings
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / file).write_text(json.dumps(kept), encoding="utf-8")
    return folder


def layer_shapes(
    root: str, layers: int, dim: int, inner: int, keys: int = 0, queries: int = 0, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the layers of a Llama-type model with the prefix ``root``, in transformers' layout.

    inner: width of the feed-forward network. keys, queries: width of all heads together (0: dim). bias: do queries,
    keys and values have one.
    """
    keys, queries = keys or dim, queries or dim
    linears = {
        "self_attn.q_proj": (queries, dim),
        "self_attn.k_proj": (keys, dim),
        "self_attn.v_proj": (keys, dim),
        "self_attn.o_proj": (dim, queries),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    found: dict[str, tuple[int, ...]] = {}
    for layer in (f"{root}layers.{i}" for i in range(layers)):
        found |= {f"{layer}.{part}layernorm.weight": (dim,) for part in ("input_", "post_attention_")}
        found |= {f"{layer}.{name}.weight": shape for name, shape in linears.items()}
        if bias:
            found |= {
                f"{layer}.self_attn.{part}_proj.bias": (rows,)
                for part, rows in zip("qkv", (queries, keys, keys), strict=True)
            }
    return found


def byte_tokenizer(specials: Sequence[str], first: int = 256) -> Tokenizer:
    """A byte-level tokenizer without merges: byte values are its ids 0..255 in the library's order, and the special
    tokens follow from id ``first`` on (words of no text fill the gap)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(f"unused{i}" for i in range(len(alphabet), first))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer
