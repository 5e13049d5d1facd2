"""Every acceptance rule, enumerated: what a test of one draft, or of a group of siblings, really samples.

One position under a rule follows K(y) = q(y) f(y) + sum over x of q(x) (1 - f(x)) G_x(y), which is written down here
for all x and compared with p. In double precision, so that equal means equal.
"""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.models.neighbours import neighbour_table
from comfyui_specar.samplers import registry
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.entropy import Entropy
from comfyui_specar.samplers.rules.grouped import Grouped
from comfyui_specar.samplers.rules.lantern import RESIDUALS, Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.settings import settings_of

VOCAB = 12
CODEBOOK = torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(3))
RULES = [
    Exact(),
    UniformRSD(1.1),
    UniformRSD(3),
    CoolSD(2, 0.5),
    CoolSD(1.1, 0.5, floor=False),
    Lantern(5, 0.1),
    Lantern(11, 0.4),
    Lantern(),
    LanternPP(5, 2),
    LanternPP(11, 8),
    Grouped(),
    Grouped(5, 0.3, 4),
    TVMetered(0.05),
    TVMetered(0.3),
    TVMetered(1),
    Entropy(),
    Entropy(2, 4),
]
RELAXED = [rule for rule in RULES if not rule.lossless]
NOTHING = [  # settings at which a rule is the exact one
    UniformRSD(1),
    CoolSD(1),
    Lantern(5, 0),
    Lantern(5, 0, "paper"),
    LanternPP(5, 1),
    TVMetered(0),
    Grouped(1),
    Grouped(gap=0),
    Grouped(radius=0),
]
LOSSY = [*RELAXED, *(replace(Lantern(4, 0.2), redraw=redraw) for redraw in RESIDUALS)]


def bound(rule, codebook=CODEBOOK):
    model = SimpleNamespace(vocab=len(codebook), device=torch.device("cpu"), codebook=codebook)
    model.neighbours = lambda count: neighbour_table(codebook, count)
    rule.check()
    return rule.bind(model)


def test_every_rule_is_among_those_tested_here():
    assert {type(rule) for rule in RULES} == set(registry.RULES)
    declared = {rule for rule in registry.RULES if any(each.exact is not None for each in settings_of(rule).values())}
    assert {type(rule) for rule in NOTHING} == declared


@pytest.mark.parametrize("rule", [*RULES, *LOSSY[len(RELAXED) :]], ids=str)
def test_a_rule_judges_every_row_of_a_window_by_itself(rule):
    rule, generator = bound(rule), torch.Generator().manual_seed(5)
    p, q = (torch.randn(6, VOCAB, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    strength = torch.tensor([0.0, 0.3, 0.5, 0.7, 0.9, 1.0], dtype=torch.float64)
    numbers = torch.randint(VOCAB, (6,), generator=generator), torch.tensor([1, 2, 3, 1, 2, 3]), strength
    window = [x.unflatten(0, (2, 3)) for x in (p, q, *numbers)]
    for name in ("accept_probability", "residual", "drift_bound"):
        torch.testing.assert_close(getattr(rule, name)(*window).flatten(0, 1), getattr(rule, name)(p, q, *numbers))


def probs(seed, vocab=VOCAB, zeros=0.2):
    """A target distribution and a drafter's, each without some tokens, as the sampling filters leave them."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, vocab, generator=generator, dtype=torch.float64) * 1.5
    z[1] = z[0] + z[1] * 0.8
    off = torch.rand(2, vocab, generator=generator) < zeros
    off[torch.arange(2), z.argmax(-1)] = False
    return z.masked_fill(off, -torch.inf).softmax(-1)


def every(p, q, depth=1, strength=1.0):
    """The arguments of a rule's methods, for every token at once."""
    vocab = len(p)
    depths, strengths = torch.full((vocab,), depth), torch.full((vocab,), strength, dtype=p.dtype)
    return p.expand(vocab, -1), q.expand(vocab, -1), torch.arange(vocab), depths, strengths


def enumerated(rule, p, q, depth=1, strength=1.0):
    """f [V] of every draft, the distributions [V, V] sampled from after its rejection, and the kernel [V]."""
    given = every(p, q, depth, strength)
    f, rest = rule.accept_probability(*given), rule.residual(*given)
    assert ((f >= 0) & (f <= 1 + 1e-12)).all() and (rest >= 0).all() and (rest.sum(-1) > 0).all()
    rest = rest / rest.sum(-1, keepdim=True)
    return f, rest, q * f + (q * (1 - f)) @ rest


def distance(a, b):
    return float((a - b).abs().sum()) / 2


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_the_drift_is_its_closed_form_and_the_drift_bound_says_so(rule, depth):
    """With the optimal residual, TV(K, p) = sum [q f - p]+; a bound that looks at one draft has this for its mean."""
    rule = bound(rule)
    drifts = []
    for seed in range(12):
        p, q = probs(seed)
        f, _, kernel = enumerated(rule, p, q, depth)
        assert abs(float(kernel.sum()) - 1) < 1e-12
        drift = float((q * f - p).clamp(min=0).sum())
        assert abs(distance(kernel, p) - drift) < 1e-9
        drift_bound = rule.drift_bound(*every(p, q, depth))
        assert abs(float((q * drift_bound).sum()) - drift) < 1e-9
        if not isinstance(rule, Lantern | LanternPP):
            assert (drift_bound - drift).abs().max() < 1e-9
        drifts.append(drift)
    relaxed = not rule.lossless
    if isinstance(rule, CoolSD):
        relaxed = max(rule.omegas()[depth - 1 : depth], default=1) > 1
    assert (max(drifts) > 1e-3) == relaxed, "the test would not notice a rule that does nothing"


@pytest.mark.parametrize("rule", [Lantern(4, 0.2, "paper"), LanternPP(5, 4, "paper")], ids=str)
def test_the_papers_residual_adds_its_distance_from_the_best_one_where_it_is_sampled(rule):
    rule, seen = bound(rule), set()
    for seed in range(10):
        p, q = probs(seed)
        given = every(p, q)
        best = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        found, accept, paper = rule.drift_bound(*given), rule.accept_probability(*given), rule.residual(*given)
        for x in q.nonzero()[:, 0].tolist():
            f, apart = float(accept[x]), float((paper[x] / paper[x].sum() - best).abs().sum()) / 2
            assert float(found[x]) == pytest.approx(max(f - float(p[x] / q[x]), 0) + (1 - f) * apart)
            seen.add((f < 1, apart > 0.01))
    assert {(True, True), (False, True)} <= seen


@pytest.mark.parametrize("redraw", RESIDUALS)
def test_the_papers_residual_samples_worse_and_the_drift_bound_holds_for_what_they_sample(redraw):
    worse = 0
    for rule in (Lantern(4, 0.2, redraw), Lantern(9, 0.5, redraw), LanternPP(6, 4, redraw)):
        rule, best = bound(rule), bound(replace(rule, redraw="optimal"))
        for seed in range(12):
            p, q = probs(seed)
            drift = distance(enumerated(rule, p, q)[2], p)
            least = distance(enumerated(best, p, q)[2], p)
            assert drift >= least - 1e-12
            assert drift <= float((q * rule.drift_bound(*every(p, q))).sum()) + 1e-12
            likely = q.argsort(descending=True)[:3].tolist()
            drift += distance(certain_group(rule, p, likely), p)
            least += distance(certain_group(best, p, likely), p)
            worse += drift > least + 1e-3
    assert (worse > 10) == (redraw != "optimal"), worse


@pytest.mark.parametrize("seed", range(8))
def test_nesting_and_monotonicity(seed):
    """Pointwise in f: exact <= LANTERN++ <= UniformRSD(lambda); and more is more."""
    p, q = probs(seed, zeros=0)

    def f(rule, strength=1.0):
        return enumerated(bound(rule), p, q, strength=strength)[0]

    ladders = [
        [Exact(), LanternPP(5, 3), UniformRSD(3)],
        [Exact(), LanternPP(11, 3), UniformRSD(3)],
        [LanternPP(k, 3) for k in (1, 2, 5, 11)],
        [LanternPP(5, ratio) for ratio in (1, 1.5, 2, 4, 50)],
        [Lantern(k, 0.2) for k in (1, 2, 5, 11)],
        [Lantern(5, delta) for delta in (0, 0.05, 0.1, 0.4, 1)],
        [UniformRSD(delta) for delta in (1, 1.1, 2, 10)],
        [TVMetered(e) for e in (0, 0.01, 0.1, 0.5)],
        [CoolSD(delta, 0.3) for delta in (1, 1.1, 2, 10)],
    ]
    grew = 0
    for ladder in ladders:
        steps = [f(rule) for rule in ladder]
        for low, high in itertools.pairwise(steps):
            assert (low <= high + 1e-12).all(), ladder
        grew += bool((steps[-1] > steps[0] + 1e-6).any())
    for rule in RELAXED:
        if isinstance(rule, Grouped | Entropy) or min(getattr(rule, "omegas", list)() or [1]) < 1:
            continue  # these may be stricter than the exact rule
        for low, high in itertools.pairwise(f(rule, s) for s in (0, 0.25, 0.5, 1)):
            assert (low <= high + 1e-12).all(), rule
    assert grew >= 6, "the ladders must differ somewhere"


@pytest.mark.parametrize("rule", [*RULES, *NOTHING, *LOSSY], ids=str)
def test_nothing_relaxed_is_the_exact_rule_to_the_last_bit(rule):
    """At strength 0, and at the settings that relax nothing, in the precision that samplers use."""
    strengths = (0.0, 1.0) if rule in NOTHING else (0.0,)
    rule = bound(rule)
    for seed, strength in itertools.product(range(20), strengths):
        p, q = probs(seed).float()
        p, q = p / p.sum(), q / q.sum()
        given, exact = every(p, q, strength=strength), Exact()
        drafted = q > 0
        assert torch.equal(rule.accept_probability(*given)[drafted], exact.accept_probability(*given)[drafted])
        assert torch.equal(rule.residual(*given), exact.residual(*given))
        assert (rule.drift_bound(*given)[drafted] == 0).all()


@pytest.mark.parametrize("rule", [*RULES, *LOSSY], ids=str)
def test_extreme_distributions(rule):
    """Point masses, no common token, equal distributions: never a NaN, never an impossible token."""
    rule = bound(rule)
    uniform, corner = torch.full((VOCAB,), 1 / VOCAB), torch.eye(VOCAB)
    halves = torch.cat((torch.full((6,), 1 / 6), torch.zeros(6)))
    for p, q in (
        (corner[2], uniform),
        (uniform, corner[2]),
        (corner[2], corner[2]),
        (corner[2], corner[5]),
        (halves, halves.flip(0)),
        (uniform, uniform),
        (halves, halves),
    ):
        f, rest, kernel = enumerated(rule, p, q)
        assert kernel.isfinite().all() and abs(float(kernel.sum()) - 1) < 1e-5
        assert rule.drift_bound(*every(p, q))[q > 0].isfinite().all()
        if torch.equal(p, q):
            assert (f[q > 0] > 1 - 1e-6).all()
        if not isinstance(rule, Lantern | LanternPP | Grouped):  # those may keep what looks like a possible token
            assert (kernel[p == 0] < 1e-6).all()


@pytest.mark.parametrize("rule", [*RULES, *LOSSY], ids=str)
def test_special_tokens_resemble_nothing(rule):
    """Two tokens after the codes, as for line ends: forced they pass, otherwise they do not matter."""
    rule = bound(rule)
    end = torch.eye(VOCAB + 2)[VOCAB + 1]
    given = end[None], end[None], torch.tensor([VOCAB + 1]), torch.tensor([1]), torch.ones(1)
    assert rule.accept_probability(*given) == 1 and rule.drift_bound(*given) == 0
    assert rule.residual(*given).argmax() == VOCAB + 1 and rule.residual(*given).count_nonzero() == 1
    p, q = probs(1)
    wide = [torch.cat((row, torch.zeros(2, dtype=row.dtype))) for row in (p, q)]
    f, rest, kernel = enumerated(rule, *wide)
    for found, wanted in zip((f[:VOCAB], rest[:VOCAB, :VOCAB], kernel[:VOCAB]), enumerated(rule, p, q), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)
    assert (kernel[VOCAB:] == 0).all()
    if isinstance(rule, Lantern | LanternPP | Grouped):  # with mass of its own, too, a special token stands alone
        given = every(*(torch.cat((0.6 * row, torch.tensor(own))) for row, own in ((p, (0.1, 0.3)), (q, (0.3, 0.1)))))
        assert torch.allclose(rule.accept_probability(*given)[VOCAB:], torch.tensor([1 / 3, 1]).double(), atol=1e-6)


# Groups of siblings


def sampled_group(rule, p, q, children, forget=False, vanilla=False):
    """The distribution of ``children`` siblings sampled from q without replacement, tested in turn, and the expected
    drift bound.

    forget: the residual uses q as it was at first (wrong). vanilla: the residual is [p - q]+ whatever f (wrong).
    """
    out, drift_bounds = torch.zeros_like(p), 0.0
    stack = [(p, q, 0, 1.0)]
    while stack:
        probs, left, number, mass = stack.pop()
        if number == children or left.sum() <= 1e-15:
            out += mass * probs
            continue
        f, rest, _ = enumerated(rule, probs, left)
        drift_bounds += mass * float((left * rule.drift_bound(*every(probs, left))).sum())
        out += mass * left * f
        if forget or vanilla:
            wrong = Exact().residual(*every(probs, q if forget else left))
            rest = wrong / wrong.sum(-1, keepdim=True)
        for x in left.nonzero()[:, 0].tolist():
            rejected = mass * float(left[x] * (1 - f[x]))
            if rejected > 0:
                without = left.clone()
                without[x] = 0
                stack.append((rest[x], without / without.sum().clamp(min=1e-300), number + 1, rejected))
    return out, drift_bounds


def certain_group(rule, p, children):
    """The distribution of siblings proposed for certain."""
    out, probs, mass = torch.zeros_like(p), p, 1.0
    for x in children:
        q = torch.zeros_like(p)
        q[x] = 1
        f, rest, _ = enumerated(rule, probs, q)
        out[x] += mass * f[x]
        mass, probs = mass * float(1 - f[x]), rest[x]
    return out + mass * probs


@pytest.mark.parametrize("children", [1, 2, 3, 4])
def test_exact_siblings_sample_from_p(children):
    for seed in range(3):
        p, q = probs(seed, 6, zeros=0.1)
        out, drift_bound = sampled_group(Exact(), p, q, children)
        assert distance(out, p) < 1e-14 and drift_bound == 0
        likely = q.argsort(descending=True)[:children].tolist()
        assert distance(certain_group(Exact(), p, likely), p) < 1e-14


def test_forgetting_to_renormalise_q_is_biased():
    pairs = [probs(seed, 6, zeros=0) for seed in range(5)]
    assert max(distance(sampled_group(Exact(), p, q, 3, forget=True)[0], p) for p, q in pairs) > 0.02


def test_a_stricter_ratio_needs_its_own_residual():
    """omega < 1 is exact with [p - q f]+ and biased with [p - q]+, alone and among siblings."""
    strict = UniformRSD(0.6)
    for seed, children in itertools.product(range(3), (1, 3)):
        p, q = probs(seed, 6, zeros=0)
        assert distance(sampled_group(strict, p, q, children)[0], p) < 1e-14
        assert distance(sampled_group(strict, p, q, children, vanilla=True)[0], p) > 0.03
    tight = CoolSD(1.1, 0.5, floor=False)
    assert min(tight.omegas()) < 0.6
    p, q = probs(5)
    assert distance(enumerated(tight, p, q, depth=5)[2], p) < 1e-14


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_relaxed_siblings_drift_no_further_than_their_drift_bounds(rule):
    codebook = CODEBOOK[:6]
    rule = replace(rule, neighbours=min(rule.neighbours, 5)) if hasattr(rule, "neighbours") else rule
    rule = bound(rule, codebook)
    for seed in range(2):
        p, q = probs(seed, 6, zeros=0)
        for children in (1, 2, 3):
            out, drift_bound = sampled_group(rule, p, q, children)
            assert abs(float(out.sum()) - 1) < 1e-12
            assert distance(out, p) <= drift_bound + 1e-12


# Settings


def test_a_schedule_that_falls_below_zero_is_refused():
    with pytest.raises(ValueError, match="0 to 1.*floor"):
        CoolSD(2, 1.5, 5, "linear", floor=False).check()


def test_more_neighbours_than_codes_is_an_error_unless_it_is_the_default():
    for rule in (Lantern(12), LanternPP(400)):
        with pytest.raises(ValueError, match="12 codes.*1 to 11"):
            bound(rule)
    assert bound(Lantern(11)).table.shape == (12, 11)
    assert bound(Lantern()).describe()["neighbours"] == 11


def test_a_rule_describes_itself():
    described = {rule: json.loads(json.dumps(bound(rule).describe())) for rule in [*RULES, *NOTHING]}
    lantern = {"rule": "lantern", "neighbours": 5, "delta": 0.1, "redraw": "optimal", "neighbours_available": 11}
    assert described[Lantern(5, 0.1)] == lantern
    assert described[Exact()] == {"rule": "exact"}
    assert {d["rule"] for d in described.values()} == {rule.name for rule in registry.RULES}
    assert [rule.lossless for rule in NOTHING] == [True] * len(NOTHING)


def test_the_entropy_rule_by_hand():
    """p has ln 2 nats, so f = 1/2 + (rho e / ln 2 - 1/2) / (1 - ln 2 / lambda), cut to 0..1."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([0.05, 0.05, 0.9], dtype=torch.float64)
    f = Entropy(4, 8).accept_probability(*every(p, q))
    assert f.tolist() == [1, 1, 0]
    q = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)  # rho = 0.51, 1, 0
    for scale, decay in ((1, 2), (1, 4)):
        entropy, spread = math.log(2), 1 - math.log(2) / decay
        wanted = 0.5 + (0.5 / 0.98 * scale / entropy - 0.5) / spread
        assert Entropy(scale, decay).accept_probability(*every(p, q))[0].item() == pytest.approx(wanted, abs=1e-12)
    half = Entropy(1, 2).accept_probability(*every(p, q, strength=0.5))
    exact, whole = Exact().accept_probability(*every(p, q)), Entropy(1, 2).accept_probability(*every(p, q))
    assert torch.allclose(half, (exact + whole) / 2, atol=1e-12)
    sure = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert Entropy().accept_probability(*every(sure, q)).tolist() == [1, 0, 0], "what cannot be is never accepted"


def test_the_entropy_rule_needs_a_lambda_above_every_entropy():
    with pytest.raises(ValueError, match="decay.* 2.*12 codes.*2.48"):
        bound(Entropy(1, 2))


def test_the_grouped_rule_needs_code_vectors():
    with pytest.raises(ValueError, match="(?i)no image decoder"):
        Grouped().bind(SimpleNamespace(codebook=None))


def test_groups_are_those_of_their_definition():
    """Against the definition written as loops: window, gap and radius each matter in this example."""
    for window, gap, radius in ((14, 0.15, 0.5), (14, 0.05, 4), (4, 0.3, 6), (5, 1, 50), (24, 0.02, 2)):
        rule = bound(Grouped(window, gap, radius))
        for seed in range(6):
            p, q = probs(seed)
            order = p.argsort(descending=True, stable=True).tolist()
            f = enumerated(rule, p, q)[0]
            for x in range(VOCAB):
                rank = order.index(x)
                below, above = window // 2, (window - 1) // 2
                group = [
                    y
                    for y in order[max(0, rank - above) : rank + below + 1]
                    if y == x or (abs(p[y] - p[x]) < gap and (CODEBOOK[y] - CODEBOOK[x]).square().sum() < radius)
                ]
                if q[x] > 0:
                    assert abs(f[x] - min(1, p[group].sum() / q[group].sum())) < 1e-9
