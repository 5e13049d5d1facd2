"""Triton kernels executed on the CPU from what Triton's compiler makes of them, by the package ttsem (see
tools/ttsem.sh). It finds accesses out of bounds, reads of memory that nobody wrote, and races between the programs of
a launch: programs that touch the same bytes, of which one writes them.

Two kinds of access share memory on purpose, and every other one is an error:

* Programs count themselves in with an atomic addition, and the last one reads what all have stored before (the parts of
  attention). Its accesses after the addition come after those of the others before theirs.
* Programs that read what they have stored themselves, where others store the same (the new keys and values, which every
  block of queries stores). Whether stores are the same is checked.

Barriers between the threads of one program are not modelled: tests of the machine code look for these.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

T = TypeVar("T")
HERE = find_spec("ttsem") is not None


def executed(launch: Callable[[], T]) -> T:
    """The result of a function that launches kernels on CPU tensors. KernelFault names the line of a wrong access."""
    from ttsem import pidraces, sanitize

    find_race = pidraces.find_race

    def first_race(log: list | None) -> Any:
        return next(filter(None, map(find_race, unordered(log or []))), None)

    with patch.object(pidraces, "find_race", first_race), sanitize.session() as found:
        result = launch()
    assert not found.races_unchecked, "a launch has too many accesses for a search for races"
    return result


def unordered(log: list[tuple]) -> list[list[tuple]]:
    """Parts of a log within each of which programs may run in any order.

    log: the accesses of a launch, as (program, kind, operation, addresses, bytes of an element, their values), in the
    order in which they were made; kinds are r (read), w (write), s (write of what was there) and a (atomic).
    """
    log = [entry for entry in map(_OwnReads(), log) if entry[3].size]
    counted: dict[int, dict[Any, int]] = {}  # by counter: programs in order, with the index of their addition
    for index, (program, kind, _, addresses, *_) in enumerate(log):
        if kind == "a":
            for address in np.unique(addresses).tolist():
                counted.setdefault(address, {})[program] = index
    late: dict[int, set[int]] = {}  # by counter: what the last program does after its addition
    for counter, programs in counted.items():
        *_, (last, begun) = programs.items()
        late[counter] = {index for index, entry in enumerate(log) if entry[0] == last and index > begun}
    every = set().union(*late.values())
    early = set(range(len(log))) - every
    parts = [early, every]
    for counter, programs in counted.items():
        parts.append(late[counter] | {i for i in early if i > programs.get(log[i][0], -1)})
    return [[log[index] for index in sorted(part)] for part in parts]


class _OwnReads:
    """Removes from reads the addresses that the same program has stored."""

    def __init__(self) -> None:
        self.stored: dict[Any, np.ndarray] = {}

    def __call__(self, entry: tuple) -> tuple:
        program, kind, operation, addresses, size, values = entry
        mine = self.stored.get(program, np.zeros(0, np.int64))
        if kind in "ws":
            self.stored[program] = np.union1d(mine, addresses)
        elif kind == "r" and mine.size:
            addresses = addresses[~np.isin(addresses, mine)]
        return program, kind, operation, addresses, size, values
