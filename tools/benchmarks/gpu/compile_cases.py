"""What ``compile_table`` compiles: every Triton kernel, with the arguments of models of released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from comfyui_specar.kernels.attention import NewTokens
from comfyui_specar.kernels.linear import GROUP
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Case = tuple[str, str, tuple]  # the kernel's module.function, what is special, its arguments (on the meta device)

ATTENTION: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {  # key heads, queries of each, slots, channels
    "llamagen-xl": (20, 1, 1152, 64, {}),
    "janus-pro-7b": (32, 1, 1152, 128, {}),
    "lumina-mgpt-7b": (32, 1, 2560, 128, {"norms": "LayerNorm"}),
    "emu3-8b": (8, 4, 8448, 128, {}),
    "emu3.5-34b": (8, 8, 6144, 128, {"norms": "RMSNorm"}),
    "48 channels": (16, 1, 640, 48, {}),
    "80 channels": (16, 1, 640, 80, {}),
    "96 channels": (16, 1, 640, 96, {}),
    "100 channels": (32, 1, 1280, 100, {}),
    "256 channels": (8, 1, 640, 256, {}),
    "one part": (2, 1, 128, 64, {}),
    "llamagen-xl, tree": (20, 1, 1152, 64, {"tree": True}),
    "lumina-mgpt-7b, tree": (32, 1, 2560, 128, {"norms": "LayerNorm", "tree": True}),
    "lumina-mgpt-7b, tree, int8": (32, 1, 2560, 128, {"norms": "LayerNorm", "tree": True, "narrow": True}),
    "fp16": (32, 1, 2560, 128, {"dtype": FP16}),
    "fp32": (32, 1, 2560, 128, {"dtype": FP32}),
}
PRODUCTS = {  # rows and columns of the matrix of a 7B model, and what is fused with it
    "qkv": (12288, 4096, ()),
    "wo": (4096, 4096, ("residual",)),
    "w1, w3": (22016, 4096, ("gate",)),
}
STORAGES = (None, "int8", "fp8", "int4")


def cases() -> Iterator[Case]:
    """All of them. Nothing has data."""
    with torch.device("meta"):
        for name, (key_heads, shared, slots, dim, more) in ATTENTION.items():
            for count in (1, 32):
                yield (
                    "attention.attend_few",
                    f"{name}, {count} tokens",
                    attended(key_heads, shared, slots, dim, count, **more),
                )
        for storage in STORAGES:
            for rows in (2, 64):
                for name, (outer, inner, fused) in PRODUCTS.items():
                    yield (
                        "linear.few_rows",
                        f"{storage or 'bf16'}, {rows} rows, {name}",
                        multiplied(rows, outer, inner, storage, fused),
                    )
                for name, dtype in (("fp16", FP16), ("fp32", FP32)):
                    yield (
                        "linear.few_rows",
                        f"{storage or name}, {rows} rows, {name}",
                        multiplied(rows, 4096, 4096, storage, ("residual",), dtype),
                    )
        for dtype in (BF16, FP16, FP32):
            yield (
                "linear.rms_norm",
                str(dtype),
                (torch.empty(2, 32, 4096, dtype=dtype), torch.empty(4096, dtype=dtype), 1e-5),
            )
        yield from sampled()
        yield from verified()
        yield from others()


def attended(
    key_heads: int, shared: int, slots: int, dim: int, count: int, dtype=BF16, norms: str = "", tree=False, narrow=False
) -> tuple:
    """Arguments of attention.attend_few, for two rows."""
    heads = key_heads * shared
    weight = torch.empty(1, dim, dtype=dtype)
    norm = {"": None, "LayerNorm": ((weight, weight, 1e-5),) * 2, "RMSNorm": ((weight, None, 1e-6),) * 2}[norms]
    halves = dim != 64  # LlamaGen-XL rotates neighbours
    seen = whole(2, count, count, dtype=torch.bool) if tree else None
    return (
        torch.empty(2, count, heads + 2 * key_heads, dim, dtype=dtype),
        torch.empty(2, count, 2 * dim if halves else dim),
        halves,
        norm,
        torch.empty(2, 2 * key_heads, slots, dim, dtype=torch.int8 if narrow else dtype),
        torch.empty(2, 2 * key_heads, slots, 1, dtype=dtype) if narrow else None,
        NewTokens(whole(2), seen, count, 0, slots, slots, dtype),
    )


def multiplied(rows: int, outer: int, inner: int, storage: str | None, fused: tuple[str, ...], dtype=BF16) -> tuple:
    """Arguments of linear.few_rows."""
    weight, scale = {
        None: lambda: (torch.empty(outer, inner, dtype=dtype), None),
        "int8": lambda: (whole(outer, inner, dtype=torch.int8), torch.empty(outer)),
        "fp8": lambda: (whole(outer, inner, dtype=torch.uint8), None),
        "int4": lambda: (
            whole(outer, inner // GROUP, GROUP // 2, dtype=torch.uint8),
            torch.empty(outer, inner // GROUP, 2, dtype=BF16),
        ),
    }[storage]()
    residual = torch.empty(rows, outer, dtype=dtype) if "residual" in fused else None
    return torch.empty(rows, inner, dtype=dtype), weight, scale, None, "gate" in fused, residual


def sampled() -> Iterator[Case]:
    """From logits to tokens."""
    for vocab in (8, 16384, 184_622):
        for count, forced, top_p in ((1, None, 1.0), (33, None, 1.0), (1, whole(1, 1), 0.9)):
            entropy = None if forced is None else (1.0, 1.0, 1.0)
            yield (
                "logits.probabilities",
                f"{vocab} ids, {count} tokens, top-p {top_p}",
                (
                    torch.empty(2, count, vocab, dtype=BF16),
                    forced,
                    3.0,
                    1.0,
                    vocab,
                    2000,
                    top_p,
                    ("top_k", "top_p"),
                    entropy,
                    torch.empty(7),
                ),
            )
    for vocab in (16384, 184_622):
        q, score, most = torch.empty(1, 8, vocab), torch.empty(1, 8), whole(1, 1)
        yield "drafting.children", f"{vocab} ids, drawn", (q, q, score, most, whole(12), 3)
        yield "drafting.children", f"{vocab} ids, most likely", (q, None, score, most, whole(80), 10)
    for width, levels in ((10, 5), (64, 32)):
        drafts, nodes = width * (1 + width * (levels - 1)), min(58 * width, 1024)
        q, number = torch.empty(1, drafts), whole(1, width * (levels - 1))
        yield "drafting.keep_best", f"{drafts} candidates", (whole(1, drafts), q, q, number, whole(1), nodes, width)
    p, uniform, position, key = torch.empty(1, 32, 16384), torch.empty(1, 32), whole(1, 32), whole(1, 2)
    yield "sampling.categorical", "", (p, uniform)
    yield "sampling.redraw", "", (p, p, uniform)
    yield "sampling.perturbed_argmax", "", (p, p)
    yield "noise.uniform", "", (position, key, (1, 2), whole(1, 1))
    yield "noise.gumbel", "", (position, key, 16384, 0, 0)
    yield "noise.normal", "", (position, key, 16, 8, 0)


def verified() -> Iterator[Case]:
    """Windows, trees of 58 slots and six levels."""
    window, uniform, position = torch.empty(1, 32, 16384), torch.empty(1, 32), whole(1, 32)
    exists = whole(1, 32, dtype=torch.bool)
    yield (
        "verification.maximal_coupling",
        "",
        (window, torch.empty(1, 64, 16384), position, position, exists, uniform, uniform),
    )
    p, token, children, table = torch.empty(1, 58, 16384), whole(1, 58), whole(1, 58, 10), whole(16384, 1000)
    yield "verification.sample_and_match_rows", "", (p, token, children, 6, torch.empty(1, 58))
    for rule in (Exact(), UniformRSD(), Lantern(delta=0.3, table=table.to(torch.int32))):
        for drawn in (True, False):
            drafts = (torch.empty(1, 20, 16384), whole(58)) if drawn else (None, None)
            yield (
                "verification.rejection_sampling",
                f"{rule.name}, " + ("drawn drafts" if drawn else "most likely drafts"),
                (p, token, children, *drafts, torch.empty(1, 6, 10), torch.empty(1, 7), torch.empty(1, 6), rule),
            )


def others() -> Iterator[Case]:
    """The gate."""
    yield "gating.gated", "", (torch.empty(2, 300, 22016, dtype=BF16),)


def whole(*shape: int, dtype=torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
