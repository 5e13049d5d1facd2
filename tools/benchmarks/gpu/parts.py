"""Stages ``products`` and ``attention``: the two parts of a pass that take most of its time, alone.

What is timed is captured and replayed, on more weights (or keys) than a GPU's cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from comfyui_specar.kernels.attention import attend
from comfyui_specar.kernels.gating import gated
from comfyui_specar.kernels.linear import few_rows
from comfyui_specar.kernels.rotation import factors_of
from comfyui_specar.models.networks.cache import KVCache
from comfyui_specar.models.networks.positions import RotaryTable
from comfyui_specar.models.networks.products import product
from comfyui_specar.models.networks.quantised import narrow_matrix, put_narrow
from torch import Tensor, nn

from ..subjects import STORAGES
from . import subjects
from .compile_cases import ATTENTION
from .findings import Findings

MODELS = {"xl": "llamagen-xl", "7b": "lumina-mgpt-7b"}
ROWS = (2, 12, 16, 32, 52, 64, 116)
STORED = ("", "int8", "int4")
ATTENDED = ("llamagen-xl", "lumina-mgpt-7b", "emu3-8b", "emu3.5-34b")
TOKENS = (1, 6, 16, 26, 32, 58)
CACHE = 2**28  # bytes that are more than any cache
REPLAYS = 5
Call = Callable[[], Any]


def microseconds(calls: Sequence[Call], dry: bool) -> float | None:
    """The least time of one of the calls in a replay of all; in a dry run they are only called."""
    for call in calls:
        call()
    if dry:
        return None
    graph, edges = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(REPLAYS + 1):  # the first one wakes the GPU
        edges[0].record()
        graph.replay()
        edges[1].record()
        torch.cuda.synchronize()
        found.append(1e3 * edges[0].elapsed_time(edges[1]) / len(calls))
    return round(min(found[1:]), 1)


def copies_of(size: int, dry: bool) -> int:
    """How many weights of so many bytes a replay reads."""
    return 1 if dry else max(2, -(-CACHE // size))


# Products


def matrices(name: str, dry: bool) -> dict[str, tuple[int, int, str]]:
    """A layer's matrices: rows, columns, and what is fused with the product."""
    config = subjects.size_of(MODELS[name], dry).config
    return {
        f"{name} qkv": ((config.heads + 2 * config.cached_heads) * config.head_dim, config.dim, ""),
        f"{name} wo": (config.dim, config.heads * config.head_dim, "residual"),
        f"{name} w13": (2 * config.ffn_dim, config.dim, "gate"),
        f"{name} w2": (config.dim, config.ffn_dim, "residual"),
    }


def run_products(findings: Findings) -> None:
    """What the pack does, its kernel, and cuBLAS, of which the pack chooses by rows and storage."""
    dry, dtype = findings.dry, subjects.dtype_of(findings.dry)
    device = subjects.device_of(dry)
    listed = [
        (matrix, *about, storage)
        for name in MODELS
        for matrix, about in matrices(name, dry).items()
        for storage in STORED
    ]
    with torch.inference_mode():
        for matrix, outer, inner, fused, storage in findings.each(listed, "matrices"):
            layers: list[nn.Module] = []
            of = {"matrix": matrix, "storage": storage or str(dtype).removeprefix("torch.")}
            for rows in findings.each(ROWS, f"rows of {matrix}, {storage}", "rows", **of):
                with findings.item(**of, rows=rows) as row:
                    layers = layers or layers_of(outer, inner, storage, dtype, device, dry)
                    x = torch.randn(rows, inner, dtype=dtype, device=device)
                    added = torch.randn(rows, outer, dtype=dtype, device=device) if fused == "residual" else None
                    for way, call in ways(x, fused == "gate", added, bool(storage)).items():
                        row[f"{way}, us"] = microseconds([partial(call, layer) for layer in layers], dry)
    slower = sum((row["ours, us"] or 0) > (row.get("cuBLAS, us") or torch.inf) for row in findings.rows)
    findings.content["summary"] = f"cuBLAS is faster than what the pack does in {slower} of {len(findings.rows)} cases"


def layers_of(
    outer: int, inner: int, storage: str, dtype: torch.dtype, device: torch.device, dry: bool
) -> list[nn.Module]:
    """Layers of one shape, of different weights."""
    found = nn.ModuleList()
    while not found or len(found) < copies_of(bytes_of(found[0]), dry):
        found.append(nn.Linear(inner, outer, bias=False, dtype=dtype, device=device))
        if storage:
            put_narrow(found, str(len(found) - 1), *narrow_matrix(found[-1].weight.detach(), STORAGES[storage]))
    return list(found)


def bytes_of(layer: nn.Module) -> int:
    return sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))


def ways(x: Tensor, gate: bool, added: Tensor | None, narrow: bool) -> dict[str, Callable[[Any], Tensor]]:
    """The product of a layer with x, and its gate or residual."""

    def kernel(layer: Any) -> Tensor:
        return few_rows(x, layer.weight, getattr(layer, "scale", None), None, gate, added)

    def cublas(layer: Any) -> Tensor:
        if added is not None:
            return torch.addmm(added, x, layer.weight.t())
        return gated(x @ layer.weight.t()) if gate else x @ layer.weight.t()

    found = {"ours": lambda layer: product(layer, x, None, gate, added, in_place=True), "kernel": kernel}
    return found if narrow else found | {"cuBLAS": cublas}


# Attention


def run_attention(findings: Findings) -> None:
    """Two rows whose caches are half full: the pack's attention, which also rotates and stores, and torch's, whose keys
    are stored already."""
    dry, dtype = findings.dry, subjects.dtype_of(findings.dry)
    with torch.inference_mode():
        for name in findings.each(ATTENDED, "models"):
            for tokens in findings.each(TOKENS[: 2 if dry else None], f"tokens of {name}", "tokens", model=name):
                with findings.item(model=name, tokens=tokens) as row:
                    for way, calls in attentions(name, tokens, dtype, dry).items():
                        row[f"{way}, us"] = microseconds(calls, dry)
    slower = sum((row["ours, us"] or 0) > (row["torch, us"] or torch.inf) for row in findings.rows)
    findings.content["summary"] = f"torch's attention is faster in {slower} of {len(findings.rows)} cases"


def attentions(name: str, tokens: int, dtype: torch.dtype, dry: bool) -> dict[str, list[Call]]:
    """Attention in all layers of a cache, by who computes it."""
    heads, shared, slots, dim, _ = ATTENTION[name]
    device, slots = subjects.device_of(dry), 256 if dry else slots
    layers = copies_of(4 * heads * slots * dim * dtype.itemsize, dry)
    cache = KVCache(layers, 2, heads, slots, dim, dtype, device)
    cache.lengths += slots // 2
    cache.set_attention_length(slots // 2 + tokens)
    tree = None if tokens == 1 else torch.ones((2, tokens, tokens), dtype=torch.bool, device=device).tril()
    angles = torch.zeros((1, tokens, dim // 2), device=device)
    rotary = RotaryTable(factors_of(angles.cos(), angles.sin(), False), False)
    qkv = torch.randn((2, tokens, heads * (shared + 2), dim), dtype=dtype, device=device)
    new = cache.open(tokens, tree)
    queries, reach = qkv[:, :, : heads * shared].transpose(1, 2), cache.attention_length
    keys, values = (part[..., :reach, :] for part in (cache.keys, cache.values))
    return {
        "ours": [partial(cache.attend, layer, qkv, rotary, new) for layer in range(layers)],
        "torch": [partial(attend, queries, keys[layer], values[layer], new.mask) for layer in range(layers)],
    }
