"""Triton kernel of gating.py: the gate of a SwiGLU network in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def gated(x: Tensor) -> Tensor:
    """See gating.gated."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _gated[(out.numel() // width, triton.cdiv(width, BLOCK))](x, out, width, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < width
    gate = tl.load(x + row * 2 * width + i, mask=there).to(tl.float32)
    value = tl.load(x + row * 2 * width + width + i, mask=there).to(tl.float32)
    tl.store(out + row * width + i, (gate / (1 + tl.exp(-gate)) * value).to(out.dtype.element_ty), mask=there)
