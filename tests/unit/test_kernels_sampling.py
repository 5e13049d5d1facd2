"""Sampling from rows: the Triton kernels sample what the torch references sample, and compile."""

import pytest
import torch
from comfyui_specar.kernels import sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import compiled, compiled_everywhere, interpreted


def distributions(seed: int, vocab: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(p, q, u) with all that is extreme: p = q, q of zeros, point masses, masses near nothing, u at both ends."""
    generator = torch.Generator().manual_seed(seed)
    p, q = ((torch.randn((2, count, vocab), generator=generator) * 3).softmax(-1) for _ in range(2))
    p[0, 0] = q[0, 0]
    q[0, 1] = 0
    p[0, 2] = 0
    p[0, 2, vocab // 2] = 1
    p[0, 3] *= 1e-30
    q[0, 3] = 0
    p[1, ::2, ::3] = 0
    u = torch.rand((2, count), generator=generator)
    u[0, 4], u[0, 5], u[1, 0], u[1, 1] = 0, 0, 1 - 2**-10, 1 - 2**-10
    return p, q, u


@pytest.mark.parametrize("vocab", [1, 8, 300, 2500])
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_agree_token_for_token(vocab, seed):
    p, q, u = distributions(seed, vocab)
    assert torch.equal(interpreted("sampling.categorical", p, u), sampling.categorical(p, u))
    assert torch.equal(interpreted("sampling.redraw", p, q, u), sampling.redraw(p, q, u))


@pytest.mark.parametrize("vocab", [1, 8, 300, 5000])
def test_the_largest_after_noise_is_the_same(vocab):
    """Also where probabilities are zero, where two are equal, and where all are NaN: then it is the first."""
    p, _, u = distributions(5, vocab)
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    p[1, 1], noise[1, 1] = 0.25, 0
    p[1, 2], p[1, 3] = torch.nan, 0
    token = sampling.perturbed_argmax(p, noise)
    assert torch.equal(interpreted("sampling.perturbed_argmax", p, noise), token)
    assert token[1, 1:4].tolist() == [0, 0, 0] and token[0, 2] == vocab // 2


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_resampling_samples_from_the_residual(seed, vocab):
    p, q, u = distributions(seed, vocab)
    token = sampling.redraw(p, q, u)
    assert torch.equal(token, sampling.categorical(sampling.residual(p, q), u))
    assert torch.equal(token[0, 1], sampling.categorical(p, u)[0, 1])
    assert (sampling.at(sampling.residual(p, q), token) > 0).all()


def test_what_the_host_does_not_read_changes_nothing(monkeypatch):
    """With values out of sight, as on a GPU, all rows take the long way to the same tokens."""
    p, q, u = distributions(3, 30)
    near = sampling.categorical(p, u), sampling.redraw(p, q, u), sampling.residual(p, q)
    monkeypatch.setattr(sampling, "readable", lambda value: False)
    far = sampling.categorical(p, u), sampling.redraw(p, q, u), sampling.residual(p, q)
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_helpers_agree_whether_the_host_reads_or_not(monkeypatch):
    values, index, mask = torch.rand(1, 5, 4), torch.tensor([3]), torch.tensor([True])
    other = torch.rand(1, 4)

    def results() -> tuple[torch.Tensor, ...]:
        return (
            sampling.row_of(values, index),
            sampling.chosen(mask, values[:, 0], other),
            sampling.chosen(~mask, values[:, 0], other),
        )

    near = results()
    assert sampling.entries(torch.tensor([[False, True], [True, False]])).tolist() == [1, 2]
    monkeypatch.setattr(sampling, "readable", lambda value: False)
    assert all(torch.equal(a, b) for a, b in zip(near, results(), strict=True))
    assert sampling.entries(mask[None]).tolist() == [0] and not sampling.nobody(~mask)


def test_the_kernels_compile():
    p, u = torch.empty(2, 3, 16384), torch.empty(2, 3)
    assert compiled("sampling.categorical", p, u) and compiled("sampling.redraw", p, p, u)
    assert compiled_everywhere("sampling.perturbed_argmax", p, p)
