"""Which of several ways to compute the same takes the least time on this processor, by trying.

One thread computes, and the shortest of many short runs counts: what other programs do meanwhile hardly changes that,
so every process comes to the same choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

Way = TypeVar("Way", bound=Hashable)


def shortest(ways: Mapping[Way, Callable[[int], object]], count: int, tries: int) -> dict[Way, float]:
    """Seconds of the shortest run of each way, of ``tries`` times ``count`` runs. A way is called with the number of
    the run, 0 to count - 1, by which it takes a matrix that is not in the processor's cache."""
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    with torch.inference_mode(), limited(1):
        for _ in range(tries):
            for way, run in ways.items():
                for number in range(count):
                    begun = time.perf_counter()
                    run(number)
                    seconds[way].append(time.perf_counter() - begun)
    return {way: min(found) for way, found in seconds.items()}


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Inside, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
