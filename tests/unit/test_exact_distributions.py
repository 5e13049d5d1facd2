"""Do the samplers sample from the model's distribution? Every image of a toy model is enumerated and counted.

Rows of a batch are independent runs (tested bit for bit below), so one large batch is many single runs, and each of
its rows commits at its own pace: it is a ragged batch as well. Variants that are known to be biased must fail the same
test.
"""

from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from comfyui_specar.kernels.sampling import at, categorical
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.engine.run import Run
from comfyui_specar.samplers.methods.jacobi import INITIAL, SJD, draft_of
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rng import Purpose

from ..support.enumerated import LAYOUTS, assert_exact, distance, draw
from ..support.toy import ToyModel, plain, request

RUNS = 16_000
MANY = 80_000  # shows a drift of two percent, SJD++'s, beyond doubt
SHARP = SJD(window=4, initial="uniform")  # the setting in which biased variants show best
LOSSLESS = ("coupled", "gumbel", "threshold_exact", "resample", "equality", "none")


def assert_method_is_exact(method, name, params=None, runs=RUNS):
    assert_exact(draw(method, name, params, batch=runs).tokens, name, params)


@pytest.mark.parametrize("name", LAYOUTS)
def test_next_token_samples_from_the_distribution(name):
    assert_method_is_exact(NextToken(), name)


@pytest.mark.parametrize("initial", INITIAL)
@pytest.mark.parametrize("reuse", LOSSLESS)
def test_lossless_modes_sample_from_the_distribution(reuse, initial):
    """Every refinement with every first guess, and both in every layout."""
    name = ("row", "line_ends", "kept")[(LOSSLESS.index(reuse) + INITIAL.index(initial)) % 3]
    assert_method_is_exact(SJD(window=3, reuse=reuse, initial=initial), name)


@pytest.mark.parametrize("window", [2, 6])
@pytest.mark.parametrize("reuse", LOSSLESS)
def test_every_window_samples_from_the_distribution(reuse, window):
    for name in ("row", "line_ends"):
        assert_method_is_exact(SJD(window=window, reuse=reuse), name)


@pytest.mark.parametrize("method", [NextToken(), *(replace(SHARP, reuse=reuse) for reuse in LOSSLESS)], ids=str)
def test_exact_where_biased_variants_fail(method):
    assert_method_is_exact(method, "plain", runs=MANY)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("line_ends", SamplingParams(cfg=2.5, temperature=1.3, top_p=0.85)),
        ("row", SamplingParams(cfg=1.5, temperature=0.9, top_k=2)),
        ("row", SamplingParams(entropy=(2.5, 0.7, 0.6))),
        ("line_ends", SamplingParams(cfg=1.5, temperature=0.8, top_p=0.9, entropy=(1.5, 1, 0.5))),
    ],
    ids=["top-p", "top-k", "entropy", "all"],
)
@pytest.mark.parametrize("method", [NextToken(), *(SJD(window=3, reuse=reuse) for reuse in LOSSLESS)], ids=str)
def test_guidance_temperatures_and_filters_are_part_of_the_distribution(method, name, params):
    assert_method_is_exact(method, name, params)


# Variants that must fail. Each is the real sampler with one function replaced.


def sticky_refine(self, run, window, tested, p, position, exists):
    """A kept guess keeps the distribution it was sampled from, as if having been kept said nothing about it."""
    draft = draft_of(run, window, position, exists)
    confident = at(p, draft.token) > self.threshold * at(draft.q, draft.token)
    keep = exists & confident
    token = torch.where(keep, draft.token, categorical(p, tested.v))
    return token, torch.where(keep.unsqueeze(-1), draft.q, p)


def stale_coupling(self, run, window, tested, p, position, exists, real=SJD.refine):
    """A draft that the test accepted keeps the distribution it had, as in the published code of MC-SJD
    (tools/benchmarks/results/references.md)."""
    token, q = real(self, run, window, tested, p, position, exists)
    return token, torch.where(tested.accepted.unsqueeze(-1), draft_of(run, window, position, exists).q, q)


def fours(values):
    """Values [B] -> the smallest of every group of four images, repeated."""
    return values.unflatten(0, (-1, 4)).amin(1, keepdim=True).expand(-1, 4).flatten()


def truncated_count(run, accepted, committed, real=Run.count_decided):
    """All four images of a batch commit what the slowest unfinished one commits."""
    count, length = real(run, accepted, committed), run.inputs.layout.length
    busy = committed < length
    return torch.where(busy, fours(torch.where(busy, count, length)), 0).minimum(count)


def truncated_refine(self, run, window, tested, p, position, exists, official):
    """Decided tokens after the cut stay in the window; ``official``: accepted ones with the distribution they had
    before.
    """
    draft = draft_of(run, window, position, exists)
    decided = torch.cat((torch.ones_like(tested.accepted[:, :1]), tested.accepted[:, :-1]), dim=1).long().cumprod(1)
    redrawn = categorical(p, run.inputs.stream.uniform(position, Purpose.DRAFT, window.passes))
    token = torch.where(decided.bool(), tested.token, redrawn)
    stale = decided.bool() & tested.accepted
    return token, torch.where(stale.unsqueeze(-1), draft.q, p) if official else p


@pytest.mark.parametrize(
    ("reuse", "refine", "count"),
    [
        ("threshold_paper", SJD.refine, Run.count_decided),  # SJD++ as printed
        ("threshold_exact", sticky_refine, Run.count_decided),
        ("coupled", stale_coupling, Run.count_decided),
        ("resample", partialmethod(truncated_refine, official=True), truncated_count),
    ],
)
def test_variants_with_stale_distributions_are_biased(reuse, refine, count, monkeypatch):
    monkeypatch.setattr(SJD, "refine", refine)
    monkeypatch.setattr(Run, "count_decided", count)
    found = distance(draw(replace(SHARP, reuse=reuse), "plain", batch=MANY).tokens, "plain")
    assert found.z > 10, found


def test_truncating_a_batch_with_the_new_distributions_is_exact(monkeypatch):
    """The harness of the test above is not what fails: with the right distribution the same truncation is exact."""
    monkeypatch.setattr(Run, "count_decided", truncated_count)
    monkeypatch.setattr(SJD, "refine", partialmethod(truncated_refine, official=False))
    assert_method_is_exact(SHARP, "plain", runs=MANY)


# Identities


@pytest.mark.parametrize("initial", INITIAL)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gumbel_gives_the_next_token_image(name, initial):
    reference = draw(NextToken(), name, seed=3, batch=4000)
    for window in (2, 4):
        decoded = draw(SJD(window=window, reuse="gumbel", initial=initial), name, seed=3, batch=4000)
        assert torch.equal(decoded.tokens, reference.tokens)


@pytest.mark.parametrize("reuse", ["coupled", "gumbel", "resample"])
def test_where_the_prefix_does_not_matter_one_refinement_is_enough(reuse):
    """From its second pass on, a guess was sampled from the very distribution it is tested against: p = q."""
    layout = plain(2, 3)
    model = ToyModel(layout, memory=0)
    trace = SJD(window=6, reuse=reuse).sample(request(model, layout, batch=2000)).trace
    refined = trace.positions["refinements"] > 0
    assert refined.any()
    assert (trace.positions["source"][refined] == 1).all()  # accepted
    assert trace.totals["target_passes"] <= 3  # the prompt, one with fresh guesses, one with refined ones


@pytest.mark.parametrize("reuse", ["threshold_paper", "threshold_exact"])
def test_an_unreachable_threshold_is_resampling(reuse):
    """Nothing is ever kept, so the stream of SJD comes out."""
    for name in LAYOUTS:
        wanted = draw(SJD(window=4, reuse="resample"), name, batch=4000).tokens
        found = draw(SJD(window=4, reuse=reuse, threshold=1e9), name, batch=4000).tokens
        assert torch.equal(found, wanted)


def test_coupling_needs_fewer_passes_than_resampling():
    """Where a token depends on the last one alone, most guesses survive a change of those before them, if kept."""
    layout = plain(2, 5)
    model = ToyModel(layout, sharpness=1, memory=1)
    passes = {}
    for reuse in ("coupled", "resample"):
        trace = SJD(window=10, reuse=reuse, initial="uniform").sample(request(model, layout, batch=4000)).trace
        passes[reuse] = sum(trace.totals["passes_per_image"])
    assert passes["coupled"] < 0.9 * passes["resample"], passes
