"""Rotating, storing and gating in one launch each: the Triton twins agree with torch, and compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels.gating import gated
from comfyui_specar.kernels.rotation import factors_of, rotate, rotate_and_keep
from hypothesis import given, settings
from hypothesis import strategies as st

from .twins import compiled_everywhere, interpreted


def case(rows, count, heads, kept, dim, halves, common=False, dtype=torch.float32, seed=0, norms=0):
    """Arguments of rotate_and_keep, the projection being part of a longer row; common: one rotation for all rows;
    norms: 0 (none), 1 (shared by all heads) or 2 (one for each)."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn((rows, count, 1 + heads + 2 * kept, dim), generator=generator).to(dtype)[:, :, 1:]
    angles = 6 * torch.rand((1 if common else rows, count, dim // 2), generator=generator)
    buffer = torch.zeros((3, rows, 2 * kept, count + 5, dim), dtype=dtype)[1]
    slots = torch.stack([torch.randperm(count + 5, generator=generator)[:count] for _ in range(rows)])
    sizes = [(1 if norms == 1 else n, dim) for n in (heads, heads, kept, kept)]
    each = tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes) if norms else None
    factors = factors_of(angles.cos(), angles.sin(), halves)
    return every, factors, halves, each, buffer, torch.arange(rows)[:, None], slots


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from([2, 8, 12, 64]),
       st.booleans(), st.booleans(), st.integers(0, 999), st.integers(0, 2))
def test_rotations_agree(rows, count, shared, kept, dim, halves, common, seed, norms):
    ours, theirs = (case(rows, count, shared * kept, kept, dim, halves, common, seed=seed, norms=norms)
                    for _ in range(2))
    rotate_and_keep(*ours)
    interpreted("rotation.rotate_and_keep", *theirs)
    assert ours[4].abs().sum() > 0
    for a, b in zip(ours[:5:4], theirs[:5:4], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_rotated_and_what_is_stored(halves):
    """Queries and keys turn by the angles, values do not; keys and values lie where the slots say, and nowhere else."""
    every, factors, _, _, buffer, rows, slots = given = case(2, 3, 4, 2, 8, halves, dtype=torch.bfloat16)
    before, turned = every.clone(), every[:, :, :6].clone()
    rotate(turned, factors, halves)
    rotate_and_keep(*given)
    assert torch.equal(every[:, :, :6], turned) and torch.equal(every[:, :, 6:], before[:, :, 6:])
    lengths = before[:, :, :6].float().norm(dim=-1)
    assert not torch.equal(turned, before[:, :, :6]) and torch.allclose(turned.float().norm(dim=-1), lengths, rtol=0.01)
    for row in range(2):
        assert torch.equal(buffer[row, :, slots[row]].transpose(0, 1), every[row, :, 4:])
    assert int(buffer.any(-1).any(1).sum()) == 6


@pytest.mark.parametrize("norms", [1, 2])
def test_heads_are_normalised_before_they_turn(norms):
    every, factors, halves, given, *rest = case(2, 3, 4, 2, 8, True, norms=norms)
    before = every.clone()
    rotate_and_keep(every, factors, halves, given, *rest)
    assert torch.equal(every[:, :, 6:], before[:, :, 6:]), "values are not"
    for heads, (weight, bias) in ((slice(0, 4), given[:2]), (slice(4, 6), given[2:])):
        wanted = F.layer_norm(before[:, :, heads], (8,), eps=1e-5) * weight + bias
        rotate(wanted, factors, halves)
        assert torch.equal(every[:, :, heads], wanted)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([1, 7, 64, 1500]), st.integers(0, 999))
def test_gates_agree(shape, width, seed):
    x = 4 * torch.randn((*shape, 2 * width), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(gated(x), interpreted("gating.gated", x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compile(dtype):
    for halves, norms in ((False, 0), (True, 0), (True, 1)):
        given = case(2, 3, 4, 2, 64, halves, dtype=dtype, norms=norms)
        kernels = compiled_everywhere("rotation.rotate_and_keep", *given)
        assert {kernel.name for kernel in kernels} == {"_rotate_and_keep"}
    kernels = compiled_everywhere("rotation.rotate_and_keep", *case(1, 1, 20, 20, 64, False, True, dtype))
    kernels += compiled_everywhere("gating.gated", torch.zeros((2, 1, 4096), dtype=dtype))
    assert {kernel.name for kernel in kernels} == {"_rotate_and_keep", "_gated"}


def test_gradients_flow_through_both():
    """Training has no cache: the rotation in place and the gate are differentiated."""
    every, factors, halves, *_ = case(1, 2, 2, 1, 4, False)
    every = every.double().requires_grad_()

    def turned(x):
        x = x.clone()
        rotate(x[:, :, :3], factors, halves)
        return gated(x.flatten(2))

    assert torch.autograd.gradcheck(turned, every, atol=1e-3, eps=1e-3)
    single = every.detach().float().requires_grad_()  # which is rotated in place, in double there is a copy
    for x in (every, single):
        turned(x).square().sum().backward()
    assert torch.allclose(single.grad, every.grad.float(), atol=1e-5)
