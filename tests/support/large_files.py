"""A checkpoint too large to be held twice unnoticed, and what loading costs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .process_memory import held
from .tiny_folder import write_folder

Shapes = dict[str, tuple[int, ...]]
KINDS = {"anonymous": "RssAnon", "file-backed": "RssFile"}


def qwen2(dim: int, ffn: int, layers: int, keys: int, words: int) -> Shapes:
    """Tensors of a Qwen2 as transformers names them. keys: width of keys and values."""
    found = {"model.embed_tokens.weight": (words, dim), "model.norm.weight": (dim,)}
    for layer in (f"model.layers.{i}." for i in range(layers)):
        for part, height in (("q", dim), ("k", keys), ("v", keys)):
            found[f"{layer}self_attn.{part}_proj.weight"] = (height, dim)
            found[f"{layer}self_attn.{part}_proj.bias"] = (height,)
        found |= {f"{layer}mlp.{part}_proj.weight": (ffn, dim) for part in ("gate", "up")}
        found |= {f"{layer}self_attn.o_proj.weight": (dim, dim), f"{layer}mlp.down_proj.weight": (dim, ffn)}
        found |= {f"{layer}{part}_layernorm.weight": (dim,) for part in ("input", "post_attention")}
    return found


def write(folder: Path, shapes: Shapes, config: dict[str, Any]) -> Path:
    """Random bf16 weights in two shards, in a folder as Hugging Face lays it out. Returns the folder."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, generator=generator) * 0.02
        for name, shape in sorted(shapes.items())
    }
    return write_folder(folder, weights, config, shards=2)


def memory() -> dict[str, int]:
    """Bytes that this process holds, by kind."""
    return {kind: held(line) for kind, line in KINDS.items()}


def watch(load: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What ``load`` returns, and bytes above those before it, at most and in the end."""
    gc.collect()
    before, peak, done = memory(), memory(), threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            for kind, now in memory().items():
                peak[kind] = max(peak[kind], now)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        loaded = load()
    finally:
        done.set()
        watcher.join()
    gc.collect()
    after, costs = memory(), {}
    for kind in KINDS:
        costs |= {f"{kind} peak": max(peak[kind], after[kind]) - before[kind], kind: after[kind] - before[kind]}
    return loaded, costs
