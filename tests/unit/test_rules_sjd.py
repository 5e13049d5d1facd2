"""Relaxed rules inside speculative Jacobi decoding: how far the images drift, what is recorded, what it costs."""

import json
from functools import cache

import pytest
import torch
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.guesses import DraftState
from comfyui_specar.samplers.engine.run import Run, RunInputs
from comfyui_specar.samplers.methods.jacobi import COMPARED, REUSE, SJD
from comfyui_specar.samplers.methods.window import Window
from comfyui_specar.samplers.rng import Stream
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.grouped import Grouped
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.trace import Source

from ..support import enumerated
from ..support.enumerated import LAYOUTS, distance
from ..support.rules import RELAXED
from ..support.toy import ToyModel, plain

RUNS = 12_000
NOISE = 0.03  # how far 12,000 images of 81 kinds stray from their distribution by chance
RULES = [
    *RELAXED,
    UniformRSD(20),
    CoolSD(2, 0.5, 3),
    Lantern(2, 0.6, "paper"),
    Grouped(gap=0.5, radius=3),
    TVMetered(0.05),
    TVMetered(0.5),
]


def draw(rule, name="plain", batch=RUNS, params=None, strength=None, **options):
    method = SJD(**{"window": 4, "initial": "uniform", "rule": rule} | options)
    return enumerated.draw(method, name, params, batch=batch, strength=strength)


@cache
def many(rule, name="plain"):
    """RUNS images under the rule, sampled once for all tests."""
    return draw(rule, name)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["plain", "line_ends"])
def test_images_drift_no_further_than_the_recorded_drift_bound(rule, name):
    """The mean over runs of the drift bounds summed along an image bounds the total variation of the distributions."""
    decoded = many(rule, name)
    drift_bound = float(decoded.trace.positions["drift_bound"].sum(-1).mean())
    assert drift_bound > 0.01 and distance(decoded.tokens, name).tv <= drift_bound + NOISE
    trace, reference = decoded.trace, many(Exact(), name).trace
    assert sum(trace.totals["passes_per_image"]) < sum(reference.totals["passes_per_image"])
    assert trace.summary()["accepted_drafts"] > reference.summary()["accepted_drafts"]
    assert trace.settings["lossless"] is False


def test_a_relaxed_rule_does_drift():
    """The bound above is not met by doing nothing: the exact test, which the exact rule passes, fails by far."""
    for rule in (UniformRSD(20), Lantern(2, 0.6, "paper"), Grouped(gap=0.5, radius=3), TVMetered(0.5)):
        assert distance(many(rule).tokens, "plain").z > 20, rule
    assert distance(many(Exact()).tokens, "plain").z < 4


@pytest.mark.parametrize("rule", [UniformRSD(2), CoolSD(2, 0.5, 3), Lantern(2, 0.3), TVMetered(0.05)], ids=str)
def test_as_many_tokens_are_relaxed_as_the_drift_bounds_sum_up_to(rule):
    """Where f >= min(1, p/q), the chance of a relaxed token is sum q (f - min(1, p/q)): the same as sum [q f - p]+."""
    positions = many(rule).trace.positions
    relaxed, drift_bound = (positions["source"] == Source.RELAXED).sum(-1).float(), positions["drift_bound"].sum(-1)
    difference = relaxed - drift_bound
    assert abs(difference.mean()) < 4 * difference.std() / RUNS**0.5


def test_full_strength_is_the_default():
    assert torch.equal(many(UniformRSD(2)).tokens, draw(UniformRSD(2), strength=torch.ones(1, 4)).tokens)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_relaxed_token_is_one_the_exact_rule_refuses(rule):
    """u >= p/q needs p < q; an accepted token with p >= q never needed a relaxed rule. Forced tokens are neither."""
    positions = many(rule, "line_ends").trace.positions
    relaxed = positions["source"] == Source.RELAXED
    assert relaxed.any() and (positions["ratio"][relaxed] < 1).all() and (positions["depth"][relaxed] > 0).all()
    forced = LAYOUTS["line_ends"][0].forced.expand(RUNS, -1) >= 0
    assert (positions["source"][forced] == Source.FORCED).all() and (positions["drift_bound"][forced] == 0).all()
    assert (positions["drift_bound"][positions["depth"] == 0] == 0).all(), "no draft, no drift"


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_without_a_draft_nothing_drifts(rule):
    """Also where the filters leave two tokens, so that what stands in for a draft may have probability zero."""
    positions = draw(rule, batch=500, params=SamplingParams(top_k=2), window=2).trace.positions
    bare = positions["depth"] == 0
    assert bare[:, 1:].any() and (positions["drift_bound"][bare] == 0).all()


@pytest.mark.parametrize("reuse", [r for r in REUSE if r not in (*COMPARED, "none")])
def test_refinement_stays_exact(reuse):
    """After the committed run, guesses are resampled as if the rule were exact: q says how they are distributed."""
    generator, width = torch.Generator().manual_seed(0), 4
    p, q = torch.randn(2, 50, width, 3, generator=generator).softmax(-1)
    token = q.flatten(0, 1).multinomial(1, generator=generator).view(50, width)
    zeros, position = torch.zeros(50, dtype=torch.int64), torch.arange(width).expand(50, -1)
    window = Window(zeros, torch.cat((zeros[:, None], token), dim=1), zeros[:1, None], None)
    model, layout = ToyModel(plain(2, 5)), plain(2, 5)
    seen, refined = [], []
    for rule in (Exact(), UniformRSD(20)):
        method = SJD(window=width, reuse=reuse, rule=rule)
        state = DraftState.empty(reuse, "mixed", 50, layout.stride, width, 3, torch.device("cpu"))
        state.draft_probs.put(position, q)
        inputs = RunInputs(Stream.of(0, 50, "cpu"), layout, layout.end.expand(50), None, None)
        run = Run(method, model, None, None, state, SamplingParams(), None, None, None, False, inputs)
        exists = (torch.arange(width) < width - 1).expand(50, -1)
        tested = method.verify(run, window, p, position, exists)
        seen.append(tested.token)
        refined.append(method.refine(run, window, tested, p, position, exists))
    assert not torch.equal(*seen), "the rules must decide differently here"
    assert all(torch.equal(exact, relaxed) for exact, relaxed in zip(*refined, strict=True))


def test_a_schedule_relaxes_the_first_offsets_only():
    positions = draw(CoolSD(4, 0, steps=1)).trace.positions
    relaxed = positions["source"] == Source.RELAXED
    assert relaxed.any() and (positions["depth"][relaxed] == 1).all()
    assert (positions["drift_bound"][positions["depth"] > 1] == 0).all()


def test_settings_say_which_rule_it_was():
    settings = json.loads(json.dumps(draw(LanternPP(2, 4), batch=1).trace.report()["settings"]))
    assert settings["rule"].items() > {"rule": "lantern_pp", "ratio": 4, "neighbours_available": 2}.items()
    assert draw(Exact(), batch=1).trace.settings["rule"] == {"rule": "exact"}
    for rule, reuse, lossless in (
        (Exact(), "coupled", True),
        (UniformRSD(1), "coupled", True),
        (Exact(), "threshold_paper", False),
        (TVMetered(0.1), "coupled", False),
    ):
        assert draw(rule, batch=1, reuse=reuse).trace.settings["lossless"] is lossless
