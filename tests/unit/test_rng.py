"""Counter-based random numbers: known answers, distribution, and independence of everything but their key."""

import itertools

import pytest
import torch
from comfyui_specar.kernels import noise
from comfyui_specar.kernels.noise import philox
from comfyui_specar.samplers.rng import Purpose, Stream

from ..support.toy_heads import correlation, ks, normal_cdf

ONES = 0xFFFFFFFF
KNOWN = [  # Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_words(counter, key, wanted):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in words) == wanted


def positions(batch: int, count: int) -> torch.Tensor:
    return torch.arange(count).expand(batch, -1)


def test_uniform_numbers_are_uniform():
    """1000 cells, 2 million numbers, over seeds as much as over positions."""
    u = Stream.of(11, 1000, "cpu").uniform(positions(1000, 2000), Purpose.ACCEPT)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 1000, 0, 1)
    z = (((counts - 2000) ** 2 / 2000).sum() - 999) / (2 * 999) ** 0.5
    assert abs(z) < 4
    assert abs(float(u.std(0).mean()) - 12**-0.5) < 1e-3 and abs(float(u.std(1).mean()) - 12**-0.5) < 1e-3


def test_gumbel_noise_has_the_gumbel_distribution():
    """exp(-exp(-g)) is uniform, and arg-max of log p + g follows p."""
    g = Stream.of(5, 400, "cpu").gumbel(positions(400, 50), 50)
    counts = torch.histc((-(-g).exp()).exp(), 100, 0, 1)
    expected = g.numel() / 100
    assert abs((((counts - expected) ** 2 / expected).sum() - 99) / (2 * 99) ** 0.5) < 4
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = (p.log() + g[..., :4]).argmax(-1).flatten().bincount(minlength=4)
    expected = p * drawn.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 25


@pytest.mark.parametrize("word", [0, 1, ONES // 2, ONES - 256, ONES - 128, ONES - 127, ONES - 1, ONES])
def test_gumbel_noise_of_extreme_words_is_finite(word, monkeypatch):
    """In fp32, the 128 largest words are 2^32."""
    monkeypatch.setattr(noise, "philox", lambda counter, key: [torch.tensor([[[word]]])] * 4)
    found = Stream.of(0, 1, "cpu").gumbel(torch.zeros(1, 1, dtype=torch.int64), 4)
    v = torch.tensor((word + 0.5) / 2**32, dtype=torch.float64).clamp(2**-33, 1 - 2**-24)
    assert found.isfinite().all() and torch.allclose(found.double(), -(-(-v).log1p()).log(), rtol=1e-2)


def test_normal_numbers_are_normal():
    """Moments, Kolmogorov's test over all lanes and lane by lane, and no correlation between lanes."""
    z = Stream.of(3, 200, "cpu").normal(positions(200, 200), 6, Purpose.NOISE).double()
    n = z.numel()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 4 * (spread / n) ** 0.5
    u = normal_cdf(z).flatten(0, 1)
    assert ks(u.flatten()) < 2.3 and max(map(ks, u.unbind(1))) < 2.3
    assert correlation(u) < 5
    assert ks(normal_cdf(1.03 * z.flatten())) > 3 and ks(normal_cdf(z.flatten() + 0.02)) > 3  # what the test can see


def test_normal_numbers_of_purposes_draws_and_positions_are_independent():
    stream, at = Stream.of(9, 1, "cpu"), positions(1, 20_000)
    columns = [
        stream.normal(at, 2, Purpose.NOISE)[0],
        stream.normal(at + 1, 2, Purpose.NOISE)[0],
        stream.normal(at, 2, Purpose.DRAFT_NOISE)[0],
        stream.normal(at, 2, Purpose.NOISE, 1)[0],
        stream.normal(at, 2, Purpose.REDRAW, 3)[0],
        Stream.of(10, 1, "cpu").normal(at, 2, Purpose.NOISE)[0],
    ]
    assert correlation(normal_cdf(torch.cat(columns, dim=1))) < 5


@pytest.mark.parametrize("word", [0, 1, 2**31, ONES - 1, ONES])
@pytest.mark.parametrize("other", [0, 2**30, ONES])
def test_normal_numbers_of_extreme_words_are_finite(word, other, monkeypatch):
    def constant(counter, key):
        return tuple(torch.full_like(counter[0], w) for w in (word, other, other, word))

    monkeypatch.setattr(noise, "philox", constant)
    z = Stream.of(0, 1, "cpu").normal(positions(1, 2), 4, Purpose.NOISE)
    assert z.isfinite().all() and z.abs().max() < 7


def test_numbers_do_not_depend_on_the_batch():
    batch = Stream.of(2**40 + 3, 6, "cpu")
    for i in range(6):
        alone = Stream.of(2**40 + 3 + i, 1, "cpu")
        at = torch.tensor([[4, 9, 2]])
        for draw in (
            lambda s, at: s.uniform(at, Purpose.REDRAW, 5),
            lambda s, at: s.gumbel(at, 10),
            lambda s, at: s.normal(at, 7, Purpose.NOISE, torch.tensor([3, 0, 8])),
        ):
            assert torch.equal(draw(batch, at.expand(6, -1))[i], draw(alone, at)[0])


def test_purposes_draws_positions_and_seeds_are_different_streams():
    """No two streams share numbers, and neighbours are uncorrelated."""
    at = positions(1, 4000)
    keys = itertools.product((0, 1, 2**32, 2**63), Purpose, (0, 1))
    streams = torch.stack([Stream.of(seed, 1, "cpu").uniform(at, *which)[0] for seed, *which in keys])
    assert len(streams.unique(dim=0)) == len(streams)
    correlation = torch.corrcoef(streams) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / 4000**0.5


def test_the_numbers_of_purposes_stay():
    """They are part of the counter: with others, a seed gives another image; with two the same, streams depend."""
    names = "TARGET ACCEPT REDRAW INITIAL DRAFT SKIP SHAPE ORDER NOISE DRAFT_NOISE".split()
    found = {name: int(purpose) for name, purpose in Purpose.__members__.items()}
    assert found == {name: number for number, name in enumerate(names)}


def test_seeds_wrap_at_64_bits():
    assert torch.equal(Stream.of(2**64 - 1, 2, "cpu").keys, torch.tensor([[ONES, ONES], [0, 0]]))
