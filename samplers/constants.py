"""Constant tensors that every step needs, made once per device.

Making one would be a launch in every step, and a step that is being captured cannot send numbers to the device. They
are never freed, because captured steps keep reading them, and never written to.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def counting(end: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 step, ... below ``end`` (int64)."""
    return torch.arange(0, end, step, device=device)


@cache
def uniform_probs(vocab: int, total: int, device: torch.device) -> Tensor:
    """The uniform distribution [total] (fp32) over the ids below ``vocab``."""
    return torch.nn.functional.pad(torch.full((vocab,), 1 / vocab, device=device), (0, total - vocab))


@cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values as a tensor."""
    return torch.tensor(values, device=device, dtype=dtype)
