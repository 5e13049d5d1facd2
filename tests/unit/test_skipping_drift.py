"""VVS: the drift bound of drafts accepted unverified, against distributions that are enumerated tree by tree."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from comfyui_specar.kernels.sampling import take
from comfyui_specar.samplers.contract import SamplingParams, StepOut
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.drafts.trees import Tree
from comfyui_specar.samplers.methods.skipping import (
    PATHS,
    Skipping,
    choose_path,
    decide,
    path_probability,
    similarity,
    whole_shape,
)
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.methods.vvs import VVS
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.random_trees import leaf_paths, random_tree, row, tree_of_paths
from ..support.toy import ToyDrafter, ToyModel, chi_square, plain, request

seeds = st.integers(0, 10**6)
LONG = plain(1, 99)


class Table:
    """Next-token distributions over ``vocab`` tokens after every prefix, drawn when asked for. thinned: filters leave
    one token after a 0."""

    def __init__(self, seed: int, vocab: int, thinned: bool = False):
        self.generator, self.vocab, self.rows = torch.Generator().manual_seed(seed), vocab, {}
        self.thinned = thinned

    def __call__(self, prefix: tuple[int, ...]) -> list[float]:
        if prefix not in self.rows:
            logits = 1.5 * torch.randn(self.vocab, generator=self.generator, dtype=torch.float64)
            if self.thinned and prefix[-1:] == (0,):
                logits[logits < logits.max()] = -torch.inf
            self.rows[prefix] = logits.softmax(-1).tolist()
        return self.rows[prefix]

    def extended(self, sampled: dict, prefix: tuple[int, ...], mass: float, length: int) -> None:
        """Add to a distribution the sequences of ``length`` tokens that continue ``prefix`` as this table does."""
        if len(prefix) == length:
            sampled[prefix] = sampled.get(prefix, 0.0) + mass
            return
        for token, p in enumerate(self(prefix)):
            self.extended(sampled, (*prefix, token), mass * p, length)


def distance(sampled: dict, other: dict) -> float:
    return sum(abs(sampled.get(key, 0.0) - other.get(key, 0.0)) for key in sampled.keys() | other.keys()) / 2


def rows(tree: Tree, count: int) -> Tree:
    """A tree for each of several images."""
    fields = ("token", "parent", "depth", "rank", "exists", "probability")
    return replace(tree, **{name: getattr(tree, name).expand(count, -1) for name in fields})


def drift(trees, chosen: Skipping, target: Table, length: int) -> tuple[float, float, float]:
    """How far a skipped round drifts over trees (with their probabilities): the total variation of what it takes,
    continued by the target, and the target's own; the mean of the bounds; the same with q = 1 throughout."""
    sampled, exact, bound, certain = {}, {}, 0.0, 0.0
    target.extended(exact, (), 1.0, length)
    for tree, chance in trees:
        draws = 120 if tree.sampled else len(leaf_paths(tree, 0))  # a multiple of what shares have as denominators
        draws = draws if chosen.path == "uniform" else 1
        same = rows(tree, draws)
        planned = whole_shape(same, torch.ones(draws, dtype=torch.int64), LONG)
        slots, count = choose_path(chosen, same, planned, (torch.arange(draws) + 0.5) / draws)
        q, drawn = path_probability(chosen, same, planned, slots).tolist(), same.token.gather(1, slots).tolist()
        for line, ratios, taken in zip(drawn, q, count.tolist(), strict=True):
            tokens = tuple(line[:taken])
            for place, token in enumerate(tokens):
                p = target(tokens[:place])[token]
                bound += chance / draws * max(0.0, 1 - p / ratios[place])
                certain += chance / draws * (1 - p)
            target.extended(sampled, tokens, chance / draws, length)
    return distance(sampled, exact), bound, certain


@given(seeds, st.sampled_from(PATHS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_of_trees_of_the_likeliest_tokens(seed, path, truncate):
    tree = row(random_tree(seed, batch=3), 2)
    if not leaf_paths(tree, 0):
        return
    found, bound, certain = drift([(tree, 1.0)], Skipping(path=path, truncate=truncate), Table(seed, 6), tree.levels)
    assert found <= bound + 1e-5
    assert bound <= certain + 1e-5 if path == "uniform" else bound == pytest.approx(certain, abs=1e-5)


def test_of_one_token_the_bound_is_the_drift():
    """Four leaves below the root: the token is any of four with 1/4 each."""
    tree, target = tree_of_paths(1, 1, 1, 1), Table(0, 6)
    found, bound, certain = drift([(tree, 1.0)], Skipping(), target, 1)
    assert found == pytest.approx(sum(max(0.0, 0.25 - p) for p in target(())[1:5]), abs=1e-6)
    assert found == pytest.approx(bound, abs=1e-6) and bound < certain - 0.1


def sampled_trees(drafter: Table, shape: tuple[tuple[int, ...], ...]):
    """Every tree that sampling without replacement can grow in this shape (children of a slot in order), with its
    probability."""

    def grown(prefix: tuple[int, ...], path: tuple[int, ...]):
        """Ways to draw the children of a draft, and theirs: nodes as (path, token, q), and the probability."""
        q = drafter(prefix)
        likely = [token for token in range(drafter.vocab) if q[token]]
        count = sum(len(p) == len(path) + 1 and p[: len(path)] == path for p in shape)
        for drawn in itertools.permutations(likely, min(count, len(likely))):
            chance, left = 1.0, 1.0
            for token in drawn:
                chance, left = chance * q[token] / left, left - q[token]
            below = [list(grown((*prefix, token), (*path, rank))) for rank, token in enumerate(drawn)]
            for parts in itertools.product(*below):
                nodes = [((*path, rank), token, q[token]) for rank, token in enumerate(drawn)]
                yield nodes + [node for part, _ in parts for node in part], chance * math.prod(w for _, w in parts)

    for nodes, chance in grown((), ()):
        alive = [path for path, _, _ in nodes]
        nodes += [(path, 0, 0.0) for path in shape if path not in alive]
        nodes = sorted(nodes, key=lambda node: (len(node[0]), node[0]))
        slot = {(): 0} | {path: number for number, (path, _, _) in enumerate(nodes, 1)}
        columns = ((token, slot[path[:-1]], len(path), path[-1]) for path, token, _ in nodes)
        token, parent, depth, rank = torch.tensor([(0, 0, 0, 0), *columns]).T[:, None]
        q = torch.tensor([[1.0, *(q for _, _, q in nodes)]])
        levels, width = max(map(len, slot)), max(path[-1] for path, _, _ in nodes) + 1
        yield Tree(token, parent, depth, rank, q > 0, q, levels, width, torch.empty(1)), chance


SHAPES = {
    "chain": ((0,), (0, 0)),
    "siblings": ((0,), (1,)),
    "two and one": ((0,), (1,), (0, 0)),
    "two each": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("path", PATHS)
def test_of_sampled_trees(path, shape):
    for seed in range(4):
        trees = list(sampled_trees(Table(seed + 50, 3), shape))
        assert sum(chance for _, chance in trees) == pytest.approx(1)
        found, bound, certain = drift(trees, Skipping(path=path), Table(seed, 3), 2)
        assert found <= bound + 1e-5 and bound <= certain + 1e-5
        if path != "confident" or shape == SHAPES["chain"]:
            assert bound < certain - 0.01  # what is known of the path is used


THINNED = {
    "children of a child": ((0,), (1,), (2,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2)),
    "children of one of two": ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1)),
}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("shape", THINNED.values(), ids=THINNED)
@pytest.mark.parametrize("path", PATHS)
def test_of_sampled_trees_that_top_p_has_thinned_out(path, shape, truncate):
    """How many children a draft has tells which token it is. That decides neither how many tokens are taken, nor their
    path, nor whether any are: with the target as the drafter, the first children do not drift at all."""
    chosen = Skipping(interval=2, guard=0, path=path, truncate=truncate)
    one, no = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    target = Table(0, 3, thinned=True)
    for drafter in (target, Table(50, 3, thinned=True)):
        trees = list(sampled_trees(drafter, shape))
        assert len({int(tree.leaves().sum()) for tree, _ in trees}) > 1
        found, bound, _ = drift(trees, chosen, target, 3)
        assert found <= bound + 1e-5
        assert bound < 1e-5 or path != "first" or drafter is not target
        for end in range(2, 5):
            plans = ((tree, whole_shape(tree, one, LONG)) for tree, _ in trees)
            assert len({bool(decide(chosen, *plan, None, 2, one, end * one, no)) for plan in plans}) == 1


def verified(tokens: list[int], p: list[float], q: list[float]) -> list[float]:
    """The distribution of the token after an exact test of siblings that were sampled in this order, one by one."""
    sampled, left = [0.0] * len(p), 1.0
    for token in tokens:
        accepted = min(1.0, p[token] / q[token])
        sampled[token] += left * accepted
        left *= 1 - accepted
        over = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        if left < 1e-12 or not sum(over):
            return sampled
        p = [x / sum(over) for x in over]
        q = [0.0 if x == token else b / (1 - q[token]) for x, b in enumerate(q)]
    return [a + left * b for a, b in zip(sampled, p, strict=True)]


def test_sampled_trees_that_decide_themselves_have_no_bound():
    """The dynamic schedule skips three siblings if the first and the third look alike: what is verified is no sample
    from the drafter any more, and the images drift by more than the unverified tokens say. The trace claims none."""
    p, q = [0.05, 0.3, 0.1, 0.55], [0.7, 0.1, 0.1, 0.1]
    drafter, target = Table(0, 4), Table(0, 4)
    drafter.rows[()], target.rows[()] = q, p
    codes, chosen = torch.eye(4)[[0, 0, 1, 2]], Skipping("dynamic", threshold=0.5, guard=0)
    trees = list(sampled_trees(drafter, ((0,), (1,), (2,))))
    one, no = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    sampled, skipped = {(x,): 0.0 for x in range(4)}, []
    for tree, chance in trees:
        tokens = tree.token[0, 1:].tolist()
        if decide(chosen, tree, tree, similarity(tree, codes, chosen.decay), 1, one, 9 * one, no):
            skipped.append((tree, chance))
            taken = [tokens.count(x) / 3 for x in range(4)]
        else:
            taken = verified(tokens, p, q)
        for x in range(4):
            sampled[x,] += chance * taken[x]
    assert 0 < len(skipped) < len(trees)
    assert sum(sampled.values()) == pytest.approx(1, abs=1e-6)
    bound = drift(skipped, chosen, target, 1)[1]
    assert distance(sampled, {(x,): p[x] for x in range(4)}) > bound + 0.05


RUNS = 12_000
LAYOUT = plain(2, 3)
TOY = ToyModel(LAYOUT)
EXACT = TOY.distribution(LAYOUT, SamplingParams())


def drawn(structure, schedule: str, path: str, batch: int = RUNS):
    skipping = Skipping(schedule, interval=2, guard=0, threshold=0.1, path=path)
    method = VVS(ToyDrafter(TOY, stale=True), structure, skipping=skipping)
    return method.sample(request(TOY, LAYOUT, batch=batch))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("structure", [Dynamic(2, 3, 5), Static(((0,), (1,), (2,), (0, 0)))], ids=lambda s: s.kind)
def test_whole_runs(structure, path):
    out = drawn(structure, "uniform", path)
    noise = chi_square(DraftTree(ToyDrafter(TOY), structure).sample(request(TOY, LAYOUT, batch=RUNS)).tokens, EXACT).tv
    assert chi_square(out.tokens, EXACT).tv <= out.trace.drift_bound + noise
    assert out.trace.drift_bound > 0.05


class Feeling(ToyDrafter):
    """Its predictions depend on the features that it is given."""

    def observe(self, state, tokens, positions, hidden, count):
        out = super().observe(state, tokens, positions, hidden, count)
        last = take(hidden, (count - 1).clamp(min=0)[:, None])
        return StepOut(out.logits + 2 * torch.sin(last + torch.arange(out.logits.shape[-1])).float(), out.hidden)


@pytest.mark.parametrize("features", ["-1, 3", "3, 3", "-1 or 5"])
@pytest.mark.parametrize("structure", [Dynamic(2, 3, 5), Static(((0,), (1,), (2,), (0, 0)))], ids=lambda s: s.kind)
def test_stale_features_change_drafts_but_no_distribution(structure, features):
    """Without skips images are exact, and with them the bound holds."""
    drafter, asked = Feeling(TOY, stale=True), request(TOY, LAYOUT, batch=RUNS)
    never, often = (
        VVS(drafter, structure, skipping=Skipping(schedule, 2, threshold=2.0, guard=0, features=features))
        for schedule in ("dynamic", "uniform")
    )
    exact, plain_run = never.sample(asked), DraftTree(drafter, structure).sample(asked)
    assert torch.equal(exact.tokens, plain_run.tokens) == (features == "-1, 3"), "nothing was stale"
    found = chi_square(exact.tokens, EXACT)
    assert found.z < 4
    skipped = often.sample(asked)
    assert chi_square(skipped.tokens, EXACT).tv <= skipped.trace.drift_bound + found.tv


def test_the_trace_tells_whether_the_bound_is_known():
    """Of every structure but trees that are sampled and decide themselves."""
    adapted = ADTTree(depths=(1, 3), widths=(1, 3), width_step=1, first=(2, 3), nodes=8)
    for structure in (Dynamic(2, 3, 5), Chain(2), adapted, Static(((0,), (1,), (2,), (0, 0)))):
        trace = drawn(structure, "dynamic", "uniform", batch=4).trace
        unknown = isinstance(structure, Static)
        assert (trace.drift_bound is None) == unknown == (trace.summary()["drift_bound"] is None)
