"""Rotating, storing and gating in one launch each: the Triton twins agree with torch, and compile."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.kernels.gating import gated
from comfyui_specar.kernels.rotation import factors_of, rotate, rotate_and_keep
from hypothesis import given, settings
from hypothesis import strategies as st

from .twins import compiled, interpreted


def case(rows, count, heads, kept, dim, halves, common=False, dtype=torch.float32, seed=0):
    """Arguments of rotate_and_keep, the projection being part of a longer row; common: one rotation for all rows."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn((rows, count, 1 + heads + 2 * kept, dim), generator=generator).to(dtype)[:, :, 1:]
    angles = 6 * torch.rand((1 if common else rows, count, dim // 2), generator=generator)
    buffer = torch.zeros((3, rows, 2 * kept, count + 5, dim), dtype=dtype)[1]
    slots = torch.stack([torch.randperm(count + 5, generator=generator)[:count] for _ in range(rows)])
    return every, factors_of(angles.cos(), angles.sin(), halves), halves, buffer, torch.arange(rows)[:, None], slots


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.sampled_from([2, 8, 12, 64]),
       st.booleans(), st.booleans(), st.integers(0, 999))
def test_rotations_agree(rows, count, shared, kept, dim, halves, common, seed):
    ours, theirs = (case(rows, count, shared * kept, kept, dim, halves, common, seed=seed) for _ in range(2))
    rotate_and_keep(*ours)
    interpreted("rotation.rotate_and_keep", *theirs)
    assert ours[3].abs().sum() > 0
    for a, b in zip(ours[:4:3], theirs[:4:3], strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_rotated_and_what_is_stored(halves):
    """Queries and keys turn by the angles, values do not; keys and values lie where the slots say, and nowhere else."""
    every, factors, _, buffer, rows, slots = given = case(2, 3, 4, 2, 8, halves, dtype=torch.bfloat16)
    before, turned = every.clone(), every[:, :, :6].clone()
    rotate(turned, factors, halves)
    rotate_and_keep(*given)
    assert torch.equal(every[:, :, :6], turned) and torch.equal(every[:, :, 6:], before[:, :, 6:])
    lengths = before[:, :, :6].float().norm(dim=-1)
    assert not torch.equal(turned, before[:, :, :6]) and torch.allclose(turned.float().norm(dim=-1), lengths, rtol=0.01)
    for row in range(2):
        assert torch.equal(buffer[row, :, slots[row]].transpose(0, 1), every[row, :, 4:])
    assert int(buffer.any(-1).any(1).sum()) == 6


@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([1, 7, 64, 1500]), st.integers(0, 999))
def test_gates_agree(shape, width, seed):
    x = 4 * torch.randn((*shape, 2 * width), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(gated(x), interpreted("gating.gated", x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compile(dtype):
    for halves in (False, True):
        kernels = compiled("rotation.rotate_and_keep", *case(2, 3, 4, 2, 64, halves, dtype=dtype))
        assert [kernel.name for kernel in kernels] == ["_rotate_and_keep"]
    kernels = compiled("rotation.rotate_and_keep", *case(1, 1, 20, 20, 64, False, True, dtype))
    kernels += compiled("gating.gated", torch.zeros((2, 1, 4096), dtype=dtype))
    assert [kernel.name for kernel in kernels] == ["_rotate_and_keep", "_gated"]


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
