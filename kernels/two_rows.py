"""Products of two rows with large matrices in fp32 on a CPU: a token with guidance.

torch's BLAS library may multiply each of them by itself, and so read the matrix twice. (W x^T)^T has the matrix as its
first factor and reads it once: up to three times faster where it does not fit into the processor's cache. Results
differ in the last bits, as those of other numbers of rows do in fp32. In 16-bit floats, see steady.py.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor, nn

from .steady import transposed

ROWS = 2
LEAST = 2**19  # weights of a matrix; models of smaller ones fit into the cache
TRIED = 16384, 1024  # outputs and inputs, 64 MiB: too large for the cache
GAIN = 1.25
TRIES = 8


def applies(layer: nn.Module, x: Tensor) -> bool:
    """Whether ``transposed`` is to be used for layer(x), x [..., K], if the layer's weight may be read."""
    return (x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() == ROWS * x.shape[-1]
            and isinstance(layer, nn.Linear) and layer.bias is None and layer.weight.numel() >= LEAST
            and not torch.is_grad_enabled() and faster())


@cache
def faster() -> bool:
    """Is it at least ``GAIN`` times faster on this CPU? Tried once per process. Processors are clearly on one side or
    the other, so noise does not decide."""
    outputs, inputs = TRIED
    layer, x = nn.Linear(inputs, outputs, bias=False, device="meta"), torch.ones(ROWS, inputs)
    layer.weight = nn.Parameter(torch.ones(TRIED), requires_grad=False)
    times: tuple[list[float], list[float]] = [], []
    with torch.inference_mode():
        for _ in range(TRIES):
            for found, run in zip(times, (layer, lambda rows: transposed(layer, rows)), strict=True):
                begun = time.perf_counter()
                run(x)
                found.append(time.perf_counter() - begun)
    called, other = map(min, times)
    return called > GAIN * other
