"""Linear layers on a CPU: in 16-bit floats by blocks of rows (batch_invariant.py), in fp32 by a routine for few rows.

torch's BLAS library may read a matrix once per row, and may gain nothing from threads for a few rows (both on AMD's
Zen 5). oneDNN's product does neither. For two or three rows, a token with guidance, (W x^T)^T, with the matrix as its
first factor, is faster still (Zen 5, and an Intel Xeon with AMX). Which one is taken depends on the number of rows
alone, so that an image is the same in every process.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import batch_invariant

FEW = 128  # rows; more are bound by computing, not by reading the matrix, and torch's own routine is as fast
TRANSPOSED_ROWS = (2, 3)  # from four on oneDNN's product is as fast or faster
BF16_ROWS, BF16_INPUTS, BF16_OUTPUTS = 34, 1024, 4096  # a window of 17 tokens with guidance, 4 million weights
BF16_GAIN = 1.25  # the two kinds of processors are far apart (times 1.7 and more, times 0.3), so noise does not decide
BF16_TRIES = 5


def linear(layer: nn.Module, x: Tensor, own_weights: bool = False) -> Tensor:
    """layer(x) for x [..., inputs].

    own_weights: the layer is an nn.Linear whose parameters may be used instead of calling it.
    """
    if not (own_weights and isinstance(layer, nn.Linear) and few_fp32_rows(layer, x)):
        return batch_invariant.linear(layer, x, own_weights)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) in TRANSPOSED_ROWS:
        product = (layer.weight @ rows.T).T.contiguous()
    elif has_onednn():
        product = onednn(rows, layer.weight)
    else:
        product = F.linear(rows, layer.weight)
    return product.view(*x.shape[:-1], -1)


def few_fp32_rows(layer: nn.Linear, x: Tensor) -> bool:
    """Is layer(x), x [..., K], a product of few rows in fp32, without bias, gradients or a compiler?"""
    return (
        x.dtype == torch.float32
        and x.numel() <= FEW * x.shape[-1]
        and layer.bias is None
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def onednn(rows: Tensor, weight: Tensor) -> Tensor:
    """oneDNN's product of rows [M, K] with a matrix [N, K]: [M, N] (fp32)."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


@cache
def has_onednn() -> bool:
    """Does this torch, on this processor, have oneDNN's product?"""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    with torch.inference_mode():
        rows, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        try:
            return torch.equal(onednn(rows, weight), F.linear(rows, weight))
        except (RuntimeError, TypeError):  # it takes other arguments there; torch does not promise them
            return False


@cache
def bf16_is_faster() -> bool:
    """Are products of a few rows at least ``BF16_GAIN`` times faster in bf16 than in fp32 on this CPU?

    Processors with bf16 products (AMX, AVX512-BF16) multiply the rows of a window several times faster, and read half
    as many bytes; others convert every number first and are slower. Measured once per process, with one thread, which
    does not wait for others beside other programs.
    """
    threads, seconds = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.utils.skip_init(nn.Linear, BF16_INPUTS, BF16_OUTPUTS, bias=False, dtype=dtype)
            nn.init.ones_(layer.weight)  # no random numbers
            run = partial(linear, layer, torch.ones(BF16_ROWS, BF16_INPUTS, dtype=dtype), own_weights=True)
            with torch.inference_mode():
                run()  # the first call finds how the rows are divided into blocks
                seconds[dtype] = batch_invariant.shortest(run, BF16_TRIES)
    finally:
        torch.set_num_threads(threads)
    return seconds[torch.float32] > BF16_GAIN * seconds[torch.bfloat16]
