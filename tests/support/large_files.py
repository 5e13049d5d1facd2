"""A checkpoint too large to be held twice unnoticed, and what loading costs."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .process_memory import held

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
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    half, where = sum(map(prod, shapes.values())) / 2, {}
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for name in sorted(shapes):
        number = sum(tensor.numel() for tensor in shards[0].values()) >= half
        shards[number][name] = torch.randn(shapes[name], dtype=torch.bfloat16, generator=generator) * 0.02
        where[name] = f"model-{number + 1:05}-of-00002.safetensors"
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{number + 1:05}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return folder


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
