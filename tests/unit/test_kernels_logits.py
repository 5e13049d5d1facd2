"""Logits to probabilities: the Triton kernel agrees with the torch reference, and that with a definition."""

import itertools
import math

import pytest
import torch
from comfyui_specar.kernels import logits as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import interpreted

K_FIRST, P_FIRST = ("top_k", "top_p"), ("top_p", "top_k")
# Logits of passes() are smaller than 18, so a guided and heated one is smaller than (18 + 7 x 36) / 0.7 < 400. It is
# rounded three times (guided: product and sum, and the quotient), by half an ulp: 3 x 400 x 2^-24 < 1e-4, and a
# probability is off by that factor. What is smaller than the smallest normal number, some processors take for zero.
CLOSE = {"rtol": 1e-4, "atol": torch.finfo(torch.float32).tiny}
# An entropy below ln 70 = 4.3 is a sum of 70 terms: off by 70 x 4.3 x 2^-24 < 2e-5, and so is the temperature, relative
# to its least, 0.6, by 3e-5. exp(-88) is the smallest normal number, so a probability is off by 88 x 2 x 3e-5 at most.
CLOSE_BY_ENTROPY = CLOSE | {"rtol": 1e-4 / 0.6 + 88 * 2 * 3e-5}


@st.composite
def passes(draw):
    """Arguments of probabilities(): few distinct logits (ties) or many, some of them -inf, in any layout."""
    batch, steps, vocab = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(2, 70))
    total = vocab + draw(st.sampled_from([0, 0, 1, 5]))
    cfg = draw(st.sampled_from([1, 1.0, 3.5, 7]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = 4 * torch.randn(batch if cfg == 1 else 2 * batch, steps + 1, total, generator=generator)
    if draw(st.booleans()):
        logits = logits.round()
    if cfg == 1 and draw(st.booleans()):
        logits[..., 1:][torch.rand(logits[..., 1:].shape, generator=generator) < 0.4] = -math.inf
    if draw(st.booleans()):
        logits = logits.bfloat16()
    forced = None
    if draw(st.booleans()):
        forced = torch.randint(-1, total, (batch, steps + 2), generator=generator)[:, 1:-1]
        forced = forced.where(torch.rand(forced.shape, generator=generator) < 0.5, -1)
    temperature = draw(st.sampled_from([0, 1, 1.0, 0.7, 2.5]))
    top_k = draw(st.sampled_from([0, 1, 2, vocab // 2, vocab]))
    top_p = draw(st.sampled_from([1, 1.0, 1e-6, 0.3, 0.9, 0.999]))
    order, entropy = draw(st.sampled_from([K_FIRST, P_FIRST])), draw(st.sampled_from([None, (2.5, 3, 0.6), (0, 1, 1)]))
    return logits[:, 1:], forced, cfg, temperature, vocab, top_k, top_p, order, entropy


def on_the_edge(given: tuple) -> bool:
    """Is a logit so near to the limit of top-p that round-off decides about it?"""
    if given[6] == 1 or given[3] == 0:
        return False
    found = []
    for shift in (-1e-5, 1e-5):
        top_p = min(max(given[6] + shift, 1e-7), 0.999999)
        found.append(reference.probabilities(*given[:6], top_p, *given[7:]) > 0)
    return not torch.equal(*found)


def on_the_device(given: tuple) -> tuple:
    """The same arguments with their numbers in a tensor, and in their place others that switch the same things off."""
    logits, forced, cfg, temperature, vocab, top_k, top_p, order, entropy = given
    numbers = torch.tensor([cfg, temperature or 1.0, top_k, top_p, *(entropy or (0, 1, 1))])
    on = 1 + (cfg != 1), 2.0 * (temperature > 0), vocab, min(top_k, 2), min(top_p, 1)
    return logits, forced, *on, order, entropy and (1.0, 1.0, 1.0), numbers


def assert_same(found, wanted, given):
    """The same tokens are possible, with the same probabilities."""
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert torch.equal(found > 0, wanted > 0)
    close = CLOSE_BY_ENTROPY if given[-1] else CLOSE
    assert torch.allclose(found, wanted, equal_nan=True, **close)


@settings(deadline=None, max_examples=25)
@given(passes())
def test_kernel_and_reference_agree_also_with_numbers_on_the_device(given):
    wanted, there = reference.probabilities(*given), on_the_device(given)
    found, read = (interpreted("logits.probabilities", *each) for each in (given, there))
    assert torch.equal(read.nan_to_num(2), found.nan_to_num(2))
    if not on_the_edge(given):
        assert_same(found, wanted, given)
        assert_same(reference.probabilities(*there), wanted, given)


@pytest.mark.parametrize("order", [K_FIRST, P_FIRST])
@pytest.mark.parametrize(
    ("length", "temperature", "top_k", "top_p", "entropy"),
    [
        *((600, 0.9, *limits, None) for limits in ((100, 1), (0, 0.9), (100, 0.8), (580, 0.01))),
        *((8200, 0, 0, 1, entropy) for entropy in (None, (2.5, 3, 0.6))),
        *((8200, 1, 0, 1, entropy) for entropy in (None, (2.5, 3, 0.6))),
        *((8200, 0.9, 2000, top_p, entropy) for top_p in (1, 0.8) for entropy in (None, (2.5, 3, 0.6))),
    ],
)
def test_long_rows_agree(length, temperature, top_k, top_p, entropy, order):
    """Also those that are longer than a block."""
    logits = 3 * torch.randn(2, 2, length, generator=torch.Generator().manual_seed(3))
    if length > 8192:
        logits[0, 0, 8194] = logits[1, 0, 8194] = 40  # the largest, in the last block
        logits[0, 1, 8195] = math.nan
    given = logits, None, 5.0 if length == 600 else 3.0, temperature, length - 2, top_k, top_p, order, entropy
    assert not on_the_edge(given)
    assert_same(interpreted("logits.probabilities", *given), reference.probabilities(*given), given)


def brute(row: list[float], top_k: int, top_p: float, order: tuple[str, str]) -> list[bool]:
    """What the filters keep, as their definition says."""
    kept = [True] * len(row)
    for name in order:
        if name == "top_k" and top_k:
            kept = [
                k and sum(y > x for y, left in zip(row, kept, strict=True) if left) < top_k
                for x, k in zip(row, kept, strict=True)
            ]
        elif name == "top_p" and top_p < 1:
            mass = sum(math.exp(y) for y, left in zip(row, kept, strict=True) if left)
            kept = [
                k and sum(math.exp(y) for y, left in zip(row, kept, strict=True) if left and y > x) <= top_p * mass
                for x, k in zip(row, kept, strict=True)
            ]
    return kept


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=8),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.37, 0.61, 0.93, 1]),
    st.sampled_from([K_FIRST, P_FIRST]),
)
def test_the_reference_keeps_what_the_definition_says(row, top_k, top_p, order):
    top_k = min(top_k, len(row))
    p = reference.probabilities(torch.tensor([[row]]), None, 1, 1, len(row), top_k, top_p, order)[0, 0]
    assert (p > 0).tolist() == brute(row, top_k, top_p, order)


def test_logits_are_left_as_they_were():
    logits = torch.randn(1, 2, 8)
    before = logits.clone()
    for cfg, temperature, top_k, top_p in itertools.product((1, 2), (0, 1, 2), (0, 3), (0.5, 1)):
        given = logits.expand(2, -1, -1).contiguous() if cfg != 1 else logits
        reference.probabilities(given, torch.tensor([[3, -1]]), cfg, temperature, 8, top_k, top_p, K_FIRST)
        assert torch.equal(given[:1], before)


def test_tokens_may_be_forced_in_any_block():
    forced = torch.tensor([[7, 8199, -1]])
    found = interpreted("logits.probabilities", torch.zeros(1, 3, 8200), forced, 1, 1, 8198, 0, 1, K_FIRST)
    assert found[0, :2].argmax(-1).tolist() == [7, 8199] and found[0, :2].sum() == 2
    assert torch.allclose(found[0, 2, :8198], torch.tensor(1 / 8198)) and not found[0, 2, 8198:].any()
