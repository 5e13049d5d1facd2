"""The gate of a feed-forward network in one launch: the Triton kernel agrees with torch, and compiles."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.kernels.gating import gated
from comfyui_specar.kernels.rotation import factors_of, rotate
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import compiled_everywhere, interpreted

ROUNDING = 2.0**-24  # relative, half an ulp of fp32


@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([1, 7, 64, 1500]), st.integers(0, 999))
def test_gates_agree(shape, width, seed):
    """Both round a sum, a quotient and a product, by half an ulp each. exp is within 1 ulp in torch and within 3 in
    numpy, which interprets the kernel. These are 14 roundings, and nothing cancels."""
    x = 4 * torch.randn((*shape, 2 * width), generator=torch.Generator().manual_seed(seed))
    tiny = torch.finfo(torch.float32).tiny
    assert torch.allclose(gated(x), interpreted("gating.gated", x), rtol=14 * ROUNDING, atol=tiny)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_compiles(dtype):
    kernels = compiled_everywhere("gating.gated", torch.zeros((2, 1, 4096), dtype=dtype))
    assert {kernel.name for kernel in kernels} == {"_gated"}


def test_gradients_flow_through_rotations_and_gates():
    """Training has no cache: the rotation in place and the gate are differentiated.

    A gradient is a rotation of two products. Some 32 roundings lead to it, each by half an ulp of the largest at most.
    """
    generator = torch.Generator().manual_seed(0)
    every, angles = (torch.randn(shape, generator=generator) for shape in ((1, 2, 4, 4), (1, 2, 2)))
    factors = factors_of(angles.cos(), angles.sin(), halves=False)
    every = every.double().requires_grad_()

    def turned(x):
        x = x.clone()
        rotate(x[:, :, :3], factors, halves=False)
        return gated(x.flatten(2))

    assert torch.autograd.gradcheck(turned, every, atol=1e-3, eps=1e-3)
    single = every.detach().float().requires_grad_()  # which is rotated in place, in double there is a copy
    for x in (every, single):
        turned(x).square().sum().backward()
    assert (single.grad - every.grad).abs().max() <= 32 * ROUNDING * every.grad.abs().max()
