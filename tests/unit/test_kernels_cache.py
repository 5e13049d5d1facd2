"""Slots of a pass and moves of the accepted path inside the cache: the Triton kernels do what the references do."""

import pytest
import torch
from comfyui_specar.kernels.cache import keep_path, open_slots
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import compiled, compiled_everywhere, interpreted


@st.composite
def openings(draw):
    """Arguments of open_slots: chains and trees, some of them past the capacity, masks shared by rows or not."""
    rows, capacity = draw(st.integers(1, 3)), draw(st.sampled_from([12, 300]))
    count, uncommitted, reach = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(9, capacity))
    lengths = torch.tensor(draw(st.lists(st.integers(0, capacity), min_size=rows, max_size=rows)))
    generator, tree = torch.Generator().manual_seed(draw(st.integers(0, 99))), None
    if draw(st.booleans()):
        tree = torch.rand((draw(st.sampled_from([1, rows])), count, uncommitted + count), generator=generator) < 0.5
        tree = tree.expand(rows, -1, -1)
    like = torch.zeros(1, dtype=draw(st.sampled_from([torch.float32, torch.float16])))
    slots = torch.full((rows, capacity), -1)
    return slots, lengths, torch.arange(capacity), tree, count, uncommitted, reach, like


@settings(deadline=None, max_examples=30)
@given(openings())
def test_both_open_the_same_slots(given):
    slots, lengths, columns, tree, count, uncommitted, reach, like = given
    found = slots.clone()
    wanted = open_slots(*given)
    mask = interpreted("cache.open_slots", found, *given[1:])
    assert mask.dtype == wanted.dtype == like.dtype and torch.equal(mask, wanted) and torch.equal(found, slots)
    for row, length in enumerate(lengths.tolist()):
        for i in range(count):
            last = len(columns) - 1
            assert slots[row, i] == min(length + uncommitted + i, last)
            chain = [j <= uncommitted + i for j in range(uncommitted + count)]
            seen = [*[True] * length, *(chain if tree is None else tree[row, i].tolist()), *[False] * reach][:reach]
            assert (wanted[row, 0, i] == 0).tolist() == seen
    assert (slots[:, count:] == -1).all()


def test_opening_compiles():
    slots, lengths, like = torch.zeros(2, 1280, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(1)
    for tree in (None, torch.zeros(2, 6, 8, dtype=torch.bool)):
        assert compiled_everywhere("cache.open_slots", slots, lengths, slots[0], tree, 6, 2, 1280, like.bfloat16())


@st.composite
def moves(draw):
    """(buffer, lengths, path): paths of unequal length, filled up with zeros, from slots that overlap the targets."""
    layers, rows, heads, dim = (draw(st.integers(1, most)) for most in (2, 3, 2, 3))
    width, capacity = draw(st.integers(1, 6)), 24
    path = torch.zeros(rows, width, dtype=torch.int64)
    for row in path:
        line = sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=width)))
        row[: len(line)] = torch.tensor(line)
    lengths = torch.tensor(draw(st.lists(st.integers(0, 10), min_size=rows, max_size=rows)))
    size = layers, rows, heads, capacity, 4
    dtype = draw(st.sampled_from([torch.float32, torch.int8]))
    buffer = (torch.arange(torch.Size(size).numel()) % 127).to(dtype).reshape(size)[..., :dim]
    return buffer, lengths, path


@settings(deadline=None, max_examples=15)
@given(moves())
def test_both_move_the_same(move):
    buffer, lengths, path = move
    found, wanted = buffer.clone(), buffer.clone()
    keep_path(wanted, lengths, path)
    interpreted("cache.keep_path", found, lengths, path)
    assert torch.equal(found, wanted)
    for row, (length, line) in enumerate(zip(lengths.tolist(), path.tolist(), strict=True)):
        for i, offset in enumerate(line):
            assert torch.equal(wanted[:, row, :, length + i], buffer[:, row, :, length + max(i, offset)])


@pytest.mark.parametrize("run", [keep_path, lambda *given: interpreted("cache.keep_path", *given)])
def test_what_is_past_the_capacity_disturbs_nobody(run):
    buffer = torch.arange(2 * 8.0).reshape(1, 2, 1, 8, 1)
    before = buffer.clone()
    run(buffer, torch.tensor([2, 7]), torch.tensor([[1, 4, 9], [0, 5, 6]]))
    assert buffer[0, 0, 0, :, 0].tolist() == [0, 1, 3, 6, 7, 5, 6, 7]
    assert torch.equal(buffer[0, 1], before[0, 1])


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (64, torch.int8), (1, torch.bfloat16)])
def test_the_kernel_compiles_and_reads_all_before_it_writes(dim, dtype):
    """Keys and values, those in int8, and the scales of these."""
    for path in (torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)[:, :1]):
        buffer = torch.empty(3, 2, 4, 128, dim, dtype=dtype)
        [kernel] = compiled("cache.keep_path", buffer, torch.zeros(2, dtype=torch.int64), path)
        loads, stores = kernel.ptx.rfind("ld.global"), kernel.ptx.find("st.global")
        assert 0 < loads < kernel.ptx.find("bar.sync", loads) < stores
