"""Shared by families built on language models: Hugging Face's names and sizes, and tokenizers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..models.networks.backbone import BackboneConfig, join_gates
from .files.checkpoint import Checkpoint
from .files.errors import CheckpointError
from .files.names import count, rename, root_of
from .files.quantised import first

D = TypeVar("D", float, None)
_STACKED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NAMES = {
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "feed_forward.w1_w3",  # GLM-4's, as are the norms behind a block's two parts
    "post_self_attn_layernorm": "attention_post_norm",
    "post_mlp_layernorm": "ffn_post_norm",
}


def language_root(tensors: Collection[str], roots: Sequence[str], attention: str = "q_proj.weight") -> str | None:
    """Prefix of a Llama-type model: the first of ``roots`` with an embedding and this attention tensor of the first
    layer; None if there is none."""
    return root_of(tensors, roots, "embed_tokens.weight", f"layers.0.self_attn.{attention}")


def layer_tensors(tensors: Mapping[str, Tensor], root: str, path: Path) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Layers of a Llama-type model with the prefix ``root``, under the names of LlamaGen and of our backbone.

    The query, key and value projections are stacked. Other tensors of layers keep their names, for load_weights to
    refuse. Raises CheckpointError if one of the three is missing.
    """
    found: dict[str, Tensor | tuple[Tensor, ...]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(re.escape(root) + r"(layers\.\d+)\.(?:(.+)\.)?([^.]+)", name)
        if match is None:
            continue
        layer, part, kind = match.groups(default="")
        if part in _STACKED:
            stacked = (tensor_of(tensors, f"{root}{layer}.{each}.{kind}", path) for each in _STACKED)
            found[f"{layer}.attention.wqkv.{kind}"] = tuple(stacked)
        else:
            found[".".join(filter(None, (layer, _NAMES.get(part, part), kind)))] = tensor
    return found


def other_tensors(
    tensors: Mapping[str, Tensor], root: str, table: str, head: str, parts: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """What a file has beside the layers and the norm of the Llama-type model with the prefix ``root``, the weights of
    its embedding and head, and other ``parts`` (prefixes), under the names of a DiscreteModel: load_weights refuses
    what would change the result.

    table, head: names of the weights of embedding and head.
    """
    read = (f"{root}layers.", f"{root}norm.", *parts)
    left = {name: tensor for name, tensor in tensors.items() if name not in (table, head) and not name.startswith(read)}
    prefix = {table.removesuffix("weight"): "backbone.tok_embeddings.", head.removesuffix("weight"): "backbone.output."}
    return rename(left, prefix | {root: "backbone.", "": ""})


def backbone_tensors(tensors: Mapping[str, Tensor], root: str, path: Path) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Layers and final norm of a Llama-type model with the prefix ``root``, under the names of a DiscreteModel.

    Raises CheckpointError if the norm, or a query, key or value projection is missing.
    """
    layers = join_gates(layer_tensors(tensors, root, path))
    tensor_of(tensors, f"{root}norm.weight", path)
    norm = rename(
        {name: tensor for name, tensor in tensors.items() if name.startswith(f"{root}norm.")}, {root: "backbone."}
    )
    return norm | {f"backbone.{name}": tensor for name, tensor in layers.items()}


def text_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The language model's part of config.json, or all of it if there is no such part."""
    whole = checkpoint.settings
    return whole.get("text_config") or whole.get("language_config") or whole


def backbone_config(
    checkpoint: Checkpoint, root: str, vocab: int, known_heads: Mapping[int, int], norm_eps: float
) -> BackboneConfig:
    """Sizes of a Llama-type model: from its weights, and the number of heads from config.json or, for a file without
    one, from ``known_heads`` (width -> heads of the released sizes).

    Raises CheckpointError for a model without layers, and for an unknown number of heads.
    """
    tensors, path = checkpoint.tensors, checkpoint.path
    settings = text_settings(checkpoint)
    layers = count(tensors, f"{root}layers.")
    fused = f"{root}layers.0.mlp.gate_up_proj.weight" in tensors
    q, k, gate = (
        matrix(tensors, f"{root}layers.0.{part}.weight", path)
        for part in ("self_attn.q_proj", "self_attn.k_proj", f"mlp.{'gate_up' if fused else 'gate'}_proj")
    )
    dim = first(q, len(q), tensor_of(tensors, f"{root}norm.weight", path).numel()).shape[1]
    head_norm = tensors.get(f"{root}layers.0.self_attn.q_norm.weight")
    head_rms = head_norm is not None and head_norm.ndim == 1  # LayerNorms have a row for every head, or one for all
    stated = settings.get("num_attention_heads") or known_heads.get(dim)
    heads = stated if type(stated) is int and stated > 0 else 0
    queries = _rows(q, settings, "head_dim", heads, dim // max(1, heads))
    even = bool(heads) and queries % (2 * heads) == 0  # positions rotate channels in pairs
    keys = _rows(k, settings, "num_key_value_heads", queries // heads, heads) if even else 0
    kv_heads, rest = divmod(keys, queries // heads) if even else (0, 0)
    if not kv_heads or rest or heads % kv_heads:
        raise CheckpointError(
            f"{path.name} has width {dim} and an unknown number of attention heads ({stated}). Keep it "
            "under its released name, together with its config.json, in a separate folder."
        )
    return BackboneConfig(
        dim,
        layers,
        heads,
        _rows(gate, settings, "intermediate_size", 1 + fused) // (1 + fused),
        vocab,
        positive(settings, "rms_norm_eps", norm_eps),
        kv_heads=kv_heads,
        qkv_bias=f"{root}layers.0.self_attn.q_proj.bias" in tensors,
        head_norms=0 if head_norm is None or head_rms else len(head_norm),
        head_rms=head_rms,
        head_dim=queries // heads if head_rms else 0,  # Qwen3's heads may be wider than its width divided by them
        post_norms=f"{root}layers.0.post_self_attn_layernorm.weight" in tensors,
    )


def _rows(matrix: Tensor, settings: Mapping[str, Any], name: str, each: int, usual: int = 0) -> int:
    """Rows of a matrix: its own or, where its format padded it, those for as many as config.json states (else
    ``usual``), with ``each`` rows."""
    stated = settings.get(name) or usual
    return len(first(matrix, stated * each if type(stated) is int else 0, matrix.shape[1]))


def unpad(weights: Mapping[str, Tensor | tuple[Tensor, ...]], config: BackboneConfig) -> dict[str, Tensor | tuple]:
    """Weights of layers, each of whose stacked matrices has the rows that a model of these sizes has of it."""
    keys = config.cached_heads * config.head_dim
    rows = {
        "attention.wqkv.weight": (config.heads * config.head_dim, keys, keys),
        "feed_forward.w1_w3.weight": (config.ffn_dim,) * 2,
    }
    found = dict(weights)
    for name, parts in weights.items():
        sizes = next((sizes for part, sizes in rows.items() if name.endswith(f".{part}")), ())
        if isinstance(parts, tuple) and len(parts) == len(sizes):
            found[name] = tuple(first(part, size, config.dim) for part, size in zip(parts, sizes, strict=True))
    return found


def positive(settings: Mapping[str, Any], name: str, default: D) -> float | D:
    """A number of config.json, or the default. Raises CheckpointError for an invalid one."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise CheckpointError(f"config.json says {name} {value!r}, which must be a positive number.")
    return value


def rope_theta(settings: Mapping[str, Any], default: float = 10000.0) -> float:
    """Base of the rotary frequencies by a config.json of either generation of transformers, or the default.

    Raises CheckpointError for scaled positions.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"config.json sets rotary positions of type {kind!r}, which is not supported.")
    return float(positive(rope, "rope_theta", positive(settings, "rope_theta", default)))


def word_tensors(
    embedding: Tensor, head: Tensor | None, words: int, codes: range, specials: Sequence[int] = ()
) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Embedding and head [N, D] of a model with image codes in its vocabulary, under the names of a DiscreteModel.

    The first ``words`` rows are for prompts, the others for image codes and special tokens. head None: tied.
    """

    def image_rows(table: Tensor) -> tuple[Tensor, ...]:
        return (table[codes.start : codes.stop], *(table[special : special + 1] for special in specials))

    found = {"prefix.embedding.weight": embedding[:words], "backbone.tok_embeddings.weight": image_rows(embedding)}
    return found if head is None else found | {"backbone.output.weight": image_rows(head)}


def matrix(tensors: Mapping[str, Tensor], name: str, path: Path, columns: int | None = None) -> Tensor:
    """The tensor of that name. Raises CheckpointError unless it is a matrix (with so many columns)."""
    tensor = tensor_of(tensors, name, path)
    if tensor.ndim != 2 or not tensor.numel() or columns not in (None, tensor.shape[1]):
        wanted = "a matrix" if columns is None else f"a matrix with {columns} columns"
        raise CheckpointError(f"{path.name}: {name} has shape {list(tensor.shape)}, expected {wanted}.")
    return tensor


def tensor_of(tensors: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    """The tensor of that name. Raises CheckpointError if it is missing."""
    if name not in tensors:
        raise CheckpointError(f"{path.name} lacks {name}. It is incomplete: download it again.")
    return tensors[name]
