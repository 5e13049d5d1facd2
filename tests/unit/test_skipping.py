"""VVS: when drafts are accepted unverified and which, against the same worked out path by path."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.skipping import (
    FEATURES,
    PATHS,
    Skipping,
    choose_path,
    decide,
    path_probability,
    push_features,
    similarity,
    stale_features,
    whole_shape,
)
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import UniformRSD
from comfyui_specar.samplers.trace import Source
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.random_trees import leaf_paths, random_tree, tree_of_paths
from ..support.tiny import caption_features
from ..support.toy import ToyDrafter, ToyModel, draft_tree, plain, request, with_line_ends

seeds = st.integers(0, 10**6)
VOCAB = 5  # random trees sample ids 0 .. 5: the last is a special token without a code vector


def codes(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


# Which path, and how much of it.


@given(seeds, st.sampled_from(PATHS), st.booleans())
@settings(max_examples=50, deadline=None)
def test_paths_by_hand(seed, path, truncate):
    tree = random_tree(seed)
    u = torch.rand(len(tree.token), generator=torch.Generator().manual_seed(seed))
    slots, count = choose_path(Skipping(path=path, truncate=truncate), tree, tree, u)
    assert slots.shape == (len(u), tree.levels)
    for b in range(len(u)):
        leaves = leaf_paths(tree, b)
        if not leaves:
            assert count[b] == 0
            continue
        if path == "uniform":
            expected = leaves[int(u[b].item() * len(leaves))]
        elif path == "confident":
            expected = max(leaves, key=lambda p: math.prod(tree.probability[b, s].item() for s in p))
        else:
            expected = next(p for p in leaves if all(tree.rank[b, s] == 0 for s in p))
        mean = sum(map(len, leaves)) // len(leaves)
        assert slots[b, : int(count[b])].tolist() == expected[: mean if truncate else None]


# How alike the paths are.


def similar_by_hand(tree, b: int, codebook: torch.Tensor, decay: float) -> float:
    leaves = leaf_paths(tree, b)
    units = [*(codebook / codebook.norm(dim=1, keepdim=True)), None]  # the last token has no vector
    compared = [[units[token] for token in tree.token[b, path].tolist()] for path in leaves[::2]]
    if len(compared) < 2:
        return 0.0
    levels = max(map(len, leaves))
    weights = [decay**level / sum(decay**k for k in range(levels)) for level in range(levels)]
    total, pairs = 0.0, list(itertools.combinations(compared, 2))
    for one, other in pairs:
        for weight, x, y in zip(weights, one, other, strict=False):
            if x is not None and y is not None:
                total += weight * float(x @ y)
    return total / len(pairs)


@given(seeds, st.sampled_from((0.5, 0.9, 1.0)))
@settings(max_examples=50, deadline=None)
def test_similarity_by_hand(seed, decay):
    tree, codebook = random_tree(seed, drafts=14), codes(seed)
    found = similarity(tree, codebook, decay)
    for b in range(len(found)):
        assert found[b].item() == pytest.approx(similar_by_hand(tree, b, codebook, decay), abs=1e-5)
    tree.token.fill_(1)
    assert (similarity(tree, codebook, decay) <= 1).all(), "a threshold above 1 never skips"


# When.


def run_of(skipping: Skipping, tree, rounds: int, codebook=None) -> list[list[bool]]:
    """Decisions in a row for every image, each growing by two tokens a round."""
    batch = len(tree.token)
    committed, last, seen = torch.ones(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.bool), []
    for number in range(1, rounds + 1):
        alike = None if codebook is None else similarity(tree, codebook, skipping.decay)
        last = decide(skipping, tree, tree, alike, number, committed, torch.tensor(10**6), last)
        committed = committed + 2
        seen.append(last.tolist())
    return [list(image) for image in zip(*seen, strict=True)]


@pytest.mark.parametrize("interval", [2, 3, 4, 7])
def test_uniform_skips_every_nth_round(interval):
    decisions = run_of(Skipping(interval=interval, guard=0), tree_of_paths(2, 1), 30)[0]
    assert decisions == [n % interval == 0 for n in range(1, 31)]


def test_dynamic_skips_where_paths_are_alike_enough():
    """S of the first image is 0.5 / 1.5, of the second 1; a skip, then a verified round."""
    alone, codebook = tree_of_paths(2, 2, 2), torch.eye(4)[[0, 0, 2, 3, 3, 1, 2]]
    names = ("token", "parent", "depth", "rank", "exists", "probability")
    tree = replace(alone, **{name: getattr(alone, name).repeat(2, 1) for name in names})
    tree.token[1] = 2
    for threshold, expected in ((0.3, (True, True)), (0.5, (False, True)), (1.0001, (False, False))):
        chosen = Skipping("dynamic", threshold=threshold, decay=0.5, guard=0)
        for image, skips in zip(run_of(chosen, tree, 6, codebook), expected, strict=True):
            assert image == ([True, False] * 3 if skips else [False] * 6)


@given(seeds, st.booleans(), st.integers(0, 9), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_limits_by_hand(seed, truncate, guard, length):
    """The guard at the start, a token left at the end, no empty tree, and a mask that all of the path lies inside."""
    tree, generator = random_tree(seed), torch.Generator().manual_seed(seed)
    committed = torch.randint(1, length + 1, (len(tree.token),), generator=generator)
    last, number = torch.rand((2, len(committed)), generator=generator) < 0.3
    mask = torch.rand((len(committed), length), generator=generator) < 0.8
    chosen = Skipping(interval=2, truncate=truncate, guard=guard)
    end = torch.tensor(length)
    skip, masked = (decide(chosen, tree, tree, None, 4 + number, committed, end, last, each) for each in (None, mask))
    for b in range(len(skip)):
        lengths = [len(path) for path in leaf_paths(tree, b)]
        most = (sum(lengths) // len(lengths) if truncate else max(lengths)) if lengths else 0
        n = int(committed[b])
        assert bool(skip[b]) == (most > 0 and not last[b] and not number[b] and n > guard and length - n >= most + 1)
        assert bool(masked[b]) == bool(skip[b] and mask[b, n : n + most].all())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"structure": Chain(0)}, "length"),
        ({"rule": UniformRSD(0.5)}, "delta"),
        ({"skipping": Skipping(interval=1)}, "interval"),
        ({"structure": Chain(2, "block"), "rule": UniformRSD(2)}, "(?i)block"),
    ],
)
def test_every_part_of_a_method_is_checked(changed, named):
    with pytest.raises(ValueError, match=named):
        replace(VVS(DRAFTER, Chain(2)), **changed).check(request(MODEL, LAYOUT))


def test_a_model_without_codes_is_refused_before_anything_runs():
    asked = request(MODEL, LAYOUT)
    bare = SimpleNamespace(**{name: getattr(MODEL, name) for name in ("vocab", "vocab_total", "device")}, codebook=None)
    method = VVS(DRAFTER, Chain(2), skipping=Skipping("dynamic"))
    method.check(asked)
    with pytest.raises(ValueError, match="codebook"):
        method.check(replace(asked, model=bare))


@given(seeds, st.booleans(), st.sampled_from(PATHS))
@settings(max_examples=60, deadline=None)
def test_the_probability_of_a_path_by_hand(seed, sampled, path):
    """A path at random: the share of the leaves that go the same way; what is certain to be chosen keeps its q."""
    tree = random_tree(seed)
    if sampled:
        tree = replace(tree, draft_probs=torch.zeros(3, 1, 6))
    slots, _ = choose_path(
        Skipping(path=path), tree, tree, torch.rand(3, generator=torch.Generator().manual_seed(seed))
    )
    found = path_probability(Skipping(path=path), tree, tree, slots)
    for b in range(3):
        paths, chosen = leaf_paths(tree, b), [int(slot) for slot in slots[b] if slot > 0]
        alone = all(int(tree.rank[b, slot]) == 0 for line in paths for slot in line)
        for level, slot in enumerate(chosen):
            drafted = float(tree.probability[b, slot])
            same = [line for line in paths if line[:level] == chosen[:level]]
            share = sum(line[: level + 1] == chosen[: level + 1] for line in same) / len(same)
            if path == "uniform":
                wanted = drafted if sampled and share == 1 else share
            elif path == "first":
                wanted = drafted if sampled else 1.0
            else:
                wanted = drafted if sampled and alone else 1.0
            assert float(found[b, level]) == pytest.approx(wanted), (path, level)


def test_of_a_sampled_tree_what_is_planned_decides():
    """The second child of the first of two is missing: its mass is not, until it is the only one to be asked. Nor do
    the last two of five positions, or a forced one, leave any choice."""
    tree = tree_of_paths(2, 1)  # slots 1 - 2 and 3; the child in slot 4 has not been sampled
    more = {"token": 5, "parent": 1, "depth": 2, "rank": 1, "exists": 0, "probability": 0}
    values = {name: torch.cat((getattr(tree, name), torch.tensor([[x]])), 1) for name, x in more.items()}
    values["exists"] = values["exists"] > 0
    tree = replace(tree, **values, draft_probs=torch.zeros(1, 1, 6))
    one, chosen = torch.ones(1, dtype=torch.int64), Skipping(truncate=False)
    planned = whole_shape(tree, one, plain(1, 9))
    assert planned.exists.all() and int(planned.leaves().sum()) == 3
    for u, wanted in ((0.6, [1, 2]), (0.7, [3, 0])):  # not half, as of the two leaves that exist
        slots, count = choose_path(chosen, tree, planned, torch.tensor([u]))
        assert slots.tolist() == [wanted] and int(count) == (2 if wanted[1] else 1)
        q = path_probability(chosen, tree, planned, slots)[0]
        assert float(q[0]) == pytest.approx(2 / 3 if wanted[1] else 1 / 3)
    assert whole_shape(tree, 4 * one, plain(1, 5)).exists.tolist() == [[True, True, False, True, False]]
    forced = replace(plain(1, 9), forced=torch.tensor([[-1, -1, 0, -1, -1, -1, -1, -1, -1]]))
    assert whole_shape(tree, one, forced).exists.tolist() == [[True, True, True, True, False]]
    assert whole_shape(tree, 2 * one, forced).exists.tolist() == [[True, True, True, False, True]]
    assert whole_shape(replace(tree, draft_probs=None), one, plain(1, 9)).exists.tolist() == tree.exists.tolist()


# What a feature drafter is fed meanwhile.


@given(seeds, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_features_by_hand(seed, kept, width, extra, guided):
    """Hidden states pushed in pieces; asked for the newest. Rows of both branches of guidance share the counts."""
    generator, batch = torch.Generator().manual_seed(seed), 2

    def drawn(most: int) -> torch.Tensor:
        return torch.randint(most + 1, (batch,), generator=generator)

    rows = batch * (1 + guided)
    first = torch.randn(rows, 1, 2, generator=generator)
    features, known, fed = first.expand(-1, kept, -1), torch.ones(batch, dtype=torch.int64), [[x[0]] for x in first]
    for _ in range(4):
        new, count = torch.randn(rows, 3, 2, generator=generator), drawn(3)
        features, known = push_features(features, new, count), known + count
        for r in range(rows):
            fed[r] += list(new[r, : int(count[r % batch])])
        assert features.shape == (rows, kept, 2)
        asked, place = drawn(width), torch.arange(width).expand(batch, -1)
        hidden = stale_features(features, known, asked, place, torch.tensor(extra))
        assert hidden.shape == (rows, width, 2)
        for r in range(rows):
            count = int(asked[r % batch])
            there = fed[r][-kept:]
            there = there[: max(1, len(there) - extra)]
            newest = there[-count:] if count else []
            newest += [there[-1]] * (width - len(newest))
            assert torch.equal(hidden[r], torch.stack(newest))


class Watched(ToyDrafter):
    """Notes what it is given of every token: its position, and the number of the prefix that its feature is of."""

    def observe(self, state, tokens, positions, hidden, count):
        here = slice(int(count[0]))
        self.seen.append(list(zip(positions[0, here].tolist(), hidden[0, here, 0].tolist(), strict=True)))
        return super().observe(state, tokens, positions, hidden, count)


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("features", FEATURES)
def test_what_the_drafter_gets_of_every_round(features, refresh):
    """The features of these tokens, of those just before the round, or of older ones, round by round by hand."""
    layout, (first, second, turns) = plain(2, 5), FEATURES[features]
    toy, skips = ToyModel(layout), Skipping(interval=3, guard=1, features=features, refresh=refresh, path="first")
    drafter = Watched(toy, stale=True)
    for seed in range(4):
        drafter.seen = []
        out = VVS(drafter, Chain(3), skipping=skips).sample(request(toy, layout, seed=seed))
        tokens, rounds = out.tokens[0].tolist(), out.trace.rounds
        number = [sum(t * 3 ** (n - 1 - i) for i, t in enumerate(tokens[:n])) for n in range(len(tokens) + 1)]
        assert drafter.seen[0] == [(0, number[0])]
        begin, newest, uncached = 1, 0, 0  # newest: the longest prefix whose feature is known
        for turn, (committed, skipped) in enumerate(
            zip(rounds["committed"][1:, 0].tolist(), rounds["skipped"][1:, 0].tolist(), strict=True), 1
        ):
            stale = (second if turn % 2 == 0 else first) if turns else (second if skipped else first)
            stale = max(stale, 0) if skipped else stale
            wanted = []
            if not skipped and refresh:
                wanted = [(n, number[n]) for n in range(begin - uncached, begin)]
            if stale < 0:
                wanted += [(n, number[n]) for n in range(begin, begin + committed)]
            else:
                last = max(newest - stale, 0)
                there = range(max(last - committed + 1, 0), last + 1)
                ages = [*there, *[last] * (committed - len(there))]
                wanted += [(begin + i, number[age]) for i, age in enumerate(ages)]
            if turn < len(drafter.seen):  # the last round has nobody to tell
                assert drafter.seen[turn] == wanted, (seed, turn)
            begin, uncached = begin + committed, committed if skipped else 0
            newest = newest if skipped else begin - 1


# Whole runs.

LAYOUT = with_line_ends(2, 3)
MODEL = ToyModel(LAYOUT, 2)
DRAFTER = ToyDrafter(MODEL, stale=True)
STRUCTURES = {"static": Static(((0,), (1,), (2,), (0, 0))), "dynamic": Dynamic(2, 3, 5), "chain": Chain(2)}


def draw(structure, skipping, seed=0, batch=1):
    return draft_tree(DRAFTER, structure, skipping=skipping).sample(request(MODEL, LAYOUT, seed=seed, batch=batch))


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_without_a_skip_nothing_changes(structure):
    plain = draw(structure, None, batch=16)
    never = Skipping(interval=1000), Skipping("dynamic", threshold=1.0001, guard=0), Skipping(interval=2, guard=99)
    for skipping in never:
        assert torch.equal(draw(structure, skipping, batch=16).tokens, plain.tokens)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_a_token_taken_unverified_drifts_by_what_its_ratio_lacks(structure):
    positions = draw(structure, Skipping(interval=2, guard=1, path="first"), batch=64).trace.positions
    known = (positions["source"] == Source.SKIPPED) & (positions["p"] >= 0)
    ratio, drift = positions["ratio"][known], positions["drift_bound"][known]
    assert (ratio < 1).any() and ((ratio > 1).any() or isinstance(structure, Dynamic)), "nothing to tell apart"
    assert torch.equal(drift, (1 - ratio).clamp(min=0))


@pytest.mark.parametrize("skips", [None, Skipping(interval=2, guard=1)])
def test_a_pass_is_fed_the_tokens_that_are_not_cached_and_the_drafts(skips):
    """Three drafts, and the root; after a skipped round also the up to three tokens it took."""
    rounds = draw(Chain(3), skips, batch=8).trace.rounds
    first = {name: rounds[name][0].tolist() for name in ("accepted", "committed", "nodes", "depth")}
    assert first == {"accepted": [0] * 8, "committed": [1] * 8, "nodes": [0] * 8, "depth": [0] * 8}
    skipped = rounds["skipped"].any(1)
    wanted = [1] + [
        0 if now.all() else 4 + 3 * bool(before) for before, now in zip(skipped, rounds["skipped"][1:], strict=False)
    ]
    assert rounds["width"].tolist() == wanted


@pytest.mark.parametrize("schedule", ["uniform", "dynamic"])
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_the_similarity_of_every_tree_is_recorded(structure, schedule, monkeypatch):
    """At all tokens that its round decided; a threshold of the dynamic schedule is compared with these numbers."""
    found = []
    where = "comfyui_specar.samplers.methods.vvs.similarity"
    monkeypatch.setattr(where, lambda *tree: found.append(similarity(*tree)) or found[-1])
    trace = draw(structure, Skipping(schedule, interval=2, threshold=0.3, guard=0), batch=8).trace
    end = trace.rounds["committed"].cumsum(0)
    for number, alike in enumerate(found[: len(end) - 1], 1):
        for b in range(8):
            recorded = trace.positions["similarity"][b, end[number - 1, b] : end[number, b]]
            assert torch.equal(recorded, alike[b].expand_as(recorded))
            if schedule == "dynamic" and trace.rounds["skipped"][number, b]:
                assert (recorded >= 0.3).all()
    assert trace.positions["similarity"].any() or isinstance(structure, Chain)


def test_without_codes_the_uniform_schedule_records_no_similarity():
    bare = ToyModel(LAYOUT, 2)
    bare.codebook = None
    method = VVS(DRAFTER, STRUCTURES["dynamic"], skipping=Skipping(interval=2, guard=0))
    trace = method.sample(request(bare, LAYOUT)).trace
    assert not trace.positions["similarity"].any() and trace.rounds["skipped"].any()


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_the_targets_p_of_every_token_is_recorded(structure):
    """Also with as many tokens taken unverified as their own path has."""
    out = draw(structure, Skipping(interval=2, guard=1, truncate=False), batch=8)
    distribution, free = MODEL.distribution(LAYOUT, SamplingParams()), LAYOUT.forced[0] < 0
    for image, p in zip(out.tokens.tolist(), out.trace.positions["p"], strict=True):
        assert float(p[free].double().prod()) == pytest.approx(distribution[tuple(image)], rel=1e-4)


def test_progress_counts_no_pass_for_a_skipped_round():
    seen = []
    asked = request(MODEL, LAYOUT, callback=lambda progress: seen.append(progress.passes))
    method = VVS(DRAFTER, STRUCTURES["chain"], skipping=Skipping(interval=2, guard=1))
    rounds = method.sample(asked).trace.rounds
    assert seen == (~rounds["skipped"][:, 0].bool()).cumsum(0).tolist() and len(set(seen)) < len(seen)


def test_skipping_saves_passes():
    def passes(skipping):
        return sum(draw(Chain(1), skipping, batch=64).trace.totals["passes_per_image"])

    assert max(passes(Skipping(interval=interval, guard=1)) for interval in (2, 3)) < passes(None)


def test_the_interface_takes_a_mask(text_model, text_drafters):
    method = api.methods.VVS(text_drafters["model"], Chain(1), Exact(), interval=2, guard=0)
    prompt, where = text_model.encode_features(caption_features(5)), torch.zeros(4, 4, dtype=torch.bool)
    where[2:, 1:] = True
    trace = api.sample(text_model, prompt, method, skippable=where, batch_size=2).trace
    skipped = trace.grid("source") == Source.SKIPPED
    assert skipped.any() and not (skipped & ~where).any()
