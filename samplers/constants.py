"""Rows of numbers that steps need again and again, made once: each would be a launch, and a step that is being captured
cannot send them to the device. They stay for good, as captured steps go on reading them, and are never written to."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def counting(end: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 step, ... below ``end`` (int64)."""
    return torch.arange(0, end, step, device=device)


@cache
def uniform_law(vocab: int, total: int, device: torch.device) -> Tensor:
    """The uniform law [total] (fp32) of the ids below ``vocab``."""
    return torch.nn.functional.pad(torch.full((vocab,), 1 / vocab, device=device), (0, total - vocab))


@cache
def numbers(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """These values."""
    return torch.tensor(values, device=device, dtype=dtype)
