"""Triton kernels of continuous.py: a program per ROWS tokens (log_ratio), or per token with all proposals (redraw)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .continuous import Gaussian

ROWS = 32  # tokens, or proposals, at a time


@triton.jit
def _exponents(x, p_mean, p_log_std, q_mean, q_log_std, inside, narrow):
    """log of p(x)/q(x) summed over the last dimension; narrow = 1 / (2 kappa^2) scales the exponents."""
    to_p = (x - p_mean) * (x - p_mean) * narrow * tl.exp(-2 * p_log_std)
    to_q = (x - q_mean) * (x - q_mean) * narrow * tl.exp(-2 * q_log_std)
    return tl.sum(tl.where(inside, to_q - to_p + q_log_std - p_log_std, 0.0), axis=1)


@triton.jit
def _log_sigma(p_path, q_path, row, inside, sign):
    between = tl.load(q_path + row, mask=inside, other=0.0) - tl.load(p_path + row, mask=inside, other=0.0)
    return sign * tl.minimum(tl.maximum(between, -50.0), 50.0)


@triton.jit
def _log_ratio(
    x,
    p_mean,
    p_log_std,
    p_path,
    q_mean,
    q_log_std,
    q_path,
    out,
    count,
    channels,
    narrow,
    sign,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :]
    place = row[:, None] * channels + channel
    inside = (row[:, None] < count) & (channel < channels)
    ratio = _exponents(
        tl.load(x + place, mask=inside, other=0.0),
        tl.load(p_mean + place, mask=inside, other=0.0),
        tl.load(p_log_std + place, mask=inside, other=0.0),
        tl.load(q_mean + place, mask=inside, other=0.0),
        tl.load(q_log_std + place, mask=inside, other=0.0),
        inside,
        narrow,
    )
    ratio += _log_sigma(p_path, q_path, row, row < count, sign)
    tl.store(out + row, ratio, mask=row < count)


def log_ratio(x: Tensor, p: Gaussian, q: Gaussian, kappa: float, sign: float) -> Tensor:
    """See continuous.log_ratio."""
    shape = torch.broadcast_shapes(x.shape, p[0].shape, q[0].shape)
    out = torch.empty(shape[:-1], device=x.device)
    given = (x.expand(shape).contiguous(), *_full(p, shape), *_full(q, shape))
    _log_ratio[(triton.cdiv(out.numel(), ROWS),)](
        *given, out, out.numel(), shape[-1], 1 / (2 * kappa**2), sign, ROWS, triton.next_power_of_2(shape[-1])
    )
    return out


def _full(gaussian: Gaussian, shape: torch.Size) -> tuple[Tensor, ...]:
    """The tensors of a Gaussian, one row per token."""
    mean, log_std, path = gaussian
    return mean.expand(shape).contiguous(), log_std.expand(shape).contiguous(), path.expand(shape[:-1]).contiguous()


@triton.jit
def _redraw(
    normal,
    normal_try,
    normal_row,
    accept,
    accept_try,
    accept_row,
    p_mean,
    p_log_std,
    p_path,
    q_mean,
    q_log_std,
    q_path,
    out,
    number,
    tries,
    channels,
    sign,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    normal += row * normal_row
    accept += row * accept_row
    channel = tl.arange(0, CHANNELS)
    place = row * channels + channel
    there = channel < channels
    mean = tl.load(p_mean + place, mask=there, other=0.0)
    log_std = tl.load(p_log_std + place, mask=there, other=0.0)
    other_mean = tl.load(q_mean + place, mask=there, other=0.0)
    other_log_std = tl.load(q_log_std + place, mask=there, other=0.0)
    sigma = _log_sigma(p_path, q_path, row, True, sign)
    first = tries
    for start in range(0, tries, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i[:, None] < tries) & there[None, :]
        noise = tl.load(normal + i[:, None] * normal_try + channel[None, :], mask=inside, other=0.0)
        x = mean[None, :] + tl.exp(log_std)[None, :] * noise
        ratio = sigma + _exponents(
            x, mean[None, :], log_std[None, :], other_mean[None, :], other_log_std[None, :], inside, 0.5
        )
        u = tl.load(accept + i * accept_try, mask=i < tries, other=2.0)
        first = tl.minimum(first, tl.min(tl.where((u < 1 - tl.exp(-ratio)) | (ratio != ratio), i, tries)))
    index = tl.minimum(first, tries - 1)
    noise = tl.load(normal + index * normal_try + channel, mask=there, other=0.0)
    tl.store(out + place, mean + tl.exp(log_std) * noise, mask=there)
    tl.store(number + row, tl.where(first < tries, first + 1, -tries).to(tl.int64))


def redraw(normal: Tensor, accept: Tensor, p: Gaussian, q: Gaussian, sign: float) -> tuple[Tensor, Tensor]:
    """See continuous.redraw."""
    tries, *shape = normal.shape
    out, number = torch.empty(shape, device=normal.device), accept.new_empty(shape[:-1], dtype=torch.int64)
    normal, accept = normal.reshape(tries, number.numel(), shape[-1]), accept.reshape(tries, number.numel())
    normal = normal if normal.stride(2) == 1 else normal.contiguous()
    _redraw[(number.numel(),)](
        normal,
        normal.stride(0),
        normal.stride(1),
        accept,
        *accept.stride(),
        *_full(p, torch.Size(shape)),
        *_full(q, torch.Size(shape)),
        out,
        number,
        tries,
        shape[-1],
        sign,
        ROWS,
        triton.next_power_of_2(shape[-1]),
    )
    return out, number
