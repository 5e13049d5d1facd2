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
def _total(x, parts, arrived, out, COUNTED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums a block, and one sums the blocks."""
    part, count = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + part, tl.sum(tl.load(x + part * BLOCK + tl.arange(0, BLOCK))))
    number = part
    if COUNTED:
        number = tl.atomic_add(arrived, 1, sem="acq_rel")
    if number == LAST:
        i = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(parts + i, i < count, 0.0)))


@triton.jit
def _same(out, VALUE_OF_PROGRAM: tl.constexpr):
    """Every program stores to one place, and reads it."""
    tl.store(out, tl.program_id(0) * VALUE_OF_PROGRAM)
    tl.store(out + 1 + tl.program_id(0), tl.load(out))


def copied(size, masked):
    x, out = torch.arange(float(size)), torch.zeros(size)
    _copy[(triton.cdiv(size, BLOCK),)](x, out, size, MASKED=masked, BLOCK=BLOCK)
    return out


def total(counted, last):
    """Of four blocks."""
    out = torch.zeros(1)
    arrived, parts = torch.zeros(1, dtype=torch.int32), torch.zeros(4)
    _total[(4,)](torch.ones(4 * BLOCK), parts, arrived, out, COUNTED=counted, LAST=last, BLOCK=BLOCK)
    return out.item()


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


def test_programs_that_do_not_wait_for_each_other_are_found():
    """The sum is right in the order in which ttsem runs programs, also without the counter."""
    assert executed(lambda: total(True, 3)) == 4 * BLOCK
    for counted, last in ((False, 3), (True, 2), (True, 0)):
        with pytest.raises(KernelFault, match="program instances"):
            executed(lambda: total(counted, last))


def test_programs_may_read_what_they_and_others_store_alike():
    assert executed(lambda: same(0)) == [0] * 5
    with pytest.raises(KernelFault, match="program instances"):
        executed(lambda: same(1))


def test_memory_that_nobody_wrote_is_not_zero():
    assert executed(lambda: torch.empty(3, device="cuda")).isnan().all()
