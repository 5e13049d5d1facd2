"""What tools/ttsem.sh must find, on kernels that are broken, and what it must let pass."""

import pytest
import torch
import triton
import triton.language as tl
from ttsem.sanitize import KernelFault

from ..support.execution import executed

BLOCK = 16


@triton.jit
def _copy(x, out, size, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (i < size) if MASKED else (i >= 0)
    tl.store(out + i, tl.load(x + i, there), there)


@triton.jit
def _same(out, VALUE_OF_PROGRAM: tl.constexpr):
    """Every program stores to one place, and to one of its own."""
    tl.store(out, tl.program_id(0) * VALUE_OF_PROGRAM)
    tl.store(out + 1 + tl.program_id(0), 0)


def copied(size, masked):
    x, out = torch.arange(float(size)), torch.zeros(size)
    _copy[(triton.cdiv(size, BLOCK),)](x, out, size, MASKED=masked, BLOCK=BLOCK)
    return out


def same(value_of_program):
    out = torch.zeros(5, dtype=torch.int32)
    _same[(4,)](out, VALUE_OF_PROGRAM=value_of_program)
    return out.tolist()


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1])
def test_an_index_out_of_range_is_found(size):
    """Whatever memory follows the tensor."""
    assert executed(lambda: copied(size, True)).tolist() == list(range(size))
    if size == BLOCK:
        executed(lambda: copied(size, False))
    else:
        with pytest.raises(KernelFault, match="past the end"):
            executed(lambda: copied(size, False))


def test_programs_that_store_to_one_place_are_found():
    """Unless they store the same."""
    assert executed(lambda: same(0)) == [0] * 5
    with pytest.raises(KernelFault, match="program instances"):
        executed(lambda: same(1))


def test_memory_that_nobody_wrote_is_not_zero():
    assert executed(lambda: torch.empty(3, device="cuda")).isnan().all()
