"""How many threads a small model is worth on a CPU, by trying.

torch divides every product among its threads and waits for the last of them. For a few rows of a small model the wait
is longer than the work if waiting threads sleep (OMP_WAIT_POLICY=PASSIVE), and many times longer if another program has
their processor. One thread alone is then faster, on an idle machine it may be slower: it depends on the moment.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import cpu
from .attention import attend
from .trials import limited

T = TypeVar("T")
LARGEST = 50_000_000  # weights: reading more of them takes longer than waiting for threads
MOST_ROWS = 128  # of a pass: multiplying more of them, too
TURNS = 6  # calls with all threads and with one before the faster is taken; the first of each is not counted
PERIOD = 128  # calls, after which both are tried again: other programs come and go


class Threads:
    """Calls the steps of a run with all threads or with one, whichever took less time."""

    def __init__(self) -> None:
        self.every = torch.get_num_threads()
        self._calls: Counter[Hashable] = Counter()
        self._seconds: dict[tuple[Hashable, int], list[float]] = defaultdict(list)  # by kind and number of threads

    def __call__(self, kind: Hashable, step: Callable[..., T], *inputs: Any) -> T:
        """step(*inputs), a step of this kind: those of a kind take similar times."""
        turn, choices = self._calls[kind] % PERIOD, (self.every, 1)
        self._calls[kind] += 1
        if turn < 2 * TURNS:
            threads = choices[turn % 2]
        else:
            threads = min(choices, key=lambda count: median(self._seconds[kind, count][1 - TURNS :]))
        begun = time.perf_counter()
        with limited(threads):
            result = step(*inputs)
        if turn < 2 * TURNS:
            self._seconds[kind, threads].append(time.perf_counter() - begun)
        return result


def worth_trying(modules: Iterable[nn.Module], rows: int) -> bool:
    """May passes of up to ``rows`` rows through ``modules``, on a CPU, be computed by one thread? They must be small,
    and have the same results to the last bit, so that an image never depends on the time that something took."""
    modules = [module for module in modules if isinstance(module, nn.Module)]
    if torch.get_num_threads() == 1 or rows > MOST_ROWS:
        return False
    if sum(weight.numel() for module in modules for weight in module.parameters()) > LARGEST:
        return False
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
    shapes = dict.fromkeys(
        (layer.in_features, layer.out_features, layer.weight.dtype, layer.bias is not None) for layer in layers
    )
    dtypes = dict.fromkeys(dtype for *_, dtype, _ in shapes)
    threads = torch.get_num_threads()
    return all(same_products(*shape, threads) for shape in shapes) and all(
        same_attention(dtype, threads) for dtype in dtypes
    )


@cache
def same_products(inputs: int, outputs: int, dtype: torch.dtype, bias: bool, threads: int) -> bool:
    """Are products with weights [outputs, inputs] by one thread those by so many, for up to MOST_ROWS rows? By trying:
    it depends on the processor and on the libraries that torch was built with. bias: of a layer that has one."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return False  # 8-bit storage
    generator = torch.Generator().manual_seed(0)
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype)  # leaves torch's own generator alone
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / inputs**0.5)
    x = torch.randn(MOST_ROWS, inputs, generator=generator).to(dtype)
    counts = (*range(1, 12), 16, 17, 20, 32, 33, 34, 58, 64, 66, 116, MOST_ROWS)
    return all(same_alone(partial(cpu.linear, layer, x[:count], own_weights=True), threads) for count in counts)


@cache
def same_attention(dtype: torch.dtype, threads: int) -> bool:
    """The same of attention: on AMD's Zen 5, that of a single query in fp32 is not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, length, 32, generator=generator).to(dtype) for length in (MOST_ROWS // 2, 64, 64))
    masks = torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=dtype)
    counts = (1, 2, 3, 4, 8, 16, 17, 32, q.shape[2])
    return all(same_alone(partial(attend, q[:, :, :count], k, v, masks[:, :, :count]), threads) for count in counts)


def same_alone(compute: Callable[[], Tensor], threads: int) -> bool:
    """Is the result by one thread that by so many, to the last bit?"""
    found = []
    with torch.inference_mode():
        for count in (threads, 1):
            with limited(count):
                found.append(compute())
    return torch.equal(*found)
