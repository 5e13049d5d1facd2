"""Products of a few rows in fp32 on a CPU, by one of three routines.

torch's BLAS library may read a matrix once per row, and may gain nothing from threads for a few rows (both on AMD's
Zen 5). oneDNN's product does neither. For two or three rows, a token with guidance, (W x^T)^T, with the matrix as its
first factor, is faster still. It depends on the processor, so each is tried. Results differ in the last bits, as those
of other numbers of rows do in fp32. In 16-bit floats, see batch_invariant.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import trials

MOST_ROWS = 128  # more are computed, not read: torch's own routine is then as fast
LARGE = 2**20  # weights of a matrix
TRIED = {False: (1024, 256), True: (4096, 1024)}  # outputs and inputs of matrices tried, by whether they are large
WEIGHTS = {False: 2**23, True: 2**25}  # tried in all: 32 and 128 MiB, so that none is in the processor's cache
MOST_TRANSPOSED = 3  # rows; from four on, oneDNN's product is as fast or faster
GAIN = 1.25
TRIES = 2

Product = Callable[[Tensor, Tensor], Tensor]  # of rows [M, K] and a matrix [N, K]: rows [M, N]


def applies(layer: nn.Linear, x: Tensor) -> bool:
    """Whether ``linear`` is to be used for layer(x), x [..., K] on a CPU, if the layer's weight may be read."""
    return (
        x.dtype == torch.float32
        and x.numel() <= MOST_ROWS * x.shape[-1]
        and layer.bias is None
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) for x [..., K] of at most ``MOST_ROWS`` rows, without calling the layer."""
    rows = x.reshape(-1, x.shape[-1])
    # The power of two that their number reaches: routines change there.
    power = len(rows).bit_length() - 1
    large = layer.weight.numel() >= LARGE
    return routine(power, large)(rows, layer.weight).view(*x.shape[:-1], -1)


def transposed(rows: Tensor, weight: Tensor) -> Tensor:
    """(W x^T)^T"""
    return (weight @ rows.T).T.contiguous()


def onednn(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


@cache
def routine(power: int, large: bool) -> Product:
    """The routine for 2^power rows and up, tried once per process: ``transposed`` if it is clearly faster than torch's
    own, else ``onednn`` unless it is clearly slower (one thread computes, and oneDNN gains more from others), else
    torch's own. Clearly is by ``GAIN``: processors are on one side or the other, so noise does not decide."""
    ways = [F.linear]
    ways += [onednn] if has_onednn() else []
    ways += [transposed] if 2**power <= MOST_TRANSPOSED else []
    outputs, inputs = TRIED[large]
    matrices = torch.ones(WEIGHTS[large] // (outputs * inputs), outputs, inputs)
    rows = torch.ones(2**power, inputs)
    seconds = trials.shortest({way: partial(run, way, rows, matrices) for way in ways}, len(matrices), TRIES)
    if transposed in ways and GAIN * seconds[transposed] < seconds[F.linear]:
        return transposed
    if onednn in ways and seconds[onednn] < GAIN * seconds[F.linear]:
        return onednn
    return F.linear


def run(way: Product, rows: Tensor, matrices: Tensor, number: int) -> Tensor:
    return way(rows, matrices[number])


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
