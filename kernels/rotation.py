"""Rotary positions: norms and rotation of the heads of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5  # of LayerNorm
Norm = tuple[Tensor, Tensor | None, float]  # weight, bias and epsilon; see ``normalise``
Norms = tuple[Norm, Norm]  # of queries, and of keys


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of every head of x [..., H, d], with weight and bias [H or 1, d]; without a bias, RMSNorm."""
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return F.layer_norm(x, x.shape[-1:], eps=eps) * weight + bias


def factors_of(cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """Cosines and sines [R or 1, T, d / 2] as ``rotate`` takes them: [..., d] interleaved; with ``halves`` [..., 2d],
    the factors of a channel itself, then those of the other channel of its pair."""
    if halves:
        return torch.cat((cos, cos, -sin, sin), dim=-1)
    return torch.stack((cos, sin), dim=-1).flatten(-2)


def rotate(x: Tensor, factors: Tensor, halves: bool) -> None:
    """Rotate x [R, T, H, d] in place, in fp32. A pair is two adjacent channels, or with ``halves`` channels i and
    i + d / 2. factors: see ``factors_of``."""
    wide = x.float()  # x itself if it is fp32
    if halves:
        cos, sin = factors.unsqueeze(2).chunk(2, dim=-1)
        x.copy_(wide * cos + wide.roll(wide.shape[-1] // 2, -1) * sin)
        return
    rotations = torch.view_as_complex(factors.unflatten(-1, (-1, 2))).unsqueeze(2)
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(rotations)
    if wide.dtype != x.dtype:
        x.copy_(wide)
