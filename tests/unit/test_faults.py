"""What goes wrong inside a run: predictions that are no numbers, drafters that guess garbage. Toy models, every method.

A model that breaks must be named in an error and never send an index out of range (on a GPU that ends the process); a
drafter that breaks must cost passes and nothing else.
"""

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from comfyui_specar.kernels import logits as logits_kernels
from comfyui_specar.samplers.contract import SamplingParams, StepOut
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods import continuous
from comfyui_specar.samplers.methods.continuous import MODES, ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.methods.jacobi import REUSE, SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.lantern import RESIDUALS, Lantern

from ..support.rules import RELAXED
from ..support.toy import ToyDrafter, ToyModel, chi_square, marginal, plain, request
from ..support.toy_heads import ToyHead, score
from ..support.toy_heads import request as vectors_request
from ..support.triton_kernels import interpreted

LAYOUT = plain(2, 3)
MODEL = ToyModel(LAYOUT)
TWO_LEVELS = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
ADAPTIVE = ADTTree(depths=(1, 4), widths=(1, 3), width_step=1, first=(2, 2), nodes=12)
STRUCTURES = {
    "chain": Chain(3),
    "blocks": Chain(3, "block"),
    "siblings": Static(((0,), (1,), (2,))),
    "two levels": TWO_LEVELS,
    "top-k": Dynamic(3, 2, 5),
    "adaptive": ADAPTIVE,
}
RULES = [Exact(), *RELAXED, *(Lantern(2, 0.3, redraw) for redraw in RESIDUALS[1:])]
RULES_ON_TREES = list(zip(cycle([TWO_LEVELS, Dynamic(2, 2, 4)]), RULES, strict=False))
SKIPPING = [Skipping(interval=2, guard=0), Skipping("dynamic", threshold=0.1, guard=0)]
FILTERED = SamplingParams(cfg=2.0, top_k=2, top_p=0.8, order=("top_p", "top_k"))


# The model's predictions stop being numbers


class Breaking(ToyModel):
    """Its predictions after ``after`` tokens are not finite, for all tokens or for one."""

    def __init__(self, after: int, value: float = math.nan, tokens: slice | int = slice(None)):
        super().__init__(LAYOUT)
        for table in self.tables:
            table[int(self.begin[after]) :, tokens] = value


def methods(drafter):
    yield NextToken()
    yield from (SJD(4, reuse) for reuse in REUSE)
    yield SJD(4, settle=0.3)
    yield from (SJD(4, rule=rule) for rule in RULES[1:])
    yield from (DraftTree(drafter, structure) for structure in STRUCTURES.values())
    yield from (DraftTree(drafter, structure, rule) for structure, rule in RULES_ON_TREES)
    yield from (VVS(drafter, TWO_LEVELS, skipping=skipping) for skipping in SKIPPING)


@pytest.mark.parametrize(
    ("broken", "params"), [((3, math.nan, 1), FILTERED), ((5, math.inf), SamplingParams(temperature=0))]
)
def test_predictions_that_become_nan_end_in_an_error_with_every_method(broken, params):
    model = Breaking(*broken)
    for method in methods(ToyDrafter(MODEL, stale=True)):
        with pytest.raises(ValueError, match=f"NaN.*token {broken[0] + 1} of 6"):
            method.sample(request(model, LAYOUT, params, batch=3))
        assert not model.sessions


def test_the_error_names_the_image():
    model = Breaking(5)
    [row] = model.begin[4:5]
    model.tables[0][row:] = 0  # all is well again, but for prefixes that start with token 2
    code = torch.arange(3**5)
    model.tables[0][model.begin[5] + code[code // 81 == 2]] = math.nan
    first = NextToken().sample(request(MODEL, LAYOUT, batch=20)).tokens[:, 0]
    hit = (first == 2).nonzero()[0].item()
    with pytest.raises(ValueError, match=rf"token 6 of 6 .*(picture|image) {hit + 1}\b"):
        NextToken().sample(request(model, LAYOUT, batch=20))


def test_a_forced_token_needs_no_prediction():
    model = Breaking(5)
    keep = torch.zeros((1, 2, 3), dtype=torch.bool)
    keep[0, 1, 2] = True
    layout = LAYOUT.keeping(torch.ones((1, 2, 3), dtype=torch.int64), keep)
    for method in (NextToken(), SJD(4), DraftTree(ToyDrafter(MODEL), TWO_LEVELS)):
        assert method.sample(request(model, layout, batch=3)).tokens[:, 5].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("cfg", "temperature", "top_k", "top_p", "order"),
    [
        (2, 0, 0, 1, ("top_k", "top_p")),
        (1, 0.7, 3, 1, ("top_k", "top_p")),
        (3, 1, 3, 0.5, ("top_p", "top_k")),  # the order matters where both filter
        (3, 1, 3, 0.5, ("top_k", "top_p")),
    ],
)
def test_flawed_rows_become_nan_in_kernel_and_reference(cfg, temperature, top_k, top_p, order):
    rows = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(0))
    rows[0, 0], rows[0, 1, 4], rows[0, 2, 4], rows[0, 3, 4] = math.nan, math.nan, -math.nan, math.inf
    rows[:, 4], rows[:, 5, 2:7] = -math.inf, -math.inf  # the second is a distribution
    rows[0, 5, 2:7] = 0.0 if cfg != 1 else -math.inf
    rows = rows if cfg != 1 else rows[:1]
    given = rows, None, cfg, temperature, 8, top_k, top_p, order
    wanted, found = logits_kernels.probabilities(*given), interpreted("logits.probabilities", *given)
    assert torch.equal(wanted[0, :5, :8].isnan().all(-1), torch.ones(5, dtype=torch.bool))
    assert wanted[0, 6].isfinite().all() and not wanted[..., 8:].any()
    assert torch.equal(wanted.isnan(), found.isnan())


# Drafters that guess garbage


class Garbage(ToyDrafter):
    """A drafter whose logits and hidden states are whatever ``spoil`` makes of them."""

    def __init__(self, spoil):
        super().__init__(MODEL, stale=True)
        self.spoil = spoil

    def observe(self, *given):
        return self.spoiled(super().observe(*given))

    def expand(self, *given):
        return self.spoiled(super().expand(*given))

    def spoiled(self, out: StepOut) -> StepOut:
        return StepOut(self.spoil(out.logits.clone()), torch.full_like(out.hidden, math.inf))


def holes(logits):
    """No mass where the target has most: a distribution with zeros."""
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf)


def first_only(logits):
    logits[..., 1:] = -math.inf
    return logits


def sometimes(logits):
    """NaN in every other row of a batch."""
    logits[::2] = math.nan
    return logits


GARBAGE = {
    "nan": lambda logits: logits * math.nan,
    "huge": lambda logits: logits * 1e30,
    "reversed": lambda logits: -5 * logits,
    "holes": holes,
    "one token": first_only,
    "nan for some": sometimes,
}


@pytest.mark.parametrize("spoil", GARBAGE.values(), ids=GARBAGE)
def test_any_drafter_leaves_the_distribution_alone(spoil):
    distribution = MODEL.distribution(LAYOUT, SamplingParams())
    for name in ("blocks", "two levels", "top-k", "adaptive"):
        decoded = DraftTree(Garbage(spoil), STRUCTURES[name]).sample(request(MODEL, LAYOUT, batch=1500))
        whole = chi_square(decoded.tokens, distribution)
        late = chi_square(decoded.tokens[:, 4:], marginal(distribution, [4, 5]))
        assert whole.z < 4 and late.z < 4, (name, whole, late)


def test_a_drafter_that_proposes_nothing_costs_a_pass_per_token_and_is_reported(caplog):
    for structure in STRUCTURES.values():
        caplog.clear()
        trace = DraftTree(Garbage(GARBAGE["nan"]), structure).sample(request(MODEL, LAYOUT, batch=2)).trace
        assert trace.totals["passes_per_image"] == [6, 6] and trace.summary()["accepted_drafts"] == 0
        assert "drafter" in caplog.text
    caplog.clear()
    DraftTree(Garbage(GARBAGE["reversed"]), TWO_LEVELS).sample(request(MODEL, LAYOUT, batch=2))
    assert not caplog.text


@pytest.mark.parametrize("spoil", [GARBAGE[name] for name in ("nan", "holes", "nan for some")])
def test_garbage_ends_with_every_rule_and_schedule(spoil):
    for structure, rule in RULES_ON_TREES:
        decoded = DraftTree(Garbage(spoil), structure, rule).sample(request(MODEL, LAYOUT, batch=4))
        assert decoded.tokens.max() < 3 and math.isfinite(decoded.trace.summary()["drift_bound"]), rule
    for skipping in SKIPPING:
        decoded = VVS(Garbage(spoil), TWO_LEVELS, skipping=skipping).sample(request(MODEL, LAYOUT, batch=4))
        assert decoded.tokens.max() < 3


# The same for models of vectors


class Spoiled(ToyHead):
    """A head whose means are whatever ``spoil`` makes of them."""

    def __init__(self, spoil, **options):
        super().__init__(1, **options)
        self.spoil = spoil

    def distribution(self, *given):
        distribution = super().distribution(*given)
        return replace(distribution, mean=self.spoil(distribution.mean))


def sometimes_nan(mean):
    return mean.where(torch.arange(len(mean))[:, None, None, None] % 2 == 0, math.nan)


VECTORS = {
    "nan": lambda mean: mean * math.nan,
    "infinite": lambda mean: mean + math.inf,
    "huge": lambda mean: mean + 1e30,
    "far": lambda mean: mean + 50,
    "nan for some": sometimes_nan,
}
UNUSABLE = ("nan", "infinite", "huge")


@pytest.mark.parametrize("kind", VECTORS)
def test_any_drafter_leaves_the_distribution_of_vectors_alone(kind, monkeypatch, caplog):
    monkeypatch.setattr(continuous, "EXACT_TRIES", 1)
    target = ToyHead(1)
    method = ContinuousSpeculative(Spoiled(VECTORS[kind]), mode="exact", length=3, prefill=0)
    decoded = method.sample(vectors_request(target, 1500))
    found = score(target, decoded)
    assert found.worst < 1, found
    summary = decoded.trace.summary()
    assert all(math.isfinite(v) for v in summary.values() if isinstance(v, float))
    assert ("drafter" in caplog.text) == (kind in UNUSABLE)
    for mode in ("block", "prefix"):
        for condition in ("drafts", None):
            for tolerance in (0.26, math.inf):
                method = ContinuousSpeculative(Spoiled(VECTORS[kind]), 3, 0, mode, condition, tolerance)
                assert method.sample(vectors_request(target, 5)).tokens.isfinite().all()


@pytest.mark.parametrize(
    "method",
    [
        ContinuousNextToken(),
        ContinuousNextToken(2),
        *(ContinuousSpeculative(ToyHead(1), 2, 0.25, mode) for mode in MODES),
    ],
)
def test_vectors_that_become_nan_end_in_an_error(method):
    class Late(ToyHead):
        def distribution(self, context, *given):
            distribution = super().distribution(context, *given)
            return distribution if len(self.calls) < 2 else replace(distribution, mean=distribution.mean * math.nan)

    with pytest.raises(ValueError, match="NaN.*fp32"):
        method.sample(vectors_request(Late(1), 3))
