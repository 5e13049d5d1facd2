"""Confidence intervals and tests that assume no distribution: bootstrap, jackknife, permutation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

REPEATS = 9999
BLOCKS = 16
NORMAL = 1.96  # half the width of a 95 % interval, in standard errors
CHUNK = 1000  # permutations at a time


def bootstrap(values: Tensor) -> dict[str, Any]:
    """The mean of values [N] and its 95 % interval by the bootstrap's percentiles."""
    values = values.double()
    generator = torch.Generator().manual_seed(0)
    means = torch.cat(
        [
            values[torch.randint(len(values), (CHUNK, len(values)), generator=generator)].mean(1)
            for _ in range(-(-REPEATS // CHUNK))
        ]
    )
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(values.mean()), "interval": [low, high]}


def jackknife(statistic: Callable[[Tensor], float], count: int) -> dict[str, Any]:
    """``statistic`` of all images, given as indices [N] (int64), and its 95 % interval by leaving out one of BLOCKS
    blocks at a time. (The bootstrap repeats images, by which distances between sets grow.)"""
    index = torch.arange(count)
    parts = [block for block in index.tensor_split(BLOCKS) if len(block)]
    without = torch.tensor([statistic(index[~torch.isin(index, part)]) for part in parts], dtype=torch.float64)
    error = ((len(parts) - 1) * without.var(correction=0)).sqrt()
    value = statistic(index)
    return {"value": value, "interval": [value - NORMAL * float(error), value + NORMAL * float(error)]}


def paired_test(differences: Tensor) -> float:
    """How probable a mean as far from 0 as that of ``differences`` [N] is if each could as well have the other sign."""
    values = differences.double()
    return _p_value(lambda signs: (signs @ values).abs(), len(values))


def exchange_test(terms: Tensor) -> float:
    """How probable a kernel distance as large as that of ``terms`` [N, N] (image_metrics.kernel_terms) is if the two
    images of every index could as well be exchanged."""
    values = terms.double()
    return _p_value(lambda signs: (signs @ values * signs).sum(1), len(values))


def _p_value(statistic: Callable[[Tensor], Tensor], count: int) -> float:
    """Of signs [n, N] (fp64) -> numbers [n], that of equal signs being the one observed. It is never below
    1 / (REPEATS + 1), so that the test is exact (Phipson and Smyth, 2010)."""
    generator = torch.Generator().manual_seed(0)
    observed = statistic(torch.ones((1, count), dtype=torch.float64))
    observed = observed - 1e-9 * observed.abs()  # sums of the same numbers in another order
    as_large = 0
    for at in range(0, REPEATS, CHUNK):
        size = min(CHUNK, REPEATS - at), count
        signs = torch.randint(2, size, generator=generator).double() * 2 - 1
        as_large += int((statistic(signs) >= observed).sum())
    return (1 + as_large) / (1 + REPEATS)


def rejected(p_values: Sequence[float], alarm_rate: float) -> list[bool]:
    """Which hypotheses are false by Holm's procedure: if all are true, one or more are rejected with a probability of
    ``alarm_rate`` at most, whatever the tests have to do with each other. Raises ValueError for more tests than
    permutations can tell apart."""
    if len(p_values) > alarm_rate * (REPEATS + 1):
        raise ValueError(
            f"{len(p_values)} tests with a false-alarm rate of {alarm_rate} need more than {REPEATS} permutations."
        )
    found = [False] * len(p_values)
    for passed, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alarm_rate / (len(p_values) - passed):
            break
        found[index] = True
    return found
