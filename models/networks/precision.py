"""Which precision a CPU multiplies faster."""

from __future__ import annotations

from functools import cache, partial
from timeit import repeat

import torch
from torch import nn

from .products import product

ROWS, INPUTS, OUTPUTS = 34, 1024, 4096  # a window of 17 tokens with guidance, 4 million weights
GAIN = 1.25  # the two kinds of processors are far apart (times 1.7 and more, times 0.3), so noise does not decide
TRIES = 5


@cache
def bf16_is_faster() -> bool:
    """Are products of a few rows at least ``GAIN`` times faster in bf16 than in fp32 on this CPU?

    Processors with bf16 products (AMX, AVX512-BF16) multiply the rows of a window several times faster, and read half
    as many bytes; others convert every number first and are slower. Measured once per process, with one thread, which
    does not wait for others beside other programs.
    """
    threads, seconds = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.utils.skip_init(nn.Linear, INPUTS, OUTPUTS, bias=False, dtype=dtype)
            nn.init.ones_(layer.requires_grad_(False).weight)  # no random numbers
            run = partial(product, layer, torch.ones(ROWS, INPUTS, dtype=dtype))
            with torch.inference_mode():
                run()  # the first call packs
                seconds[dtype] = min(repeat(run, number=1, repeat=TRIES))  # that other programs disturbed least
    finally:
        torch.set_num_threads(threads)
    return seconds[torch.float32] > GAIN * seconds[torch.bfloat16]
