"""Settling: guesses that hardly change are accepted without a test; images drift no further than the trace tells.

As in test_exact_distributions, every image of a toy model is enumerated, and one large batch is many single runs.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels.sampling import at
from comfyui_specar.reports.run_report import judgement
from comfyui_specar.samplers.methods import settling
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.trace import Source

from ..support.closeness import fp64
from ..support.enumerated import LAYOUTS, distance, draw
from ..support.models import teacher_forced
from ..support.tiny import caption_features
from ..support.toy import ToyModel, plain, request

RUNS = 16_000
MANY = 160_000  # chance explains little then
EXACT = SJD(window=5, initial="uniform")
SETTLING = replace(EXACT, settle=0.3)
METHODS = [*(replace(EXACT, settle=most) for most in (0.1, 0.3, 1.0)), replace(EXACT, settle=0.3, rule=TVMetered(0.1))]


@cache
def many(method, name="row", runs=RUNS):
    """That many images, sampled once for all tests."""
    return draw(method, name, batch=runs)


def drift(decoded, name="row"):
    """How far the images are from the model's distribution (z, tv), the drift bound, and what chance explains."""
    bounds, runs = decoded.trace.positions["drift_bound"].sum(-1), len(decoded.tokens)
    chance = distance(many(EXACT, name, runs).tokens, name).tv + 4 * float(bounds.std()) / runs**0.5
    return distance(decoded.tokens, name), float(bounds.mean()), chance


CASES = [  # every method and every layout in the short run, all of each with each in the whole
    pytest.param(method, name, marks=[pytest.mark.whole] * ((m + n) % 3 > 0))
    for m, method in enumerate(METHODS)
    for n, name in enumerate(("row", "line_ends", "kept"))
]


@pytest.mark.parametrize(("method", "name"), CASES, ids=str)
def test_images_drift_no_further_than_the_recorded_drift_bound(method, name):
    found, bound, chance = drift(many(method, name), name)
    assert bound > 0.002 and found.tv <= bound + chance, (found, bound, chance)
    trace, exact = many(method, name).trace, many(replace(method, settle=0.0), name).trace
    assert sum(trace.totals["passes_per_image"]) <= sum(exact.totals["passes_per_image"])
    assert trace.settings["lossless"] is False and (trace.positions["source"] == Source.RELAXED).any()
    forced = LAYOUTS[name][0].forced.expand(RUNS, -1)
    assert torch.equal(many(method, name).tokens[forced >= 0], forced[forced >= 0])
    assert not trace.positions["drift_bound"][forced >= 0].any()


def test_settling_does_drift():
    """The bound above is not met by doing nothing: the exact test, which SJD passes, fails."""
    assert drift(many(replace(EXACT, settle=1.0)))[0].z > 20 and drift(many(EXACT))[0].z < 4


def test_the_more_settles_the_fewer_passes_and_the_more_drift():
    traces = [many(replace(EXACT, settle=most)).trace for most in (0.0, 0.1, 0.3, 1.0)]
    passes = [sum(trace.totals["passes_per_image"]) for trace in traces]
    bounds = [trace.drift_bound for trace in traces]
    assert passes == sorted(passes, reverse=True) and len(set(passes)) == 4
    assert bounds == sorted(bounds) and len(set(bounds)) == 4


def test_many_images_drift_no_further_than_the_bound():
    found, bound, chance = drift(many(SETTLING, "kept", MANY), "kept")
    assert found.tv <= bound + chance


@pytest.mark.whole
def test_settling_by_the_guess_itself_breaks_the_bound(monkeypatch):
    """What settles must not depend on the guess: it would no longer be a sample from q. Here only the last id does."""

    def by_the_guess(*given, real=SJD.decide):
        window = real(*given)
        return replace(window, settled_count=window.settled_count.minimum((window.guess == 2).long().cumprod(1).sum(1)))

    many(EXACT, "kept", MANY)  # which ``drift`` compares with
    monkeypatch.setattr(SJD, "decide", by_the_guess)
    found, bound, chance = drift(draw(SETTLING, "kept", batch=MANY), "kept")
    assert found.tv > 1.2 * (bound + chance), (found, bound, chance)


@pytest.mark.parametrize("method", [m for m in METHODS if m.rule == EXACT.rule], ids=str)
def test_as_many_tokens_are_relaxed_as_the_drift_bounds_sum_up_to(method):
    """The chance that the exact rule rejects a sample from q is the total variation of p and q."""
    positions = many(method).trace.positions
    difference = (positions["source"] == Source.RELAXED).sum(-1).float() - positions["drift_bound"].sum(-1)
    assert abs(difference.mean()) < 4 * difference.std() / RUNS**0.5


def test_strength_zero_is_exact_and_strength_is_per_position():
    method = replace(EXACT, settle=1.0)
    none = draw(method, "row", batch=1000, strength=torch.zeros(1, 6))
    assert torch.equal(none.tokens, many(EXACT).tokens[:1000]) and not none.trace.positions["drift_bound"].any()
    positions = draw(method, "row", batch=RUNS, strength=torch.tensor([[1.0, 1, 1, 0, 1, 1]])).trace.positions
    assert not positions["drift_bound"][:, 3].any() and positions["drift_bound"][:, 2].any()


def test_where_the_prefix_does_not_matter_settling_is_exact():
    """There a refined guess is a sample from the very p of the next pass."""
    layout, most = plain(2, 3), 1e-6  # what rounding moves settles, too, or not: both are exact
    asked = request(ToyModel(layout, memory=0), layout, batch=2000)
    found = replace(EXACT, settle=most).sample(asked)
    assert torch.equal(found.tokens, EXACT.sample(asked).tokens)
    assert (found.trace.positions["drift_bound"] < most).all()


def test_guesses_settle_one_after_the_other():
    exists = torch.tensor([[True, True, True, True, False]]).expand(4, -1)
    distance = torch.tensor(
        [[0.9, 0.9, 0.1, 0.0, 0.0], [0.9, 0.1, 0.2, 0.1, 0.1], [0.9, 0.3, 0.1, 0.1, 0.1], [0.9, 0.9, 0.9, 0.9, 0.9]]
    )
    count = torch.tensor([2, 1, 1, 5])
    assert settling.count_settled(distance, torch.tensor(0.2), exists, count).tolist() == [2, 1, 0, 0]


def test_the_trace_tells_of_settling():
    trace, exact = (draw(replace(EXACT, settle=most), "row", batch=4).trace for most in (0.05, 0.0))
    assert trace.settings["settle"] == 0.05 and judgement(trace.settings) == "exact but for settling below 0.05"
    assert "settle" not in exact.settings and judgement(exact.settings) == "exact"


def test_the_cache_holds_what_was_accepted(text_model):
    """Every token's probability is that of one forward pass over the whole image, also past settled tokens."""
    prompt = text_model.encode_features(caption_features())
    with fp64():
        out = api.sample(text_model, prompt, SJD(5, settle=0.5), cfg=1.0, top_k=0, batch_size=3)
        wanted = at(teacher_forced(text_model, prompt, out.tokens).softmax(-1), out.tokens.flatten(1))
    assert out.trace.positions["drift_bound"].any()
    torch.testing.assert_close(out.trace.positions["p"], wanted)
