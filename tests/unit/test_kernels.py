"""Small kernels: each Triton kernel, under Triton's interpreter, does what its torch reference does, which does what it
says. Larger ones, and whether they compile, have files of their own."""

import pytest
import torch
from comfyui_specar.kernels import sampling
from comfyui_specar.kernels.attention import FEW, NewTokens
from comfyui_specar.kernels.gating import gated
from comfyui_specar.kernels.rotation import factors_of, rotate
from comfyui_specar.models.networks.cache import keep_path
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.rng import Purpose, Stream
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.lantern import Lantern
from comfyui_specar.samplers.trace import POSITION_FIELDS, Record, Source, store
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.random_trees import random_tree
from ..support.triton_kernels import agrees

ROUNDING = 2.0**-24  # relative, half an ulp of fp32
BITS = {"rtol": 0, "atol": 0}  # equal to the last one


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The cache


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


@settings(max_examples=12)
@given(moves())
def test_moves_of_the_accepted_path(move):
    buffer, lengths, path = move
    before = buffer.clone()
    keep_path(*move)
    for row, (length, line) in enumerate(zip(lengths.tolist(), path.tolist(), strict=True)):
        for i, offset in enumerate(line):
            assert torch.equal(buffer[:, row, :, length + i], before[:, row, :, length + max(i, offset)])


def test_what_is_past_the_capacity_disturbs_nobody():
    buffer = torch.arange(2 * 8.0).reshape(1, 2, 1, 8, 1)
    before = buffer.clone()
    keep_path(buffer, torch.tensor([2, 7]), torch.tensor([[1, 4, 9], [0, 5, 6]]))
    assert buffer[0, 0, 0, :, 0].tolist() == [0, 1, 3, 6, 7, 5, 6, 7]
    assert torch.equal(buffer[0, 1], before[0, 1])


# Gates and rotations


@settings(max_examples=8)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([1, 7, 64, 1500]), st.integers(0, 999))
def test_gates(shape, width, seed):
    """Both round a sum, a quotient and a product, by half an ulp each. exp is within 1 ulp in torch and within 3 in
    numpy, which interprets the kernel. These are 14 roundings, and nothing cancels."""
    x = 4 * torch.randn((*shape, 2 * width), generator=seeded(seed))
    agrees("gating.gated", x, rtol=14 * ROUNDING, atol=torch.finfo(torch.float32).tiny)


def test_gradients_flow_through_rotations_and_gates():
    """Training has no cache: the rotation in place and the gate are differentiated.

    A gradient is a rotation of two products. Some 32 roundings lead to it, each by half an ulp of the largest at most.
    """
    generator = seeded()
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


# Random numbers

# Both start from the same fractions. log, cos and sin are within 4 ulp in numpy, which interprets the kernels, and
# within 1 in torch; a product, quotient or root is rounded by half an ulp. In such roundings, two inner logarithms of
# Gumbel noise differ by 16 relative ones at most, which are absolute ones after the outer logarithm, and that adds 10
# relative ones. Two radii of normal numbers differ by 8, two cosines by 10, so two products by 18 |x|, which is at most
# 16 |x| + 16 for |x| < 8.
NOISE = {"rtol": 16 * ROUNDING, "atol": 16 * ROUNDING}


@st.composite
def draws(draw):
    """(positions [B, T], keys [B, 2], draw) with draws of every shape that samplers use."""
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    words = st.integers(0, 2**32 - 1)

    def words_of(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(words, min_size=size, max_size=size))).reshape(shape)

    shape = draw(st.sampled_from([(batch, count), (batch, 1), (1, count), (count,), ()]))
    repeats = draw(st.sampled_from([0, 1, 7, 2**20])) if draw(st.booleans()) else words_of(*shape)
    return words_of(batch, count), words_of(batch, 2), repeats


@settings(max_examples=12)
@given(draws(), st.lists(st.sampled_from([int(p) for p in Purpose]), min_size=1, max_size=3), st.integers(1, 14))
def test_random_numbers(drawn, purposes, count):
    """Uniform ones to the last bit."""
    positions, keys, draw = drawn
    assert agrees("noise.uniform", positions, keys, tuple(purposes), draw, **BITS).shape[1:] == positions.shape
    for name in ("gumbel", "normal"):
        found = agrees(f"noise.{name}", positions, keys, count, 3, draw, **NOISE)
        assert found.shape == (*positions.shape, count)


def test_gumbel_noise_at_its_ends():
    """16384 numbers, among them the smallest and the largest that there are (see test_rng)."""
    keys = Stream.of(2, 1, "cpu").keys
    assert agrees("noise.gumbel", torch.tensor([[787]]), keys, 16384, 0, 0, **NOISE).isfinite().all()


def test_several_purposes_at_once_give_the_numbers_of_one_by_one():
    stream, positions, turn = Stream.of(7, 2, "cpu"), torch.arange(5).expand(2, -1), torch.tensor([[3], [900]])
    accept, redraw = stream.uniforms(positions, (Purpose.ACCEPT, Purpose.REDRAW), turn)
    assert torch.equal(accept, stream.uniform(positions, Purpose.ACCEPT, turn))
    assert torch.equal(redraw, stream.uniform(positions, Purpose.REDRAW, turn))


# The record


@pytest.mark.parametrize(
    ("vocab", "token", "probs"), [(5, True, True), (2500, True, True), (5, True, False), (5, False, False)]
)
def test_what_is_decided_is_written_down_and_nothing_else(vocab, token, probs):
    """Tokens of images of 9 places, some of which are not meant or are past the end; a distribution has zeros."""
    generator, places, count = seeded(vocab), 9, 4
    table = torch.rand((2, places + 1, len(POSITION_FIELDS)), generator=generator)
    tokens = torch.randint(0, vocab, (2, places + 1), generator=generator)
    table[:, -1], tokens[:, -1] = 0, 0
    position = torch.tensor([[3], [7]]) + torch.arange(count)
    meant = (position < places) & (torch.arange(count) != 1)
    p = (3 * torch.randn((2, count + 2, vocab), generator=generator)).softmax(-1)[:, :count]
    p[:, 0] = torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab)
    values = (
        torch.tensor([[5]]).expand(2, count),
        torch.randint(0, 7, (2, count), generator=generator),
        torch.rand((2, count), generator=generator),
    )
    columns = torch.tensor([0, 2, 4, 3, 7, 8][: 3 + 3 * probs])
    before, sampled = table.clone(), p.argmax(-1) if token else None
    store(table, tokens, position, meant, sampled, p if probs else None, columns, values)
    assert not table[:, -1].any() and not tokens[:, -1].any()
    written = torch.zeros(2, places + 1, dtype=torch.bool).scatter(1, torch.where(meant, position, places), True)
    written[:, -1] = False
    assert torch.equal((table != before).any(-1), written)
    others = [field for field in range(len(POSITION_FIELDS)) if field not in columns.tolist()]
    assert torch.equal(table[..., others], before[..., others])


def test_a_record_is_written_by_name():
    record, layout = Record.empty(3, 1, torch.device("cpu")), TokenLayout.plain(1, 3)
    record.begin(torch.tensor([[2, 0, 0, 0]]), torch.tensor([1]), layout)
    p = torch.tensor([[[0.5, 0.25, 0.25], [1, 0, 0]]])
    record.write(
        torch.tensor([[1, 2]]),
        torch.tensor([[True, False]]),
        torch.tensor([[1, 0]]),
        p,
        ratio=torch.tensor([[2.0, 3.0]]),
        source=Source.ACCEPTED,
        q=0.125,
        depth=torch.tensor([1, 2]),
    )
    found = dict(zip(record.fields, record.positions[0].T.tolist(), strict=True))
    assert record.image.tolist() == [[2, 1, 0]]
    assert found["source"] == [Source.FORCED, Source.ACCEPTED, 0, 0] and found["depth"] == [0, 1, 0, 0]
    assert found["p"] == [1, 0.25, 0, 0] and found["top1"] == [1, 0.5, 0, 0]
    assert found["entropy"] == pytest.approx([0, 1.5 * torch.tensor(2.0).log().item(), 0, 0])
    assert found["ratio"] == [0, 2, 0, 0] and found["q"] == [0, 0.125, 0, 0]
    record.begin(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0]), layout)
    assert not record.positions.any() and not record.tokens.any()


# Samples from rows


def extreme(seed: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(p, q, u) with all that is extreme: p = q, q of zeros, point masses, masses near nothing, u at both ends."""
    generator = seeded(seed)
    p, q = ((torch.randn((2, 6, vocab), generator=generator) * 3).softmax(-1) for _ in range(2))
    p[0, 0] = q[0, 0]
    q[0, 1] = 0
    p[0, 2] = 0
    p[0, 2, vocab // 2] = 1
    p[0, 3] *= 1e-30
    q[0, 3] = 0
    p[1, ::2, ::3] = 0
    u = torch.rand((2, 6), generator=generator)
    u[0, 4], u[0, 5], u[1, 0], u[1, 1] = 0, 0, 1 - 2**-10, 1 - 2**-10
    return p, q, u


@pytest.mark.parametrize("vocab", [1, 8, 300, 2500])
def test_samples(vocab):
    for seed in (0, 1):
        p, q, u = extreme(seed, vocab)
        agrees("sampling.categorical", p, u)
        agrees("sampling.redraw", p, q, u)


@pytest.mark.parametrize("vocab", [1, 8, 300, 5000])
def test_the_largest_after_noise(vocab):
    """Also where probabilities are zero, where two are equal, and where all are NaN: then it is the first."""
    p, _, u = extreme(5, vocab)
    noise = torch.randn(p.shape, generator=seeded(1))
    p[1, 1], noise[1, 1] = 0.25, 0
    p[1, 2], p[1, 3] = torch.nan, 0
    token = agrees("sampling.perturbed_argmax", p, noise)
    assert token[1, 1:4].tolist() == [0, 0, 0] and token[0, 2] == vocab // 2


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_resampling_samples_from_the_residual(seed, vocab):
    p, q, u = extreme(seed, vocab)
    token = sampling.redraw(p, q, u)
    assert torch.equal(token, sampling.categorical(sampling.residual(p, q), u))
    assert torch.equal(token[0, 1], sampling.categorical(p, u)[0, 1])
    assert (sampling.at(sampling.residual(p, q), token) > 0).all()


def test_what_the_host_does_not_read_changes_nothing(monkeypatch):
    """With values out of sight, as on a GPU, all rows take the long way to the same tokens."""
    p, q, u = extreme(3, 30)
    values, index, mask = torch.rand(1, 5, 4), torch.tensor([3]), torch.tensor([True])

    def results() -> tuple[torch.Tensor, ...]:
        return (
            sampling.categorical(p, u),
            sampling.redraw(p, q, u),
            sampling.residual(p, q),
            sampling.row_of(values, index),
            sampling.rows_where(mask, values[:, 0], values[:, 1]),
            sampling.rows_where(~mask, values[:, 0], values[:, 1]),
        )

    near = results()
    assert sampling.indices_of(torch.tensor([[False, True], [True, False]])).tolist() == [1, 2]
    monkeypatch.setattr(sampling, "may_read", lambda value: False)
    assert all(torch.equal(a, b) for a, b in zip(near, results(), strict=True))
    assert sampling.indices_of(mask[None]).tolist() == [0] and not sampling.nobody(~mask)


# At the sizes of released models: vocabularies of 16,384 and 65,536 ids, windows of 64 tokens. Probabilities are
# multiples of 2^-16, so that their sums have no rounding, in whatever order: tokens and decisions must be equal.

PARTS = 2**16
# A guided logit is below 200 and rounded three times, by 200 x 3 x 2^-24 < 4e-5, a factor of its probability. Entropies
# are rounded less than a hundred times, and noise as above: relative to 1 or more, by 1e-6.
LARGE = {"rtol": 1e-4, "atol": 1e-6}


def distributions(generator, *shape):
    """Multiples of 2^-16, many of them 0, of which the last dimension sums to 1."""
    *rows, vocab = shape
    drawn = (torch.rand((*rows, PARTS), generator=generator).square() * vocab).long()
    return torch.zeros(shape).scatter_add_(-1, drawn, torch.full(drawn.shape, 1 / PARTS))


def uniforms(generator, *shape):
    """Odd multiples of 2^-17, which are between the sums of probabilities."""
    return (2 * torch.randint(PARTS, shape, generator=generator) + 1) / (2 * PARTS)


@pytest.mark.parametrize(("vocab", "window", "top_k", "top_p"), [(16384, 64, 0, 1.0), (65536, 1, 2000, 0.9)])
def test_probabilities_of_released_sizes(vocab, window, top_k, top_p):
    logits = torch.randn((2, window, vocab + 2), generator=seeded()) * 3
    agrees("logits.probabilities", logits, None, 3.0, 0.9, vocab, top_k, top_p, ("top_k", "top_p"), None, **LARGE)


@pytest.mark.parametrize(("vocab", "window"), [(16384, 64), pytest.param(65536, 3, marks=pytest.mark.whole)])
def test_windows_of_released_sizes(vocab, window):
    generator = seeded()
    p, ring = distributions(generator, 1, window, vocab), distributions(generator, 1, window + 1, vocab)
    u, v = uniforms(generator, 1, window), uniforms(generator, 1, window)
    few, others, number = p[:, ::8], ring[:, :-1:8], u[:, ::8]  # each row is a program of its own
    agrees("sampling.categorical", few, number)
    agrees("sampling.redraw", few, others, number)
    agrees("sampling.perturbed_argmax", few, torch.randn(few.shape, generator=generator))
    position = 40 + torch.arange(window)[None]
    token = ring[0, position % (window + 1)].argmax(-1)
    agrees("verification.maximal_coupling", p, ring, position, token, position < 39 + window, u, v, **LARGE)


@pytest.mark.parametrize("vocab", [16384, pytest.param(65536, marks=pytest.mark.whole)])
def test_trees_of_released_sizes(vocab):
    generator, tree = seeded(), random_tree(0, batch=1, drafts=9, vocab=vocab)
    slots = tree.token.shape[1]
    p, q = (distributions(generator, 1, slots, vocab) for _ in range(2))
    u, v = uniforms(generator, 1, tree.levels, tree.width), uniforms(generator, 1, tree.levels + 1)
    token = q.argmax(-1)
    table = torch.randint(vocab, (vocab, 8), generator=generator).to(torch.int32)
    decided = p, token, tree.children(), q, torch.arange(slots), u, v, torch.ones(1, tree.levels)
    drawn = uniforms(generator, 1, slots)
    agrees("verification.rejection_sampling", *decided, Exact(), **LARGE)
    agrees("verification.rejection_sampling", *decided, Lantern(8, 0.4, table=table), **LARGE)
    agrees("verification.sample_and_match_rows", p, token, tree.children(), tree.levels, drawn, **LARGE)


@pytest.mark.parametrize(("count", "dtype", "steps"), [(64, torch.float32, 64), (FEW, torch.float16, 4)])
def test_attention_of_a_window(count, dtype, steps):
    """Of as many tokens as the kernel takes, too, over several parts of a cache. In fp32 a score is the sum of 64
    products, in fp16 weights and results are rounded."""
    generator = seeded()
    qkv = torch.randn((1, count, 4, 64), generator=generator).to(dtype)
    angles = torch.rand((1, count, 32), generator=generator)
    buffer = torch.randn((1, 2, 320, 64), generator=generator).to(dtype)
    new = NewTokens(torch.tensor([150]), None, count, 0, 320, 320, dtype)
    factors, near = factors_of(angles.cos(), angles.sin(), True), steps * torch.finfo(dtype).eps
    agrees("attention.attend_few", qkv, factors, True, None, buffer, None, new, rtol=0, atol=near)
