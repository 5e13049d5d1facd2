"""Kernels at the sizes of released models: vocabularies of 16,384 and 65,536 ids, windows of 64 tokens.

Probabilities are multiples of 2^-16, so that their sums have no rounding, in whatever order: tokens and decisions must
be equal.
"""

from importlib import import_module

import pytest
import torch
from comfyui_specar.kernels.attention import FEW, additive, attend_few
from comfyui_specar.kernels.graphs import leaves
from comfyui_specar.kernels.rotation import factors_of
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.lantern import Lantern

from ..support.random_trees import random_tree
from ..support.triton_kernels import interpreted

PARTS = 2**16
SIZES = [(16384, 64), (65536, 3)]  # vocabulary, window
# A guided logit is below 200 and rounded three times, by 200 x 3 x 2^-24 < 4e-5, a factor of its probability. Entropies
# are rounded less than a hundred times, and noise as test_kernels_noise says: relative to 1 or more, by 1e-6.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

both = pytest.mark.parametrize(("vocab", "window"), SIZES)


def agrees(function, *given):
    """Do kernel and reference return the same, and write the same into what they are given?"""
    module, name = function.split(".")
    reference = getattr(import_module(f"comfyui_specar.kernels.{module}"), name)
    copies = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in given)
    wanted, found = reference(*copies), interpreted(function, *given)
    for a, b in zip(leaves((found, given)), leaves((wanted, copies)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.allclose(a, b, equal_nan=True, **CLOSE) if a.is_floating_point() else torch.equal(a, b)


def seeded():
    return torch.Generator().manual_seed(0)


def distributions(generator, *shape):
    """Multiples of 2^-16, many of them 0, of which the last dimension sums to 1."""
    *rows, vocab = shape
    drawn = (torch.rand((*rows, PARTS), generator=generator).square() * vocab).long()
    return torch.zeros(shape).scatter_add_(-1, drawn, torch.full(drawn.shape, 1 / PARTS))


def uniforms(generator, *shape):
    """Odd multiples of 2^-17, which are between the sums of probabilities."""
    return (2 * torch.randint(PARTS, shape, generator=generator) + 1) / (2 * PARTS)


@pytest.mark.parametrize(("vocab", "window", "top_k", "top_p"), [(16384, 64, 0, 1.0), (65536, 1, 2000, 0.9)])
def test_probabilities(vocab, window, top_k, top_p):
    logits = torch.randn((2, window, vocab + 2), generator=seeded()) * 3
    agrees("logits.probabilities", logits, None, 3.0, 0.9, vocab, top_k, top_p, ("top_k", "top_p"), None)


@both
def test_samples(vocab, window):
    generator = seeded()
    p, q = (distributions(generator, 1, window, vocab) for _ in range(2))
    p, q, u = p[:, ::8], q[:, ::8], uniforms(generator, 1, window)[:, ::8]  # each row is a program of its own
    agrees("sampling.categorical", p, u)
    agrees("sampling.redraw", p, q, u)
    agrees("sampling.perturbed_argmax", p, torch.randn(p.shape, generator=generator))


@both
def test_windows(vocab, window):
    """Decided, guessed and recorded."""
    generator = seeded()
    p, ring = distributions(generator, 1, window, vocab), distributions(generator, 1, window + 1, vocab)
    position = 40 + torch.arange(window)[None]
    token = ring[0, position % (window + 1)].argmax(-1)
    u, v = uniforms(generator, 1, window), uniforms(generator, 1, window)
    agrees("verification.maximal_coupling", p, ring, position, token, position < 39 + window, u, v)
    agrees("guesses.mean_probs", ring, position[:, :1], position + 1, window + 1)
    table, tokens = torch.zeros(1, 600, 8), torch.zeros(1, 600, dtype=torch.int64)
    values = token, u
    agrees("records.write", table, tokens, position, position > 41, token, p, torch.tensor([5, 1, 2, 3, 0]), values)


@pytest.mark.parametrize("vocab", [16384, 65536])
def test_trees(vocab):
    generator, tree = seeded(), random_tree(0, batch=1, drafts=9, vocab=vocab)
    slots = tree.token.shape[1]
    p, q = (distributions(generator, 1, slots, vocab) for _ in range(2))
    u, v = uniforms(generator, 1, tree.levels, tree.width), uniforms(generator, 1, tree.levels + 1)
    token = q.argmax(-1)
    table = torch.randint(vocab, (vocab, 8), generator=generator).to(torch.int32)
    decided = p, token, tree.children(), q, torch.arange(slots), u, v, torch.ones(1, tree.levels)
    agrees("verification.exact_rejection_sampling", *decided, Exact())
    agrees("verification.relaxed_rejection_sampling", *decided, Lantern(8, 0.4, table=table))
    agrees("verification.sample_and_match_rows", p, token, tree.children(), tree.levels, uniforms(generator, 1, slots))
    agrees("neighbours.aggregate", p, token, torch.full(token.shape, 0.25), table, 8)
    exists, u, v = torch.ones(1, slots, dtype=torch.bool), *(uniforms(generator, 1, n) for n in (slots - 1, slots))
    agrees("verification.block", p, q[:, 1:], token, exists, u, v)


@pytest.mark.parametrize(("count", "dtype", "steps"), [(64, torch.float32, 64), (FEW, torch.float16, 4)])
def test_attention_of_a_window(count, dtype, steps):
    """Of as many tokens as the kernel takes, too, over several parts of a cache. In fp32 a score is the sum of 64
    products, in fp16 weights and results are rounded."""
    generator = seeded()
    qkv = torch.randn((1, count, 4, 64), generator=generator).to(dtype)
    angles = torch.rand((1, count, 32), generator=generator)
    buffer = torch.randn((1, 2, 320, 64), generator=generator).to(dtype)
    where = 150 + torch.arange(count)[None]
    mask = additive(torch.arange(300) <= where[:, None, :, None], dtype)
    arrived = torch.zeros((1, 1, FEW), dtype=torch.int32)
    factors = factors_of(angles.cos(), angles.sin(), True)
    written, rows = buffer.clone(), torch.tensor([[0]])
    wanted = attend_few(qkv, factors, True, None, written, rows, where, mask, arrived)
    found = interpreted("attention.attend_few", qkv, factors, True, None, buffer, rows, where, mask, arrived)
    near = steps * torch.finfo(dtype).eps
    assert (found - wanted).abs().max() <= near and (buffer - written).abs().max() <= near and not arrived.any()


def test_slots_and_random_numbers_of_a_window():
    generator, columns = seeded(), torch.arange(1280)
    tree = torch.rand((2, 64, 64), generator=generator) < 0.5
    slots, lengths = torch.zeros((2, 1280), dtype=torch.int64), torch.tensor([5, 1250])
    for mask in (None, tree):
        agrees("cache.open_slots", slots, lengths, columns, mask, 64, 0, 1280, torch.zeros(()))
    keys = torch.tensor([[2**32 - 1, 7]])
    agrees("noise.uniform", columns[None, :64], keys, (1, 2), 0)
    agrees("noise.gumbel", columns[None, :1], keys, 65536, 0, 0)
