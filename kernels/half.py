"""Whether a CPU multiplies faster in bf16 than in fp32, by trying.

Processors with bf16 products (AMX, AVX512-BF16) multiply the rows of a window several times faster in bf16, and read
half as many bytes; others convert every number first and are slower than in fp32.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

from . import cpu

ROWS, INPUTS, OUTPUTS = 34, 1024, 4096  # a window of 17 tokens with guidance, and a layer of 4 million weights
GAIN = 1.5  # the two kinds of processors are far apart (times 4, times 0.3), so noise does not decide
TRIES = 5


@cache
def bf16_is_faster() -> bool:
    """Are products of a few rows at least ``GAIN`` times faster in bf16 on this CPU? Tried once per process."""
    times = {torch.float32: [], torch.bfloat16: []}
    with torch.inference_mode():
        cases = {dtype: (nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype), torch.ones(ROWS, INPUTS, dtype=dtype))
                 for dtype in times}
        for dtype, (layer, x) in cases.items():
            cpu.linear(layer, x, at_hand=True)  # finds its routine
        for _ in range(TRIES):
            for dtype, (layer, x) in cases.items():
                begun = time.perf_counter()
                cpu.linear(layer, x, at_hand=True)
                times[dtype].append(time.perf_counter() - begun)
    return min(times[torch.float32]) > GAIN * min(times[torch.bfloat16])
