"""Triton kernels executed on the CPU from what Triton's compiler makes of them, by the package ttsem (see
tools/ttsem.sh). It finds accesses out of bounds, reads of memory that nobody wrote, and races between the programs of
a launch: programs that touch the same bytes, of which one writes them.

Barriers between the threads of one program are not modelled: tests of the machine code look for these.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")
HERE = find_spec("ttsem") is not None


def executed(launch: Callable[[], T]) -> T:
    """The result of a function that launches kernels on CPU tensors. KernelFault names the line of a wrong access."""
    from ttsem import sanitize

    with sanitize.session() as found:
        result = launch()
    assert not found.races_unchecked, "a launch has too many accesses for a search for races"
    return result
