"""Does speculative decoding of vectors sample from the target's distribution?

The toys' distributions are known in closed form whatever the order: every number of an image, put through its
distribution function given those before it, must be uniform and independent of the others (Rosenblatt, 1952). Rows of a
batch are independent runs. Variants that are known to be biased must fail the same test by far.
"""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.samplers.methods import continuous
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.trace import Source

from ..support.toy_heads import ToyHead, ToyMixture, ToySchedule, ks_two, request, score

RUNS = 6_000
TRIES = 20  # a fifth of the proposals, to save time: the residual of these pairs hardly ever needs more
CFG = 1.5

OTHER = {"widths": (0.4, 0.35, 0.5), "slopes": (0.75, 0.62, 0.65)}
TARGETS = {("head", c): ToyHead(c) for c in (1, 2)} | {("mixture", c): ToyMixture(c) for c in (1, 2)}
DRAFTERS = {("head", c): ToyHead(c, noise=0.4, **OTHER) for c in (1, 2)}
DRAFTERS |= {("mixture", c): ToyMixture(c, noise=0.4) for c in (1, 2)}
PAIRS = sorted(TARGETS)


@pytest.fixture(autouse=True)
def few_tries(monkeypatch):
    monkeypatch.setattr(continuous, "TRIES", TRIES)
    monkeypatch.setattr(continuous, "EXACT_TRIES", 1)


def draw(pair, seed=0, batch=RUNS, options=None, **method):
    method = {"mode": "exact", "prefill": 0.25, "length": 3} | method
    return ContinuousSpeculative(DRAFTERS[pair], **method).sample(
        request(TARGETS[pair], batch, seed, **{"cfg": CFG} | (options or {}))
    )


def judge(pair, last=True, **method):
    return score(TARGETS[pair], draw(pair, **method), CFG, last=last)


def assert_exact(found):
    assert found.worst < 1, found


def assert_biased(found):
    assert found.worst > 1.5, found


@pytest.mark.parametrize("pair", PAIRS)
def test_the_plain_sampler_samples_from_the_distribution(pair):
    """Without the noise of the last step, as published; a mixture has none to leave out."""
    decoded = ContinuousNextToken().sample(request(TARGETS[pair], RUNS, cfg=CFG))
    assert_exact(score(TARGETS[pair], decoded, CFG, last=False))


@pytest.mark.parametrize("pair", PAIRS)
def test_exact_mode_samples_from_the_distribution_of_the_target(pair):
    decoded = draw(pair)
    summary = decoded.trace.summary()
    assert 0.2 < summary["acceptance_rate"] < 0.8
    assert summary["failed_resamples"] < 0.005 * summary["tokens"]
    assert_exact(score(TARGETS[pair], decoded, CFG))


@pytest.mark.parametrize(("length", "prefill"), [(1, 0), (2, 0.5), (8, 0)])
def test_exact_mode_at_any_draft_length_and_prefill(length, prefill):
    assert_exact(judge(("head", 1), seed=10**6, length=length, prefill=prefill))


def test_exact_mode_without_shared_noise():
    assert_exact(judge(("head", 2), aligned=False))


def test_exact_mode_at_other_temperatures_and_without_guidance():
    decoded = draw(("head", 1), options={"cfg": 1.0, "temperature": 0.8})
    assert_exact(score(TARGETS["head", 1], decoded, temperature=0.8))


def test_exact_mode_around_kept_tokens():
    """Each image keeps one token; the others follow their distribution given it."""
    keep = torch.tensor([False, True, False, False])
    kept = torch.linspace(-2, 2, RUNS)[:, None, None].expand(-1, 4, 1)
    decoded = draw(("head", 1), options={"tokens": kept, "kept": keep.expand(RUNS, -1)}, prefill=0)
    assert torch.equal(decoded.tokens[:, 1], kept[:, 1])
    assert_exact(score(TARGETS["head", 1], decoded, CFG, free=~keep))


def test_exact_mode_of_a_head_with_bent_steps():
    """Widths and steps that depend on x, as learned ones do: no closed form, so against the target alone."""
    target = ToyHead(2, bend=0.4)
    drafter = ToyHead(2, bend=0.3, noise=0.3, **OTHER)
    wanted = ContinuousSpeculative(drafter, prefill=1, mode="exact").sample(request(target, 2 * RUNS, 10**7)).tokens
    found = ContinuousSpeculative(drafter, length=3, mode="exact").sample(request(target, RUNS)).tokens
    assert distance(wanted, found) < 2.3
    biased = ContinuousSpeculative(drafter, length=3, tolerance=0.5).sample(request(target, RUNS)).tokens
    assert distance(wanted, biased) > 5


def distance(a, b):
    """The largest two-sample score over all numbers of the images, and over sums and products of neighbours."""
    a, b = a.flatten(1), b.flatten(1)
    views = [(a, b), (a + a.roll(1, 1), b + b.roll(1, 1)), (a * a.roll(2, 1), b * b.roll(2, 1))]
    return max(ks_two(x, y) for left, right in views for x, y in zip(left.unbind(1), right.unbind(1), strict=True))


# Variants that must fail. Each is the real sampler with one thing replaced.


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["paper", "official"])
def test_any_sigma_is_biased(sign, monkeypatch):
    monkeypatch.setitem(continuous.PATHS, "off", sign)
    assert_biased(judge(("head", 2)))


@pytest.mark.parametrize("pair", [("head", 1), ("mixture", 2)])
def test_the_distribution_itself_instead_of_the_residual_is_biased(pair, monkeypatch):
    def first_proposal(p, q, normal, uniform, accept, sign):
        return p.sample(normal[0], uniform[0]), torch.ones_like(uniform[0])

    monkeypatch.setattr(continuous, "sample_residual", first_proposal)
    assert_biased(judge(pair, batch=2 * RUNS))


def test_widened_densities_are_biased(monkeypatch):
    real = continuous.log_ratio
    monkeypatch.setattr(continuous, "log_ratio", lambda x, p, q, kappa=1.0, sign=0.0: real(x, p, q, 4 * kappa, sign))
    assert_biased(judge(("head", 1)))


@pytest.mark.parametrize("pair", [("head", 2), ("mixture", 1)])
def test_judging_without_seeing_the_drafts_is_biased(pair, monkeypatch):
    monkeypatch.setattr(ContinuousSpeculative, "sees_drafts", False)
    assert_biased(judge(pair, batch=2 * RUNS))


@pytest.mark.parametrize("tolerance", [0.1, 0.26])
@pytest.mark.parametrize("condition", ["prefix", "drafts"])
def test_block_mode_is_not_exact_at_any_tolerance(tolerance, condition):
    """Compared with what the target samples alone, in the same convention: no noise in the last step."""
    assert_biased(
        judge(("head", 1), batch=4 * RUNS, last=False, mode="block", tolerance=tolerance, condition=condition)
    )


# Theorem 1: shared noise brings the two models closer.


@pytest.mark.parametrize(
    ("widths", "slopes"),
    [
        (((0.35, 0.9), (0.4, 0.6)), ((1.0, 0.0), (1.0, 0.0))),
        (((0.35, 0.6, 0.9), (0.4, 0.35, 0.5)), ((0.8, 0.6, 0.7), (0.75, 0.62, 0.65))),
    ],
    ids=["one step", "a chain"],
)
def test_shared_noise_lowers_the_distance_as_theorem_1_says(widths, slopes):
    """By 2 tr sqrt(Sigma_q Sigma_p) for one step; over a chain by as much for every noise, as much as arrives of it."""
    runs, channels = 20_000, 2
    target, drafter = (
        ToyHead(channels, (1, 1), noise=n, widths=w, slopes=s)
        for n, w, s in zip((0.0, 0.4), widths, slopes, strict=True)
    )
    square = {}
    for aligned in (True, False):
        method = ContinuousSpeculative(drafter, length=1, prefill=0, aligned=aligned)
        decoded = method.sample(request(target, runs, steps=len(widths[0])))
        square[aligned] = decoded.trace.positions["distance"].double().square()
        assert decoded.trace.summary()["mean_square_distance"] == pytest.approx(float(square[aligned].mean()), rel=1e-4)

    arriving = []  # how much of each noise reaches the mean of the last step
    for width, slope in zip(widths, slopes, strict=True):
        gains = [torch.tensor(slope[:i]).prod().item() for i in range(len(slope) + 1)]
        arriving.append([gains[i] * width[i] for i in range(1, len(width))] + [gains[-1]])
    lowered = 2 * channels * sum(p * q for p, q in zip(*arriving, strict=True))
    if len(widths[0]) == 2:
        assert lowered == pytest.approx(2 * channels * widths[0][1] * widths[1][1])
    error = (sum(s.var() for s in square.values()) / runs).sqrt()
    assert abs(square[False].mean() - square[True].mean() - lowered) < 4 * error
    assert lowered > 20 * error


def test_shared_noise_lets_more_drafts_pass():
    rates = [
        draw(("head", 2), batch=1000, aligned=aligned).trace.summary()["acceptance_rate"] for aligned in (True, False)
    ]
    assert rates[0] > 1.5 * rates[1]


# A residual with little mass, or none


@pytest.mark.parametrize(("patience", "exact"), [(100, True), (1, False)])
def test_exactness_takes_patience(patience, exact, monkeypatch):
    """A token that is resampled is looked for until it is found, set after set of proposals."""
    monkeypatch.setattr(continuous, "TRIES", 2)
    monkeypatch.setattr(continuous, "EXACT_TRIES", patience)
    target, drafter = ToyMixture(1), ToyMixture(1, noise=0.3)
    decoded = ContinuousSpeculative(drafter, 3, 0, "exact").sample(request(target, RUNS))
    tries = decoded.trace.positions["tries"]
    assert (decoded.trace.summary()["failed_resamples"] == 0) == exact
    assert (int(tries.max()) > 10) == exact and (int(tries.min()) == -2) == (not exact)
    found = score(target, decoded)
    assert found.worst < 1 if exact else found.worst > 1.5, found


def half_sigma(drafter):
    """The same widths but Sigma = 1/e: where both models agree, all of Sigma p lies below q."""
    distribution = drafter.distribution
    drafter.distribution = lambda *inputs: replace(out := distribution(*inputs), path=out.path - 1.0)
    return drafter


def assert_nothing_lost(decoded, tries):
    """Every residual ended with its last proposal, and says so. The published code leaves zeros there."""
    trace = decoded.trace
    assert decoded.tokens.isfinite().all() and (decoded.tokens != 0).all()
    assert set(trace.positions["tries"].unique().tolist()) == {-tries, 0}
    assert torch.equal(trace.positions["tries"] == -tries, trace.positions["source"] == Source.RESIDUAL)
    assert trace.summary()["failed_resamples"] == int((trace.positions["tries"] < 0).sum()) > 0
    assert trace.positions["log_ratio"][trace.positions["depth"] > 0].sub(-1).abs().max() < 1e-5


def test_no_token_is_ever_lost_where_the_residual_is_empty():
    method = ContinuousSpeculative(
        half_sigma(ToyHead(1)), length=3, prefill=0, mode="prefix", path="paper", tolerance=ToySchedule(3).last_width
    )
    assert_nothing_lost(method.sample(request(ToyHead(1), 500)), TRIES)


def test_even_patience_ends(monkeypatch):
    """With the real numbers of proposals: 100 sets of 100."""
    monkeypatch.undo()
    monkeypatch.setitem(continuous.PATHS, "off", 1.0)
    method = ContinuousSpeculative(half_sigma(ToyHead(1)), length=3, prefill=0, mode="exact")
    assert_nothing_lost(method.sample(request(ToyHead(1), 2)), 10_000)


def test_no_proposals_are_made_for_images_that_are_complete(monkeypatch):
    """Where drafter and target agree nothing is ever resampled, and no patience spent on rows without a token left."""
    calls = []
    real = continuous.sample_residual
    monkeypatch.setattr(continuous, "EXACT_TRIES", 100)
    monkeypatch.setattr(continuous, "sample_residual", lambda *inputs: calls.append(1) or real(*inputs))
    trace = ContinuousSpeculative(ToyHead(1), length=3, prefill=0, mode="exact").sample(request(ToyHead(1), 8)).trace
    assert trace.summary()["acceptance_rate"] == 1 and len(calls) <= trace.totals["target_passes"]
