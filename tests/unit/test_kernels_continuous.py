"""Gaussians: the Triton kernels compute the ratios and samples of the torch references, and compile."""

import pytest
import torch
from comfyui_specar.kernels import continuous

from ..support.triton_kernels import compiled, interpreted


def gaussian(generator: torch.Generator, *shape: int) -> continuous.Gaussian:
    mean, log_std = (torch.randn(shape, generator=generator) for _ in range(2))
    return mean, log_std * 0.4, 40 * torch.randn(shape[:-1], generator=generator)


@pytest.mark.parametrize(
    ("shape", "kappa", "sign"), [((1, 1), 1.0, 0.0), ((3, 15, 16), 42.0, 1.0), ((2, 3, 5), 1.0, -1.0)]
)
def test_ratios_agree(shape, kappa, sign):
    generator = torch.Generator().manual_seed(len(shape))
    p, q, x = gaussian(generator, *shape), gaussian(generator, *shape), torch.randn(shape, generator=generator)
    q = q[0], q[1][..., :1].expand(shape), q[2]  # one width for all numbers of a token
    wanted = continuous.log_ratio(x, p, q, kappa, sign)
    assert torch.allclose(interpreted("continuous.log_ratio", x, p, q, kappa, sign), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tries", "batch", "channels"), [(100, 3, 16), (1, 2, 1), (40, 4, 3)])
def test_the_same_proposals_are_accepted(tries, batch, channels):
    """In the memory layout that samplers have; one pair of Gaussians is equal, so that nothing is ever accepted."""
    generator = torch.Generator().manual_seed(tries)
    p = gaussian(generator, batch, 1, channels)
    q = p[0] + 0.3 * torch.randn(p[0].shape, generator=generator), p[1], p[2]
    q[0][0] = p[0][0]
    normal = torch.randn((batch, tries, channels), generator=generator).movedim(1, 0).unsqueeze(2)
    accept = torch.rand((batch, tries), generator=generator).movedim(1, 0).unsqueeze(2)
    y, number = continuous.redraw(normal, accept, p, q, 0.0)
    kernel_y, kernel_number = interpreted("continuous.redraw", normal, accept, p, q, 0.0)
    assert torch.equal(kernel_number, number) and torch.allclose(kernel_y, y, atol=1e-5)
    assert number[0, 0] == -tries and (tries == 1 or (number[1:] > 0).all())


def test_the_kernels_compile():
    normal = torch.empty(4, 8, 16), torch.empty(4, 8, 16), torch.empty(4, 8)
    assert compiled("continuous.log_ratio", normal[0], normal, normal, 42.0, 1.0)
    normal = tuple(part[:, :1] for part in normal)
    assert compiled("continuous.redraw", torch.empty(100, 4, 1, 16), torch.empty(100, 4, 1), normal, normal, 0.0)
