"""Whether a CPU multiplies faster in bf16 than in fp32, by trying.

Processors with bf16 products (AMX, AVX512-BF16) multiply the rows of a window several times faster in bf16, and read
half as many bytes; others convert every number first and are slower than in fp32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from . import cpu, trials

ROWS, INPUTS, OUTPUTS = 34, 1024, 4096  # a window of 17 tokens with guidance, and a layer of 4 million weights
GAIN = 1.25  # the two kinds of processors are far apart (times 1.7 and more, times 0.3), so noise does not decide
TRIES = 5


@cache
def bf16_is_faster() -> bool:
    """Are products of a few rows at least ``GAIN`` times faster in bf16 on this CPU? Tried once per process."""
    layers = {
        dtype: nn.utils.skip_init(nn.Linear, INPUTS, OUTPUTS, bias=False, dtype=dtype)  # no random numbers
        for dtype in (torch.float32, torch.bfloat16)
    }
    for layer in layers.values():
        nn.init.ones_(layer.weight)
    rows = {dtype: torch.ones(ROWS, INPUTS, dtype=dtype) for dtype in layers}
    ways = {dtype: lambda _, dtype=dtype: cpu.linear(layers[dtype], rows[dtype], own_weights=True) for dtype in layers}
    trials.shortest(ways, 1, 1)  # finds their routines
    seconds = trials.shortest(ways, 1, TRIES)
    return seconds[torch.float32] > GAIN * seconds[torch.bfloat16]
