"""Products of few rows with large matrices, with the gate or residual after them, and the norm before them.

A matrix [N, K] has the dtype of the rows (bf16 or fp16), or is narrow:

* int8 [N, K] with a scale for every row;
* the bits of fp8 (e4m3) as uint8 [N, K], because Apple's GPUs do not support torch's fp8 dtype at all;
* 4 bits per number in groups of GROUP along K: uint8 [N, ceil(K / GROUP), GROUP / 2], whose byte j of a group holds its
  number j in the lower half and number j + GROUP / 2 in the upper, with step and minimum of every group. (torch's own
  int4 products expect an order of bytes that differs by device, but weights are moved between devices.)

A forward pass of few tokens is bound by reading the weights. So narrow weights are widened where they are multiplied:
in the registers of a GPU, or block by block in the cache of a CPU, and never written in a wider form. Prompts have many
more tokens, and are multiplied with a widened copy of the matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.dispatch import Accelerated
from .gating import gated

GROUP = 64  # numbers in 4 bits that share step and minimum
FEW = 512  # rows; more of them, a prompt's, are multiplied with a widened copy of a narrow matrix
_BLOCK = 2**18  # weights widened at once on a CPU


def stored_as(weight: Tensor) -> str | None:
    """The format of a narrow matrix; None for other tensors."""
    if weight.dtype == torch.uint8:
        return "int4" if has_groups(weight) else "float8_e4m3fn"
    return "int8" if weight.dtype == torch.int8 else None


def has_groups(weight: Tensor) -> bool:
    """Whether a matrix is stored in 4 bits per number."""
    return weight.ndim == 3


def linear_narrow(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [..., K] times the rows of a narrow matrix [N, K].

    scale: of int8 or fp8: [N] (fp32), by which row n is multiplied; None: 1. Of 4 bits: step and minimum of every group
    [N, groups, 2] (bf16). Returns [..., N] in the dtype of x (fp32, bf16 or fp16), summed in fp32.
    """
    rows = x.flatten(0, -2)
    in_place = x.device.type == "cpu" or len(rows) <= FEW
    product = few_rows(rows, weight, scale) if in_place else _widened_product(rows, weight, scale)
    return product.unflatten(0, x.shape[:-1])


@Accelerated
def few_rows(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x [M, K] times the rows of ``weight`` [N, K] (in the dtype of x, or as in ``linear_narrow``), plus bias [N].

    gate: the result is ``gated``, and half as wide. residual [M, N or N / 2]: added to the result. Returns the dtype of
    x.

    The Triton kernel is batch invariant: a row's result does not depend on the other rows or their number.
    """
    if weight.dtype == x.dtype:
        product = F.linear(x, weight, bias)
    else:
        product = _narrow(x, weight, scale)
        product = product if bias is None else product + bias.to(x)
    if gate:
        product = gated.reference(product)  # without its Triton kernel: this is the reference
    return product if residual is None else residual + product


@Accelerated
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., K] with a weight [K]. (Some versions of torch launch seven kernels for it.)"""
    return F.rms_norm(x, weight.shape, weight, eps)


def _narrow(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """``linear_narrow`` for x [M, K], in blocks on a CPU; on a GPU each block would be a launch."""
    if x.device.type != "cpu":
        return _widened_product(x, weight, scale)
    rows, wide = max(1, _BLOCK // x.shape[1]), x.float()
    if has_groups(weight):
        assert scale is not None, "4 bits have steps and minima"
        blocks = zip(weight.split(rows), scale.split(rows), strict=True)
        return torch.cat([_widened_product(wide, *block) for block in blocks], dim=-1).to(x.dtype)
    product = torch.cat([_widened_product(wide, block, None) for block in weight.split(rows)], dim=-1)
    return (product if scale is None else product * scale).to(x.dtype)


def _widened_product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    return F.linear(x, widen(weight, scale, x.dtype)[:, : x.shape[1]])  # groups may be padded


def widen(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A narrow matrix [N, K] with its scales, in a wide dtype; in groups, K is rounded up to a multiple of GROUP."""
    if has_groups(weight):
        assert scale is not None, "4 bits have steps and minima"
        step, minimum = scale[..., None].to(dtype).unbind(2)
        levels = torch.cat((weight & 15, weight >> 4), dim=-1).to(dtype)
        return torch.addcmul(minimum, levels, step).flatten(1)
    if weight.dtype == torch.int8:
        wide = weight.to(dtype)
    elif weight.is_cuda:
        wide = weight.view(torch.float8_e4m3fn).to(dtype)
    else:
        # As fp16 the shifted bits are the number / 256. torch's own conversion is eight times slower on a CPU.
        bits = (weight.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
        wide = bits.view(torch.float16).to(dtype).mul_(256)
    return wide if scale is None else wide.mul_(scale[:, None])
