"""Trees that pay: what they cost, what they expect, which is best, what is counted, and that none of it shows."""

from dataclasses import asdict, replace
from itertools import combinations
from types import SimpleNamespace

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.reports.run_report import describe
from comfyui_specar.samplers.drafts import auto
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import (
    GAIN,
    RANKS,
    UNIT,
    Auto,
    acceptance,
    acceptance_by,
    acceptance_of,
    best_paths,
    sibling_chances,
)
from comfyui_specar.samplers.drafts.costs import PassCosts, cost_of
from comfyui_specar.samplers.drafts.structures import Extent, Static
from comfyui_specar.samplers.drafts.trees import published_paths
from comfyui_specar.samplers.methods import pass_costs as measuring
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.trace import Source

from ..support.toy import ToyDrafter, ToyModel, draft_tree, plain, request
from ..support.tree_simulation import MACHINES, AlwaysBest, simulated

LAYOUT = plain(2, 3)
SMALL = Auto(nodes=12, depth=4)


def linear(slope, drafter=0.1):
    """Costs that rise by ``slope`` for every token."""
    return PassCosts(((1, 1.0), (2, 1 + slope), (65, 1 + 64 * slope)), drafter, ((1, drafter), (64, drafter)))


def draw(structure, batch=40, seed=0, model=None, noise=1.0, **more):
    model = model or ToyModel(LAYOUT)
    drafter = ToyDrafter(model, noise=noise, stale="skipping" in more)
    return draft_tree(drafter, structure, **more).sample(request(model, LAYOUT, batch=batch, seed=seed))


# Which tree


def test_costs_lie_on_the_lines_through_the_measured_points():
    curve = ((1, 1.0), (3, 2.0), (9, 8.0))
    assert [cost_of(curve, n) for n in (1, 2, 3, 6, 9, 12)] == [1, 1.5, 2, 5, 8, 11]
    assert cost_of(((1, 0.5),), 7) == 0.5


def test_costs_are_relative_to_a_token_s_and_rounded():
    costs = PassCosts.of_seconds([(1, 2.0), (2, 2.02), (3, 9.0), (5, 4.1)], 0.2, [(1, 0.21), (4, 0.19)])
    assert costs.target == ((1, 1.0), (2, 1.0), (3, 2.0), (5, 2.0))  # no wider pass is cheaper: 9 was disturbed
    assert costs.round == 0.1051 and costs.expand == ((1, 0.0884), (4, 0.0884))
    assert PassCosts.of({**asdict(costs), "target": [list(point) for point in costs.target]}) == costs


def tokens_of(paths, accepts):
    """Tokens per round of a tree, from the definition."""
    total = 1.0
    for path in paths:
        product = 1.0
        for depth, rank in enumerate(path):
            for sibling in range(rank):
                product *= 1 - accepts[depth][sibling]
            product *= accepts[depth][rank]
        total += product
    return total


def rate_of(paths, accepts, costs):
    """Tokens per cost, from the definition."""
    inner = [len({path[:-1] for path in paths if len(path) == level + 1}) for level in range(1, 8)]
    drafter = costs.round + sum(cost_of(costs.expand, n) for n in inner if n)
    return tokens_of(paths, accepts) / (cost_of(costs.target, 1 + len(paths)) + drafter)


def closed(paths):
    """Does a set of paths hold the parents and earlier siblings of its members?"""
    return all(
        not needed or needed[-1] < 0 or needed in paths
        for path in paths
        for needed in (path[:-1], (*path[:-1], path[-1] - 1))
    )


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("first", [0.2, 0.6, 0.9])
def test_the_tree_is_the_best_of_all(slope, first):
    """All trees of up to 4 drafts and 3 levels are compared."""
    accepts, costs = acceptance_of(first, 3), linear(slope)
    names = [(a,) for a in range(4)]
    names += [(*p, a) for p in names for a in range(3)]
    names += [(*p, a) for p in names if len(p) == 2 for a in range(2)]
    names = [p for p in names if sum(p) + len(p) <= 4]  # with the parents and siblings that it needs
    trees = [set(c) for n in range(5) for c in combinations(names, n) if closed(set(c))]
    best = max(rate_of(tree, accepts, costs) for tree in trees)
    paths, tokens, rate = best_paths(accepts, costs, 4)
    assert closed(set(paths)) and len(paths) <= 4
    assert tokens == pytest.approx(tokens_of(paths, accepts)) and rate == pytest.approx(rate_of(paths, accepts, costs))
    assert tokens == pytest.approx(auto.tokens_per_round(paths, [sibling_chances(row) for row in accepts]))
    assert rate == pytest.approx(best)


def test_the_size_follows_the_acceptance():
    depths = [max(map(len, best_paths(acceptance_of(a, 8), linear(0.05), 64)[0])) for a in (0.3, 0.6, 0.9)]
    assert depths == sorted(depths) and depths[0] < depths[-1]


def test_better_than_the_published_trees_where_passes_grow():
    costs, accepts = linear(0.05, 0.07), acceptance_of(0.7, 8)
    for name in ("eagle_25", "lantern_57"):
        assert best_paths(accepts, costs, 64)[2] > rate_of(published_paths(name), accepts, costs)


# What is counted


def test_counts_are_those_of_the_trace():
    """Of a run whose rounds all have the same tree; without forgetting."""
    model = ToyModel(LAYOUT)
    tree = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    seen = []

    class Watching(Static):
        def learn(self, history, plan, tree, verified, before, after, accepted, update):
            seen.append(auto.count_tests(verified, accepted, update, 3))

    result = draw(Watching(tree.tree), batch=300, model=model)
    tests, hits = sum(seen)
    positions = result.trace.positions
    taken = (positions["source"] == Source.ACCEPTED) & (positions["depth"] > 0)
    for level in range(2):
        tested = positions["depth"] == level + 1
        for rank in range(2):
            # Of a round's last token the recorded test is that of its position, so all tests are there.
            assert int(hits[level, rank]) == int((tested & taken & (positions["rank"] == rank)).sum())
            assert int(tests[level, rank]) == int((tested & (positions["rank"] >= rank)).sum())
    assert not tests[2].any() and not tests[:, 2:].any()


def outcome(accepted, rank, tested):
    """What is counted of a round in which every image tested the drafts of two levels, or of fewer."""
    tested = torch.tensor(tested)
    return SimpleNamespace(path=tested[:, :2].long(), rank=torch.tensor(rank), tested=tested), torch.tensor(accepted)


def test_a_round_is_counted_of_the_images_that_verified_it():
    """Accepted: the second child, then none of three; nothing, as there was no draft; all, of a complete image."""
    verified, accepted = outcome(
        [1, 0, 2], [[1, 2, 0], [0, 0, 0], [0, 0, 0]], [[True, True, False], [False] * 3, [True, True, False]]
    )
    tests, hits = auto.count_tests(verified, accepted, torch.tensor([True, True, False]), 3)
    assert tests[:, :4].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0] * 4] and not tests[:, 4:].any()
    assert hits[:, :4].tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4] and not hits[:, 4:].any()


def test_every_verified_round_forgets_and_no_other():
    verified, accepted = outcome([0], [[0, 0, 0]], [[False] * 3])
    before, some = auto.Counts(torch.full((2, 3, RANKS), 8.0)), torch.ones(1) > 0
    after = SMALL.learn(before, None, None, verified, None, None, accepted, some)
    assert torch.allclose(after.values, before.values * (1 - 1 / auto.MEMORY)) and auto.MEMORY == 48
    assert SMALL.learn(before, None, None, None, None, None, accepted, some) is before


def test_acceptance_starts_at_a_guess_and_approaches_the_counts():
    nothing = [0.0] * (3 * RANKS)
    start = acceptance(nothing, nothing, 3)
    assert start == acceptance_of(auto.FIRST, 3) and all(list(row) == sorted(row, reverse=True) for row in start)
    tests, hits = list(nothing), list(nothing)
    tests[0], hits[0] = 1000.0, 200.0
    learnt = acceptance(tests, hits, 3)
    assert learnt[0][0] == pytest.approx(0.2, abs=0.01)
    assert learnt[2][0] < start[2][0] and learnt[0][1] <= learnt[0][0]  # neighbours in the table follow


def test_trees_adapt_to_the_drafter():
    """A drafter that is the target gets deeper trees than one that knows nothing, in a long image."""
    layout = plain(1, 9)
    model = ToyModel(layout, memory=1)
    depth = {}
    for noise in (0.0, 8.0):
        method = DraftTree(ToyDrafter(model, noise=noise), replace(SMALL, costs=linear(0.2)))
        rounds = method.sample(request(model, layout, batch=30)).trace.rounds
        depth[noise] = float(rounds["depth"][1:].float().mean())
    assert depth[0.0] > depth[8.0]


def test_a_tree_changes_for_a_clear_gain_only():
    """By counts that move from none accepted to all: the tree stays until another gains more than GAIN, and is then the
    best of the list. What is expected is always of the present counts."""
    structure = Auto(costs=linear(0.05))
    half, extent, kept, changed = structure.depth * RANKS, Extent(), 0, 0
    for step in range(101):
        read = (40 * UNIT,) * half + (40 * UNIT * step // 100,) * half
        before, extent = extent, structure.next_extent(extent, read)
        accepts = acceptance_by(read)
        rates = [rate_of(paths, accepts, structure.costs) for paths, _ in structure.trees()]
        best, [place] = max(rates), extent.values
        paths, _ = structure.trees()[place]
        assert extent.expected_tokens == pytest.approx(tokens_of(paths, accepts), abs=1 / UNIT)
        if before.values == extent.values:
            assert best <= GAIN * rates[place] * (1 + 1e-9)
            kept += rates[place] < best * (1 - 1e-9)
        else:
            assert rates[place] == pytest.approx(best)
            assert not before.values or best > GAIN * rates[before.values[0]] * (1 - 1e-9)
            changed += bool(before.values)
    assert kept and changed >= 3


@pytest.mark.parametrize("machine", MACHINES)
def test_few_trees_are_as_fast_as_the_best_ones(machine):
    """In simulated images. On a GPU every tree is captured."""
    costs, tokens = MACHINES[machine]
    (best, many), (speed, few) = (simulated(kind(costs=costs), tokens) for kind in (AlwaysBest, Auto))
    assert len(few) <= 6 < len(many) / 4
    assert speed >= 0.98 * best


def test_forgotten_rejections_let_drafts_be_tried_again():
    structure = Auto(costs=linear(0.3))
    counts = structure.start(1, LAYOUT, torch.device("cpu"))
    bad = counts.values.clone()
    bad[0] = 30.0
    history = auto.Counts(bad)
    none = structure.next_extent(Extent(), tuple(structure.extent(history, None, None).tolist()))
    assert none.variant == () != structure.opening.variant
    for _ in range(8 * auto.MEMORY):
        history = auto.Counts(history.values * (1 - 1 / auto.MEMORY))
    again = structure.next_extent(none, tuple(structure.extent(history, None, None).tolist()))
    assert again.variant == structure.opening.variant


# Runs


@pytest.mark.parametrize("slope", [0.0, 0.1, 5.0])
def test_the_same_costs_and_seed_give_the_same_image(slope):
    structure = replace(SMALL, costs=linear(slope))
    one, two = draw(structure), draw(structure)
    assert torch.equal(one.tokens, two.tokens)
    assert one.trace.settings["structure"]["costs"] == asdict(structure.costs)
    again = Auto(**{k: v for k, v in one.trace.settings["structure"].items() if k != "kind"})
    assert again == structure and torch.equal(draw(again).tokens, one.tokens)
    assert bool(one.trace.rounds["nodes"].any()) == (slope < 1)


def test_where_drafts_do_not_pay_nothing_is_said_of_a_broken_drafter(caplog):
    draw(replace(SMALL, costs=linear(5.0)))
    assert not caplog.records


# Measuring


@pytest.mark.parametrize(("slope", "fewest", "most"), [(0.0, 50, 64), (1.0, 0, 3)])
def test_measured_costs_choose_the_tree(monkeypatch, slope, fewest, most):
    """On a clock that a pass moves on by its cost, which rises by ``slope`` for every token."""
    now, real, target = [0.0], ToyModel.step, ToyModel(LAYOUT, memory=1)

    def step(self, state, tokens, *given, **named):
        now[0] += (1e-3 if self is target else 1e-4) * (1 + slope * tokens.shape[1])
        return real(self, state, tokens, *given, **named)

    monkeypatch.setattr(ToyModel, "step", step)
    monkeypatch.setattr(measuring, "clock", lambda: now[0])
    monkeypatch.setattr(measuring, "known", {})
    rounds = draw(Auto(), model=target, noise=0).trace.rounds
    assert fewest <= int(rounds["width"][1]) - 1 <= most


def test_a_model_that_is_loaded_again_has_the_costs_of_before(monkeypatch):
    """And measuring left its caches as they were: the image is the same without."""

    def image(seed, **loading):
        model = specar.load_model(specar.bundled("default"), **loading)
        method = specar.methods.DraftTree(specar.load_drafter(specar.bundled("default/eagle"), model))
        beginning = model.layout().beginning(24)
        return method.sample(model.request(model.encode_prompt("heart"), seed=seed, layout=beginning)).tokens

    monkeypatch.setattr(measuring, "known", {})
    one = image(3)
    measured, again = measuring.measure_passes, []
    monkeypatch.setattr(measuring, "measure_passes", lambda *given: again.append(given) or measured(*given))
    assert torch.equal(image(3), one) and not again
    image(3, dtype=torch.bfloat16)
    assert len(again) == 1, "another dtype has other costs"


def test_measuring_leaves_the_image_as_it_is():
    """The costs of a run, given to the next: the same image, which did not measure."""
    for method in ({}, {"skipping": Skipping(interval=2, guard=0)}):
        measured = draw(SMALL, **method)
        given = draw(replace(SMALL, costs=measured.trace.settings["structure"]["costs"]), **method)
        assert torch.equal(measured.tokens, given.tokens)


# ADT-Tree within what pays


def test_bounds_of_adt_tree_follow_the_cost():
    flat, steep = (ADTTree(pays=True).fit(linear(slope)) for slope in (0, 0.3))
    for one in (flat, steep):
        one.check()
        assert not one.pays
    assert flat.nodes >= 50 and steep.nodes <= 6 and steep.depths[1] <= 6
    assert steep.describe()["nodes"] == steep.nodes
    ADTTree(pays=True).fit(linear(5)).check()


def test_adt_tree_runs_within_measured_bounds():
    trace = draw(ADTTree(pays=True)).trace
    bounds = trace.settings["structure"]
    assert int(trace.rounds["nodes"].max()) <= bounds["nodes"]
    assert int(trace.rounds["depth"].max()) <= bounds["depths"][1]


def test_a_report_says_what_was_expected():
    trace = draw(replace(SMALL, costs=linear(0.1)), batch=3).trace
    summary, rounds = trace.summary(), trace.rounds
    assert len(rounds["expected"]) == len(rounds["width"]) and rounds["expected"][0] == 1
    assert 1 < summary["expected_length"] <= 1 + SMALL.depth
    assert 0 < summary["mean_nodes"] <= SMALL.nodes
    assert f"{summary['expected_length']:.2f} per pass" in describe(trace)
    assert "expected_length" not in draw(Static(((0,),)), batch=3).trace.summary()
