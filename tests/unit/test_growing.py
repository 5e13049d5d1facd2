"""Trees as they grow, against the same grown by hand: each image of a batch by itself, one draft after the other."""

import math

import pytest
import torch
from comfyui_specar.samplers.contract import SamplingParams, StepOut
from comfyui_specar.samplers.drafts.growing import Drafting, Root, grow_sampled, grow_top_k
from comfyui_specar.samplers.drafts.trees import shape_of
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.rng import Stream
from hypothesis import example, given, settings
from hypothesis import strategies as st

VOCAB, LENGTH, DEEPEST = 5, 9, 4
SHAPE = shape_of(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)))
images = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, DEEPEST), st.integers(0, 4)), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


class PathDrafter:
    """A table of logits over the paths from the root. It checks that a draft's hidden state is that of its parent, and
    that it attends to its own ancestors."""

    def __init__(self, batch: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(batch, (VOCAB + 1) ** DEEPEST, VOCAB, generator=generator) * 2
        self.fed: list[list[tuple[int, ...]]] = [[] for _ in range(batch)]

    def after(self, image: int, path: tuple[int, ...]) -> list[float]:
        """The probabilities of the next token."""
        return self.table[image, number(path)].softmax(-1).tolist()

    def root(self, committed: list[int]) -> Root:
        zeros = torch.zeros(len(committed), dtype=torch.int64)
        return Root(zeros, torch.tensor(committed), StepOut(self.table[:, :1], torch.zeros(len(committed), 1, 1)))

    def expand(self, state, tokens, position, hidden, tree_mask):
        new, lines = torch.empty_like(hidden), []
        before = len(self.fed[0])
        for b, row in enumerate(tokens.tolist()):
            for i, token in enumerate(row):
                path = (*path_of(int(hidden[b, i, 0])), token)
                self.fed[b].append(path)
                new[b, i] = number(path)
            for i, path in enumerate(self.fed[b][before:]):
                seen = [self.fed[b][j] for j in tree_mask[b, i].nonzero()[:, 0]]
                assert seen == [path[:n] for n in range(1, len(path) + 1)], "a draft sees another's ancestors"
                lines.append(self.table[b, number(path)])
        return StepOut(torch.stack(lines).unflatten(0, tokens.shape), new)


def number(path: tuple[int, ...]) -> int:
    return sum((token + 1) * (VOCAB + 1) ** n for n, token in enumerate(path))


def path_of(code: int) -> tuple[int, ...]:
    path = []
    while code:
        code, digit = divmod(code, VOCAB + 1)
        path.append(digit - 1)
    return tuple(path)


def work_of(drafter: PathDrafter, batch: int) -> Drafting:
    layout, params = TokenLayout.plain(3, 3), SamplingParams(temperature=0)
    return Drafting(drafter, None, layout, params, VOCAB, Stream.of(0, batch, torch.device("cpu")), forcing=False)


def drafts_of(tree, image: int) -> dict[tuple[int, ...], tuple[int, float]]:
    """Rank and probability of every draft that exists, by its path; parents stand before their children."""
    paths, found = {0: ()}, {}
    for slot in range(1, tree.token.shape[1]):
        if tree.exists[image, slot]:
            paths[slot] = path = (*paths[int(tree.parent[image, slot])], int(tree.token[image, slot]))
            assert len(path) == int(tree.depth[image, slot]) <= tree.levels
            found[path] = int(tree.rank[image, slot]), float(tree.probability[image, slot])
    assert len(found) == int(tree.exists[image, 1:].sum()), "two drafts on one path"
    return found


def most_likely(q: list[float], count: int) -> list[int]:
    return sorted(range(VOCAB), key=lambda token: -q[token])[:count]


def top_k_by_hand(drafter, image, levels, top_k, nodes):
    frontier, found = {(): 0.0}, {}
    for _ in range(levels):
        offered = {}
        for path, score in frontier.items():
            q = drafter.after(image, path)
            for rank, token in enumerate(most_likely(q, top_k)):
                offered[(*path, token)] = score + math.log(q[token]), rank, q[token]
        found |= offered
        best = sorted(offered, key=lambda path: -offered[path][0])[:top_k]
        frontier = {path: offered[path][0] for path in best}
    best = sorted(found, key=lambda path: -found[path][0])[:nodes]
    return {path: found[path][1:] for path in best}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for path, (rank, probability) in wanted.items():
        assert found[path] == (rank, pytest.approx(probability, rel=1e-5)), path


@given(
    images,
    st.booleans(),
    st.integers(1, DEEPEST),
    st.integers(1, 7),
    st.sampled_from([1, 3, 12, 60]),
    st.integers(0, 999),
)
@example([(0, 4, 2), (1, 3, 3), (0, 4, 4)], True, 4, 4, 60, 0)
@settings(max_examples=60, deadline=None)
def test_top_k_trees_of_a_batch_are_those_of_each_image(images, limited, levels, top_k, nodes, seed):
    """limited: by the end of the image, and by a depth and a width of its own; else all have one size."""
    drafter = PathDrafter(len(images), seed)
    committed, depth, width = (list(column) for column in zip(*images, strict=True))
    committed = committed if limited else [0] * len(images)
    limits = (torch.tensor(depth), torch.tensor(width)) if limited else ()
    tree = grow_top_k(work_of(drafter, len(images)), drafter.root(committed), levels, top_k, nodes, *limits)
    for b in range(len(images)):
        own = min(levels, depth[b], LENGTH - committed[b]) if limited else levels
        most = min(top_k, width[b] if limited else VOCAB)
        assert_same(drafts_of(tree, b), top_k_by_hand(drafter, b, own, most, nodes))


@given(st.lists(st.integers(0, LENGTH), min_size=1, max_size=4), seeds)
@settings(max_examples=40, deadline=None)
def test_sampled_trees_have_their_shape_up_to_the_end_of_the_image(committed, seed):
    """At temperature 0, where the samples are the top_k likely tokens."""
    drafter = PathDrafter(len(committed), seed)
    tree = grow_sampled(work_of(drafter, len(committed)), drafter.root(committed), SHAPE, torch.tensor(0))
    for b in range(len(committed)):
        wanted, above = {}, [()]
        for number, level in enumerate(SHAPE, 1):
            here = []
            for parent, rank in zip(level.parent, level.rank, strict=True):
                path = above[parent]
                there = path is not None and committed[b] + number <= LENGTH
                q = drafter.after(b, path) if there else []
                here.append((*path, most_likely(q, rank + 1)[-1]) if there else None)
                if there:
                    wanted[here[-1]] = rank, q[here[-1][-1]]
            above = here
        assert_same(drafts_of(tree, b), wanted)
