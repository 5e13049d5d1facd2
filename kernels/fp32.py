"""Products of a few rows in fp32 on a CPU, by the routine that is fastest on this processor.

torch's BLAS library may read a matrix once per row, or prepare it anew for every product. Two other routines do not, on
processors where it does: oneDNN's product, and for two or three rows (a token with guidance) (W x^T)^T, with the matrix
as its first factor. The fastest differs by processor, number of rows and size of the matrix, so it is tried. Results
differ in the last bits, as those of other numbers of rows do in fp32. In 16-bit floats, see steady.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 128  # more are computed, not read: torch's own routine is then as fast
LARGE = 2**20  # weights of a matrix
TRIED = {False: (1024, 256), True: (4096, 1024)}  # outputs and inputs of matrices tried, by whether they are large
WEIGHTS = {False: 2**23, True: 2**25}  # tried in all: 32 and 128 MiB, so that none is in the processor's cache
MOST_TRANSPOSED = 3  # rows; from four on, oneDNN's product is as fast or faster
GAIN = 1.25  # noise does not decide
TRIES = 3

Product = Callable[[Tensor, Tensor], Tensor]  # of rows [M, K] and a matrix [N, K]: rows [M, N]


def applies(layer: nn.Linear, x: Tensor) -> bool:
    """Whether ``linear`` is to be used for layer(x), x [..., K] on a CPU, if the layer's weight may be read."""
    return (x.dtype == torch.float32 and x.numel() <= MOST_ROWS * x.shape[-1] and layer.bias is None
            and not torch.is_grad_enabled() and not torch.compiler.is_compiling())


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) for x [..., K] of at most ``MOST_ROWS`` rows, without calling the layer."""
    rows = x.reshape(-1, x.shape[-1])
    # The power of two that their number reaches: routines change there.
    power = len(rows).bit_length() - 1
    large = layer.weight.numel() >= LARGE
    return fastest(power, large)(rows, layer.weight).view(*x.shape[:-1], -1)


def transposed(rows: Tensor, weight: Tensor) -> Tensor:
    """(W x^T)^T"""
    return (weight @ rows.T).T.contiguous()


def onednn(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


@cache
def fastest(power: int, large: bool) -> Product:
    """The routine for 2^power rows and up: each of them in turn, if it is ``GAIN`` times faster than the one before.
    Tried once per process, so that runs with all threads and with one have the same numbers."""
    routines = [F.linear]
    routines += [onednn] if has_onednn() else []
    routines += [transposed] if 2**power <= MOST_TRANSPOSED else []
    outputs, inputs = TRIED[large]
    matrices = torch.ones(WEIGHTS[large] // (outputs * inputs), outputs, inputs)
    rows = torch.ones(2**power, inputs)
    times: dict[Product, list[float]] = {routine: [] for routine in routines}
    with torch.inference_mode():
        for _ in range(TRIES):
            for routine, found in times.items():
                begun = time.perf_counter()
                for matrix in matrices:
                    routine(rows, matrix)
                found.append(time.perf_counter() - begun)
    best = F.linear
    for routine in routines:
        if min(times[best]) > GAIN * min(times[routine]):
            best = routine
    return best


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
