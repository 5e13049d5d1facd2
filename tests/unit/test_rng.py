"""Counter-based random numbers: known answers, distribution, and independence of everything but their key."""

import pytest
import torch
from comfyui_specar.samplers.rng import Purpose, Stream, philox

ONES = 0xFFFFFFFF
KNOWN = [  # Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
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


def test_gumbel_noise_has_the_gumbel_law():
    """exp(-exp(-g)) is uniform, and arg-max of log p + g follows p."""
    g = Stream.of(5, 400, "cpu").gumbel(positions(400, 50), 50)
    counts = torch.histc((-(-g).exp()).exp(), 100, 0, 1)
    expected = g.numel() / 100
    assert abs((((counts - expected) ** 2 / expected).sum() - 99) / (2 * 99) ** 0.5) < 4
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = (p.log() + g[..., :4]).argmax(-1).flatten().bincount(minlength=4)
    expected = p * drawn.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 25


def test_gumbel_noise_is_finite_where_the_word_is_largest():
    """Seed 2, position 787, lane 15784 draws one of the largest words, which must not round to u = 1.

    Infinite noise makes log 0 + g NaN, which arg-max prefers to every legal token.
    """
    stream = Stream.of(2, 1, "cpu")
    counter = (torch.tensor([word]) for word in (787, Purpose.TARGET, 0, 15784 // 4))
    words = philox(tuple(counter), tuple(stream.keys.T))
    assert int(words[15784 % 4]) >= 2**32 - 2**8
    assert stream.gumbel(torch.tensor([[787]]), 16384).isfinite().all()


def test_numbers_do_not_depend_on_the_batch():
    batch = Stream.of(2**40 + 3, 6, "cpu")
    for i in range(6):
        alone = Stream.of(2**40 + 3 + i, 1, "cpu")
        at = torch.tensor([[4, 9, 2]])
        for draw in (lambda s, at: s.uniform(at, Purpose.REDRAW, 5), lambda s, at: s.gumbel(at, 10)):
            assert torch.equal(draw(batch, at.expand(6, -1))[i], draw(alone, at)[0])


def test_noise_of_a_position_does_not_depend_on_what_is_asked_beside_it():
    stream = Stream.of(1, 1, "cpu")
    together = stream.gumbel(torch.tensor([[3, 8]]), 10)
    assert torch.equal(together[:, 1:], stream.gumbel(torch.tensor([[8]]), 10))
    assert torch.equal(together, stream.gumbel(torch.tensor([[3, 8]]), 13)[..., :10])


def test_purposes_draws_positions_and_seeds_are_different_streams():
    """No two streams share numbers, and neighbours are uncorrelated."""
    at = positions(1, 4000)
    streams = [Stream.of(seed, 1, "cpu").uniform(at, purpose, draw)[0]
               for seed in (0, 1, 2**32, 2**63) for purpose in Purpose for draw in (0, 1)]
    streams = torch.stack(streams)
    assert len(streams.unique(dim=0)) == len(streams)
    correlation = torch.corrcoef(streams) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / 4000**0.5


def test_seeds_wrap_at_64_bits():
    assert torch.equal(Stream.of(2**64 - 1, 2, "cpu").keys, torch.tensor([[ONES, ONES], [0, 0]]))
