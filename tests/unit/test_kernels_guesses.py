"""First guesses: the Triton kernel agrees with the torch reference, to the last bit, and compiles."""

import pytest
import torch
from comfyui_specar.kernels import guesses as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import compiled, interpreted


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.integers(0, 40), st.integers(0, 99))
def test_the_distributions_are_those_of_the_reference(batch, count, stride, known, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch, max(stride, count) + count, 11, generator=generator)
    last = known + torch.randint(0, 5, (batch, 1), generator=generator)
    position = last + 1 + torch.arange(count)
    case = rows, last, position, stride
    assert torch.equal(interpreted("guesses.mean_probs", *case), reference.mean_probs(*case))


@pytest.mark.parametrize("vocab", [4096, 16384, 184622])
def test_the_kernel_compiles(vocab):
    last = torch.zeros(2, 1, dtype=torch.int64)
    [kernel] = compiled("guesses.mean_probs", torch.empty(2, 64, vocab), last, last + torch.arange(1, 33), 32)
    assert kernel.name == "_mean_probs"


def test_neighbours():
    """On rows of four, after position 5: x x x x / x x . . / . . . ."""
    position = torch.arange(6, 12)[None]
    left, above = reference.neighbours_of(torch.tensor([[5]]), position, 4)
    assert left.tolist() == [[5, 5, 4, 5, 2, 3]] and above.tolist() == [[2, 3, 4, 5, 2, 3]]
    left, above = reference.neighbours_of(torch.tensor([[1]]), position[:, :2] - 4, 4)
    assert left.tolist() == [[1, 1]] and above.tolist() == [[1, 1]], "the first row has none above"
