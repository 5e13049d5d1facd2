"""Random numbers: the Triton kernels draw the numbers of the torch reference, and compile."""

import pytest
import torch
from comfyui_specar.kernels import noise
from comfyui_specar.samplers.rng import Purpose, Stream
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import compiled, interpreted

# Both start from the same fractions. log, cos and sin are within 4 ulp in numpy, which interprets the kernels, and
# within 1 in torch; a product, quotient or root is rounded by half an ulp. In such roundings, two inner logarithms of
# Gumbel noise differ by 16 relative ones at most, which are absolute ones after the outer logarithm, and that adds 10
# relative ones. Two radii of normal numbers differ by 8, two cosines by 10, so two products by 18 |x|, which is at most
# 16 |x| + 16 for |x| < 8.
CLOSE = {"rtol": 16 * 2.0**-24, "atol": 16 * 2.0**-24}


@st.composite
def requests(draw):
    """(positions [B, T], keys [B, 2], draw) with draws of every shape that samplers use."""
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    words = st.integers(0, 2**32 - 1)

    def words_of(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(words, min_size=size, max_size=size))).reshape(shape)

    shape = draw(st.sampled_from([(batch, count), (batch, 1), (1, count), (count,), ()]))
    repeats = draw(st.sampled_from([0, 1, 7, 2**20])) if draw(st.booleans()) else words_of(*shape)
    return words_of(batch, count), words_of(batch, 2), repeats


@settings(deadline=None, max_examples=15)
@given(requests(), st.lists(st.sampled_from([int(p) for p in Purpose]), min_size=1, max_size=3))
def test_uniform_numbers_agree_bit_for_bit(request_, purposes):
    positions, keys, draw = request_
    wanted = noise.uniform(positions, keys, tuple(purposes), draw)
    assert wanted.shape == (len(purposes), *positions.shape)
    assert torch.equal(interpreted("noise.uniform", positions, keys, tuple(purposes), draw), wanted)


@pytest.mark.parametrize("name", ["gumbel", "normal"])
@settings(deadline=None, max_examples=8)
@given(requests(), st.integers(1, 14))
def test_vectors_agree(name, request_, count):
    positions, keys, draw = request_
    wanted = getattr(noise, name)(positions, keys, count, 3, draw)
    found = interpreted(f"noise.{name}", positions, keys, count, 3, draw)
    assert found.shape == wanted.shape == (*positions.shape, count)
    assert torch.allclose(found, wanted, **CLOSE)


def test_gumbel_noise_agrees_at_its_ends():
    """16384 numbers, among them the smallest and the largest that there are (see test_rng)."""
    given = torch.tensor([[787]]), Stream.of(2, 1, "cpu").keys, 16384, 0, 0
    wanted, found = noise.gumbel(*given), interpreted("noise.gumbel", *given)
    assert found.isfinite().all() and torch.allclose(found, wanted, **CLOSE)


def test_several_purposes_at_once_give_the_numbers_of_one_by_one():
    stream, positions = Stream.of(7, 2, "cpu"), torch.arange(5).expand(2, -1)
    turn = torch.tensor([[3], [900]])
    accept, redraw = stream.uniforms(positions, (Purpose.ACCEPT, Purpose.REDRAW), turn)
    assert torch.equal(accept, stream.uniform(positions, Purpose.ACCEPT, turn))
    assert torch.equal(redraw, stream.uniform(positions, Purpose.REDRAW, turn))


def test_the_kernels_compile_and_keep_the_digits_of_logarithms():
    positions, keys = torch.zeros(2, 33, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    for draw in (0, 1, torch.zeros(2, 1, dtype=torch.int64)):
        [kernel] = compiled("noise.uniform", positions, keys, (1, 2), draw)
        assert "mul.hi.u32" in kernel.ptx
    for name in ("gumbel", "normal"):
        [kernel] = compiled(f"noise.{name}", positions, keys, 16384, 9, torch.zeros(2, 1, dtype=torch.int64))
        assert "lg2.approx" not in kernel.ptx
