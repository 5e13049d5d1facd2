"""Logits to probabilities: guidance, forced tokens, temperature, top-k, top-p."""

import math

import pytest
import torch
from comfyui_specar.kernels import sampling
from comfyui_specar.kernels.sampling import categorical, entropy, point_mass, redraw, residual
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.probabilities import DeviceParams, sampling_probs
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.closeness import fp64
from ..support.toy import next_token_probs

FREE = torch.tensor([[-1]])
PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05])


def probs(logits, vocab=None, forced=FREE, **params):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return sampling_probs(logits[None, None], SamplingParams(**params), vocab or len(logits), forced)[0, 0]


def close(found, wanted):
    return torch.allclose(found, torch.as_tensor(wanted, dtype=torch.float32), atol=1e-6)


@fp64()
@settings(max_examples=100)
@given(
    st.integers(0, 10**6),
    st.integers(2, 12),
    st.sampled_from([1.0, 1.5, 3.0]),
    st.floats(0.1, 3),
    st.integers(0, 12),
    st.floats(0.01, 1),
    st.sampled_from([None, None, (2.5, 3.0, 0.6), (0.0, 1.0, 1.2)]),
)
def test_any_row_becomes_the_distribution_that_was_written_independently(
    seed, count, cfg, temperature, top_k, top_p, entropy
):
    """Guidance, temperature, top-k and top-p; an entropy temperature comes after the filters. Log-probabilities in the
    place of logits make no difference."""
    rows = 2 * torch.randn(2, 1, count, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(cfg, temperature, min(top_k, count), top_p, entropy=entropy)
    wanted = torch.tensor(next_token_probs(*rows[:, 0].tolist(), count, params))
    rows = rows if params.guided else rows[:1]
    for logits in (rows, rows.log_softmax(-1)):
        found = sampling_probs(logits, params, count, None)[0, 0]
        assert torch.equal(found > 0, wanted > 0) and torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_top_p_keeps_or_drops_equal_logits_together():
    ties = torch.tensor([0.4, 0.2, 0.2, 0.2])
    assert close(probs(ties.log(), top_p=0.45), ties)  # 0.4 are larger than each of the three
    assert close(probs(ties.log(), top_p=0.35), [1, 0, 0, 0])
    assert close(probs([1.0, 1.0, 1.0], top_p=1e-6), [1 / 3] * 3)


@pytest.mark.parametrize("seed", range(5))
def test_top_p_keeps_what_the_larger_ones_reach_exactly(seed):
    """A mass of exactly top_p before a token does not exclude it; the next smaller number does."""
    row = torch.randn(6, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
    weights = row[None, None].softmax(-1)
    larger = float((weights.cumsum(-1) - weights)[..., 3])
    less = float(torch.tensor(larger).nextafter(torch.tensor(0.0)))
    for top_p, kept in ((larger, 4), (less, 3)):
        assert int((probs(row, top_p=top_p) > 0).sum()) == kept


def test_the_order_of_the_filters_matters():
    """Top-k first leaves (.625, .375), of which top-p .6 keeps one; top-p first keeps two, and so does top-k."""
    assert close(probs(PROBS.log(), top_k=2, top_p=0.6, order=("top_k", "top_p")), [1, 0, 0, 0])
    assert close(probs(PROBS.log(), top_k=2, top_p=0.6, order=("top_p", "top_k")), [0.625, 0.375, 0, 0])


def test_an_entropy_temperature_of_one_changes_no_bit_and_greedy_decoding_and_forced_tokens_ignore_it():
    rows = 3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for row in rows:
        for params in ({}, {"top_k": 9}, {"top_p": 0.8}):
            assert torch.equal(probs(row, entropy=(0, 3, 1), **params), probs(row, **params))
        assert torch.equal(probs(row, temperature=0, entropy=(2.5, 3, 0.6)), probs(row, temperature=0))
        forced = torch.tensor([[7]])
        assert torch.equal(probs(row, forced=forced, entropy=(2.5, 3, 0.6)), probs(row, forced=forced))


def test_temperature_zero_is_the_first_largest():
    assert torch.equal(probs([0.0, 3.0, 3.0, 1.0], temperature=0, top_k=3), torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_forced_positions_are_point_masses_and_specials_are_otherwise_out_of_reach():
    logits = torch.tensor([0.0, 1.0, 9.0, 9.0])
    assert close(probs(logits, vocab=2), [*torch.tensor([0.0, 1.0]).softmax(0), 0, 0])
    assert torch.equal(probs(logits, vocab=2, temperature=0), torch.tensor([0.0, 1.0, 0.0, 0.0]))
    for forced in (0, 3):
        for params in ({}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.1}):
            found = probs(logits, vocab=2, forced=torch.tensor([[forced]]), **params)
            assert torch.equal(found, point_mass(torch.tensor(forced), 4))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"cfg": 0.5}, "cfg.*0.5.* 1"),
        ({"top_k": 33}, "top_k.*33.* 0.* to 32"),
        ({"top_p": 0}, "top_p.* 0.*above 0"),
        ({"entropy": (-1, 3, 0.6)}, "T0.*-1.* 0"),
        ({"entropy": (math.inf, 3, 0.6)}, "T0.*inf"),
        ({"entropy": (2.5, 0, 0.6)}, "alpha.* 0.*above 0"),
        ({"entropy": (2.5, 3, 0)}, "theta.* 0.*at least 1e-06"),
    ],
)
def test_illegal_parameters_are_named(params, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**params).check(32)


# The kernels below the processors


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 1e-7, 0.1, 0.3, 2.0]), min_size=1, max_size=9).filter(any), st.integers(0, 2**24 - 1)
)
def test_categorical_inverts_the_cumulative_sum(weights, word):
    u = word / 2**24
    drawn = int(categorical(torch.tensor([weights]), torch.tensor([u])))
    assert weights[drawn] > 0
    total = sum(weights)
    assert sum(weights[:drawn]) <= u * total + 1e-5 and u * total <= sum(weights[: drawn + 1]) + 1e-5


def test_categorical_never_returns_an_entry_a_wavering_sum_points_at(monkeypatch):
    """A parallel sum may step up at an entry of weight zero; here it is made to."""
    weights = torch.tensor([[0.4, 0.0, 0.6]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: torch.tensor([[0.4, 0.75, 1.0]]))
    for read in (True, False):
        monkeypatch.setattr(sampling, "may_read", lambda value, read=read: read)
        assert int(categorical(weights, torch.tensor([0.6]))) == 2
        assert int(redraw(weights, torch.zeros(1, 3), torch.tensor([0.6]))) == 2
        assert int(categorical(weights, torch.tensor([0.3]))) == 0


def test_categorical_never_returns_an_index_past_the_end():
    """A sum whose last entry is not the largest, and NaN, whose comparisons are false."""
    for row in ([torch.nan] * 3, [0.0, 0.0, 0.0], [0.5, torch.nan, 0.5]):
        assert 0 <= int(categorical(torch.tensor([row]), torch.tensor([0.9]))) <= 2


def test_residual_falls_back_to_p_where_nothing_is_left():
    p = torch.tensor([PROBS.tolist(), PROBS.tolist()])
    q = torch.tensor([[0.2, 0.2, 0.3, 0.3], PROBS.tolist()])
    assert torch.allclose(residual(p, q)[0], torch.tensor([0.3, 0.1, 0, 0]))
    assert torch.equal(residual(p, q)[1], PROBS)


def test_entropy_in_nats():
    assert close(entropy(torch.full((1, 8), 1 / 8)), [math.log(8)])
    assert close(entropy(torch.tensor([[0.0, 1.0]])), [0.0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(cfg=3.0),
        SamplingParams(temperature=0),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.6),
        SamplingParams(cfg=2.0, temperature=0.7, top_k=3, top_p=0.8, order=("top_p", "top_k")),
        SamplingParams(temperature=0.8, entropy=(0.5, 2.0, 0.6)),
    ],
    ids=str,
)
def test_parameters_on_the_device_give_the_distribution_of_those_in_the_call(params):
    rows = torch.randn(2 if params.guided else 1, 4, 5, generator=torch.Generator().manual_seed(2))
    with fp64():
        on_device = DeviceParams.of(params, rows.device, None)
        other = DeviceParams.of(SamplingParams(cfg=9.0, temperature=3.0), rows.device, None).numbers
        for these in (on_device, DeviceParams.of(params, rows.device, other)):
            found, wanted = (sampling_probs(rows, each, 5, None) for each in (these, params))
            assert torch.equal(found > 0, wanted > 0) and torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert on_device.guided == params.guided and (on_device.temperature > 0) == (params.temperature > 0)
