"""What holds of every run of a toy model, whatever it is made of: methods, trees, rules, images that keep tokens,
strengths, masks and batches are chosen at random.

1. Tokens that the layout forces are in place, and no other token is a special one.
2. The trace adds up: every token is decided once, and the counts are those of the positions.
3. Row i of a batch is the run of its own with seed + i.
4. Captured steps, also those of an earlier run, decide what plain ones do.
5. At temperature 0, every method gives the likeliest image.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_specar.samplers.contract import Request, Result, SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import INITIAL as SHAPES
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import Auto
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine import prefix_tokens
from comfyui_specar.samplers.methods.jacobi import COMPARED, INITIAL, REUSE, SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import FEATURES, PATHS, Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.trace import Source
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.captured_runs import assert_same_run, assert_same_tree_run, captured
from ..support.rules import RELAXED
from ..support.toy import VOCAB, ToyDrafter, ToyModel, draft_tree, plain, request, with_line_ends

PARAMS = [
    SamplingParams(),
    SamplingParams(cfg=2.0, temperature=0.8),
    SamplingParams(top_k=2),
    SamplingParams(cfg=1.5, top_p=0.8, entropy=(2.5, 1.0, 0.6)),
    SamplingParams(temperature=0),
]
KEPT = st.lists(st.sampled_from([-1, -1, -1, 0, 2]), min_size=7, max_size=7)
LAYOUTS = [plain(2, 3), plain(2, 3), with_line_ends(2, 2), with_line_ends(2, 2), plain(1, 1), plain(2, 1)]
MODELS = {layout.length: ToyModel(layout, specials=2) for layout in LAYOUTS}
DRAFTERS = {stale: {n: ToyDrafter(model, stale=stale) for n, model in MODELS.items()} for stale in (False, True)}


@st.composite
def requests(draw) -> Request:
    """Up to three images, of which each may keep tokens of its own, with a strength for all or for each."""
    batch, base = draw(st.integers(1, 3)), draw(st.sampled_from(LAYOUTS))
    forced = base.forced.repeat(draw(st.sampled_from([1, batch])), 1)
    if draw(st.booleans()):
        kept = torch.tensor([draw(KEPT) for _ in forced])[:, : base.length]
        forced = torch.where(forced < 0, kept, forced)
    layout = replace(base, forced=forced)
    strength = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        strength = torch.rand(draw(st.sampled_from([1, batch])), layout.length, generator=generator)
        strength *= strength > 0.3
    seed, params = draw(st.integers(0, 99)), draw(st.sampled_from(PARAMS))
    return replace(request(MODELS[layout.length], layout, params, seed, batch), strength=strength)


@st.composite
def windows(draw, asked: Request) -> SJD | NextToken:
    """None of them wider than the image, but for the one that is chosen by itself."""
    reuse, initial = draw(st.sampled_from([*REUSE])), draw(st.sampled_from(INITIAL))
    width = draw(st.sampled_from([None, *range(2, min(asked.layout.length, 6) + 1)]))
    rules = [Exact()] if reuse in COMPARED else [Exact(), *RELAXED]
    settle = draw(st.sampled_from([0.0, 0.3])) if reuse == "coupled" else 0.0
    method = SJD(width, reuse, initial, rule=draw(st.sampled_from(rules)), settle=settle)
    return draw(st.sampled_from([method, method, method, NextToken(), Jacobi(width, initial=initial)]))


def linear(slope: float) -> PassCosts:
    return PassCosts(((1, 1.0), (65, 1 + 64 * slope)), 0.1, ((1, 0.1), (64, 0.1)))


@st.composite
def static_trees(draw) -> Static:
    paths, children = [()], {(): 0}
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from(paths))
        paths.append((*parent, children[parent]))
        children[parent] += 1
        children[paths[-1]] = 0
    return Static(tuple(sorted(paths[1:], key=lambda path: (len(path), path))))


COUNTS = st.integers(1, 4)
SLOPES = st.sampled_from([0.0, 0.1, 0.5, 5.0])  # what a token of a pass costs, of the first one
STRUCTURES = st.one_of(
    st.builds(Chain, COUNTS, st.sampled_from(["token", "block"])),
    static_trees(),
    st.builds(Dynamic, COUNTS, COUNTS, st.integers(1, 9)),
    st.builds(Auto, st.just(12), COUNTS, SLOPES.map(linear)),
    st.builds(
        ADTTree,
        st.sampled_from(SHAPES),
        depths=st.just((1, 3)),
        widths=st.just((1, 3)),
        width_step=st.integers(0, 2),
        first=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        nodes=st.integers(3, 9),
        bonus=st.booleans(),
        base=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ),
)
SKIPPING = st.builds(
    Skipping,
    st.sampled_from(["uniform", "dynamic"]),
    interval=st.integers(2, 3),
    threshold=st.sampled_from([0.0, 0.3]),
    path=st.sampled_from(PATHS),
    truncate=st.booleans(),
    refresh=st.booleans(),
    guard=st.integers(0, 2),
    features=st.sampled_from([*FEATURES]),
)


@st.composite
def trees(draw, asked: Request, skipping: Skipping | None = None) -> DraftTree:
    structure = draw(STRUCTURES)
    rule = Exact() if structure.block else draw(st.sampled_from([Exact(), Exact(), *RELAXED]))
    return draft_tree(DRAFTERS[skipping is not None][asked.layout.length], structure, rule, skipping)


def the_image(asked: Request, i: int) -> Request:
    """The request of image i alone."""

    def own(values):
        return values if values is None or len(values) == 1 else values[i : i + 1]

    layout = replace(asked.layout, forced=own(asked.layout.forced))
    strength, skippable = own(asked.strength), own(asked.skippable)
    return replace(asked, layout=layout, strength=strength, skippable=skippable, seed=asked.seed + i, batch=1)


def assert_adds_up(method, asked: Request, decoded: Result) -> None:
    layout, batch, trace, tokens = asked.layout, asked.batch, decoded.trace, decoded.tokens
    at, rounds, summary = trace.positions, trace.rounds, trace.summary()
    forced = layout.forced.expand(batch, -1)
    bound, source = forced >= 0, at["source"]
    assert torch.equal(tokens[bound], forced[bound]) and (tokens[~bound] < VOCAB).all()
    assert torch.equal(source == Source.FORCED, bound)

    # Every token is decided once, up to the last one that is not forced, and passes follow the order of the image.
    committed, turn = rounds["committed"], at["finalised_at"]
    ends = [1 + max([n for n in range(layout.length) if not row[n]], default=layout.length - 1) for row in bound]
    skipped = rounds.get("skipped", torch.zeros_like(committed, dtype=torch.bool))
    passes = (committed > 0) & ~skipped
    assert committed.sum(0).tolist() == ends
    for row, end in zip(turn, ends, strict=True):
        assert (row[:end].diff() >= 0).all() and not row[end:].any()
    assert torch.equal(source == Source.PREFILL, (turn == 0) & ~bound) and (committed[0] > 0).all()
    if not skipped.any():
        for i in range(batch):
            assert torch.equal(turn[i, : ends[i]].long().bincount(minlength=len(committed)), committed[:, i])
    assert summary["passes_per_image"] == passes.sum(0).tolist() and max(summary["passes_per_image"]) <= layout.length
    assert summary["target_passes"] == int(passes.any(1).sum()) <= layout.length

    # Counts
    given = int(bound.long().cumprod(1).sum()) + sum(layout.length - end for end in ends)
    assert summary["prefix_tokens"] == given and summary["tokens"] == int((~bound).sum())
    assert summary["sources"] == {s.name.lower(): int((source == s).sum()) for s in Source if (source == s).any()}
    accepted, relaxed = ((source == s) for s in (Source.ACCEPTED, Source.RELAXED))
    assert summary["accepted_drafts"] == int((accepted | relaxed).sum())
    if not skipped.any():
        assert int(rounds["accepted"].sum()) == summary["accepted_drafts"]
    assert summary["step_compression"] == pytest.approx((tokens.numel() - given) / sum(summary["passes_per_image"]))
    assert summary["accepted_length"] == pytest.approx(summary["tokens"] / sum(summary["passes_per_image"]))
    if "nodes" in rounds:
        assert (rounds["accepted"] <= rounds["depth"]).all() and (rounds["depth"] <= rounds["nodes"]).all()
        assert (committed[1:] <= rounds["depth"][1:] + 1).all()
        for limit, name in zip(method.structure.size(), ("nodes", "depth"), strict=True):
            assert (rounds[name] <= limit).all() and (at["tree_depth"] <= method.structure.size()[1]).all()
        drafted = rounds["depth"][1:][committed[1:] > 0].double()
        assert summary["mean_depth"] == pytest.approx(float(drafted.mean()) if len(drafted) else 0)

    # What is recorded of a token
    tested, known = accepted | relaxed | (source == Source.RESIDUAL), at["p"] >= 0
    assert (at["depth"][tested] > 0).all() and (at["depth"][source == Source.BONUS] == 0).all()
    assert (at["q"][accepted] > 0).all() and (at["refinements"] >= 0).all() and (at["entropy"] >= 0).all()
    assert (at["p"][known & ~relaxed & (source != Source.SKIPPED)] > 0).all()
    assert (at["p"] <= at["top1"] + 1e-6)[known].all()
    assert (at["p"][bound] == 1).all() and (at["drift_bound"] >= 0).all()

    # Relaxation and skipping happen only where they may.
    unverified = source == Source.SKIPPED
    strength = torch.ones(1, layout.length) if asked.strength is None else asked.strength
    relaxing = hasattr(method, "rule") and (not method.rule.lossless or getattr(method, "settle", 0) > 0)
    may = (strength > 0).expand(batch, -1) & ~bound & relaxing
    assert not relaxed[~may].any() and not at["drift_bound"][~may & ~unverified].any()
    assert asked.skippable is None or not (unverified & ~asked.skippable).any()
    assert not (skipped[1:] & skipped[:-1]).any() and unverified.any() <= skipped.any()
    assert trace.settings["lossless"] is method.lossless


def assert_row_is_single_run(method, asked: Request, together: Result, i: int) -> None:
    alone = method.sample(the_image(asked, i))
    assert torch.equal(together.tokens[i], alone.tokens[0])
    assert together.trace.totals["passes_per_image"][i] == alone.trace.totals["target_passes"]
    for name, values in alone.trace.positions.items():
        torch.testing.assert_close(together.trace.positions[name][i], values[0], msg=name)


def assert_laws(method, asked: Request, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tokens, "CHUNK", chunk)  # prefix tokens are read in passes of any size
        decoded = method.sample(asked)
        assert_adds_up(method, asked, decoded)
        assert_row_is_single_run(method, asked, decoded, asked.batch - 1)
    if asked.params.temperature == 0 and getattr(method, "skipping", None) is None:
        assert torch.equal(decoded.tokens, NextToken().sample(asked).tokens)


@st.composite
def pairs(draw) -> tuple[Request, Request]:
    """Two runs one after the other. Memory and graphs of the first serve every seed and number, and tokens kept
    elsewhere, with another strength; other switches need another graph or session."""
    first = draw(requests())
    strength = None if first.strength is None else first.strength.flip(1)
    elsewhere = replace(first.layout, forced=first.layout.forced.flip(1))
    warmer = replace(first.params, cfg=2.5 * first.params.cfg - 1.5, temperature=first.params.temperature / 2)
    second = st.sampled_from(
        [
            replace(first, layout=elsewhere, strength=strength, seed=50),
            replace(first, params=warmer, seed=40),
            replace(first, params=draw(st.sampled_from(PARAMS)), strength=torch.rand(1, first.layout.length)),
        ]
    )
    return first, draw(second)


def assert_captured_is_plain(method, asked: tuple[Request, Request]) -> None:
    same = assert_same_tree_run if isinstance(method, DraftTree) else assert_same_run
    wanted = [method.sample(each) for each in asked]
    with captured() as made:
        found = [method.sample(each) for each in asked]
    asked[0].model.sessions.clear()
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    if max(one.trace.totals["target_passes"] for one in wanted) > 3:
        assert any(graphs.captured and graphs.replayed for graphs in made)


CHUNKS = st.sampled_from([1, 2, 256])


@settings(max_examples=25)
@given(requests(), st.data(), CHUNKS)
def test_of_windows(asked, data, chunk):
    assert_laws(data.draw(windows(asked)), asked, chunk)


@settings(max_examples=20)
@given(requests(), st.data(), CHUNKS)
def test_of_trees(asked, data, chunk):
    assert_laws(data.draw(trees(asked)), asked, chunk)


@settings(max_examples=20)
@given(requests(), SKIPPING, st.data(), CHUNKS)
def test_of_skipping(asked, skipping, data, chunk):
    generator = torch.Generator().manual_seed(asked.seed)
    masks = torch.rand(data.draw(st.sampled_from([1, asked.batch])), asked.layout.length, generator=generator) < 0.7
    masked = replace(asked, skippable=data.draw(st.sampled_from([None, masks, masks])))
    assert_laws(data.draw(trees(asked, skipping)), masked, chunk)


@settings(max_examples=10)
@given(requests(), SKIPPING, st.data())
def test_a_mask_of_nothing_verifies_all_and_one_of_everything_is_none(asked, skipping, data):
    method, every = data.draw(trees(asked, skipping)), torch.ones(1, asked.layout.length, dtype=torch.bool)
    everywhere, nowhere = (method.sample(replace(asked, skippable=mask)).tokens for mask in (every, ~every))
    assert torch.equal(everywhere, method.sample(asked).tokens)
    verified = DraftTree(method.drafter, method.structure, method.rule)
    assert torch.equal(nowhere, verified.sample(asked).tokens)


@settings(max_examples=15)
@given(pairs(), st.data())
def test_captured_windows_are_plain_ones(asked, data):
    assert_captured_is_plain(data.draw(windows(asked[0])), asked)


@settings(max_examples=20)
@given(pairs(), st.data(), st.one_of(st.none(), st.none(), SKIPPING))
def test_captured_trees_are_plain_ones(asked, data, skipping):
    assert_captured_is_plain(data.draw(trees(asked[0], skipping)), asked)


@settings(max_examples=20)
@given(requests(), st.data(), st.sampled_from(INITIAL))
def test_fixed_noise_gives_the_next_token_image(asked, data, initial):
    width = data.draw(st.sampled_from([None, *range(2, min(asked.layout.length, 6) + 1)]))
    found = SJD(width, "gumbel", initial).sample(asked)
    assert torch.equal(found.tokens, NextToken().sample(asked).tokens)


@settings(max_examples=10)
@given(requests(), st.sampled_from(RELAXED), st.data())
def test_strength_zero_is_the_exact_image(asked, rule, data):
    none = replace(asked, strength=torch.zeros(1, asked.layout.length))
    window = SJD(reuse=data.draw(st.sampled_from([reuse for reuse in REUSE if reuse not in COMPARED])))
    structure = data.draw(st.one_of(st.builds(Chain, COUNTS), static_trees()))  # others match samples of the target
    tree = DraftTree(DRAFTERS[False][asked.layout.length], structure)
    for method in (window, tree):
        exact, relaxed = (replace(method, rule=each).sample(none) for each in (Exact(), rule))
        assert torch.equal(exact.tokens, relaxed.tokens) and not relaxed.trace.positions["drift_bound"].any()
