"""ADT-Tree: the paper's numbers, and every way of choosing a shape against the same done cell by cell."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.reports.run_report import describe
from comfyui_specar.samplers.drafts.adt_tree import ANOLE, FLOCK_DISTANCE, INITIAL, ADTTree
from comfyui_specar.samplers.drafts.structures import Extent
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.speculative import DraftTree
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.toy import ToyDrafter, ToyModel, plain, request, with_line_ends

GRID = TokenLayout.plain(8, 8)


def tree_of(levels: torch.Tensor) -> SimpleNamespace:
    """All that is learned from a tree: how many levels it really had."""
    return SimpleNamespace(spread=lambda: (levels, None))


def shapes(adt: ADTTree, accept, rounds: int, batch: int = 1, layout: TokenLayout = GRID) -> list[tuple[int, int]]:
    """Shapes asked for in a run where accept(depth) drafts pass each round and the trees are whole."""
    history, committed, seen = adt.start(batch, layout, "cpu"), torch.ones(batch, dtype=torch.int64), []
    for _ in range(rounds):
        plan = adt.shape(history, committed, layout, torch.zeros(batch, 2))
        seen.append((int(plan[0][0]), int(plan[1][0])))
        accepted = accept(plan[0])
        after = committed + accepted + 1
        history = adt.learn(history, plan, tree_of(plan[0]), None, committed, after, accepted, committed > 0)
        committed = after
    return seen


def all_of(depth):
    return depth


def none_of(depth):
    return torch.zeros_like(depth)


def test_published_sequences():
    assert shapes(ANOLE, all_of, 6) == [(5, 10), (6, 7), (7, 4), (8, 4), (9, 4), (9, 4)]
    assert shapes(ANOLE, none_of, 6) == [(5, 10), (4, 13), (3, 13), (2, 13), (1, 16), (1, 19)]
    assert shapes(ADTTree(), all_of, 5) == [(5, 10), (6, 4), (7, 4), (8, 4), (9, 4)]
    assert shapes(ADTTree(), none_of, 7) == [(5, 10), (4, 20), (3, 30), (2, 39), (1, 49), (1, 58), (1, 58)]


def test_the_threshold_counts_as_reached():
    """alpha >= beta, although neither 3/5 nor 0.6 is exact in binary."""
    adt = ADTTree(beta=0.6)
    assert shapes(adt, lambda depth: torch.full_like(depth, 3), 2)[1] == (6, 4)
    assert shapes(adt, lambda depth: torch.full_like(depth, 2), 2)[1] == (4, 20)


@pytest.mark.parametrize(
    ("base", "deeper", "shallower"),
    [((1, 0), (2, 4), (1, 58)), ((0, 25), (9, 15), (1, 35)), ((1, 25), (2, 15), (1, 35))],
)
def test_a_fixed_base_is_changed_by_one_step_only(base, deeper, shallower):
    """Table V as printed: with the steps of LlamaGen, a base of one level has trees of one or two."""
    adt = ADTTree(base=base)
    assert shapes(adt, all_of, 9)[-1] == deeper and shapes(adt, none_of, 9)[-1] == shallower


@pytest.mark.parametrize("base", [(0, 0), (1, 3), (1, 8), (2, 4), (1, 64), (3, 4), (9, 3)])
def test_a_fixed_base_that_the_trees_cannot_have_is_a_notice(base, caplog):
    """Trees of at most 2 levels, of 4 drafts if there are two and of 8 if there is one."""
    adt, model = ADTTree(depths=(1, 2), widths=(1, 4), first=(2, 3), nodes=8, base=base), ToyModel(plain(2, 3))
    for structure in (adt, replace(adt, pays=True)):
        caplog.clear()
        trace = DraftTree(ToyDrafter(model), structure).sample(request(model, plain(2, 3))).trace
        beyond = base in ((1, 64), (3, 4), (9, 3))
        if beyond or not structure.pays:  # what pays here may be less than what is asked for
            assert bool(trace.notices) == beyond
        assert trace.notices == caplog.messages
        if trace.notices:
            [notice] = trace.notices
            assert f"depth {base[0]}, width {base[1]};" in notice and "pays=False" in notice
            assert describe(trace).endswith(notice)


# The same, image by image and cell by cell.


class ByHand:
    """One image's memory as a dictionary of position -> (depth, width, alpha or None)."""

    def __init__(self, adt: ADTTree, layout: TokenLayout):
        self.adt, self.layout, self.forced = adt, layout, (layout.forced[0] >= 0).tolist()
        self.opening = (*self.clamp(*adt.first), None)
        self.last, self.at = self.opening, {}

    def clamp(self, depth, width):
        adt = self.adt
        depth = min(max(depth, adt.depths[0]), adt.depths[1])
        width = max(width, adt.widths[0])
        return depth, min(width, adt.nodes) if depth == 1 else min(width, adt.widths[1], adt.nodes)

    def above(self, position):
        up = position - self.layout.stride
        while up > 0 and self.forced[up]:
            up -= 1
        return self.at.get(up, self.last) if position >= self.layout.stride else self.last

    def flock(self, position):
        total, depth, width = 0.0, 0.0, 0.0
        for other in range(position):
            if self.forced[other] or other not in self.at:
                continue
            rows = position // self.layout.stride - other // self.layout.stride
            columns = position % self.layout.stride - other % self.layout.stride
            distance = math.hypot(rows, columns)
            if distance <= self.adt.radius:
                minus = distance if self.adt.flock_distance == "euclidean" else columns
                weight = (self.adt.radius - minus + 1) / self.adt.radius
                total += weight
                depth += weight * self.at[other][0]
                width += weight * self.at[other][1]
        if not total:
            return self.last
        return math.floor(depth / total + 0.5 + 1e-6), math.floor(width / total + 0.5 + 1e-6), self.last[2]

    def shape(self, position, u):
        adt, base = self.adt, self.last
        if adt.initial == "vertical":
            base = self.above(position)
        elif adt.initial == "tokenflock":
            base = self.flock(position)
        elif adt.initial == "random":
            base = (
                *(low + int(x * (high - low + 1)) for x, (low, high) in zip(u, (adt.depths, adt.widths), strict=True)),
                self.last[2],
            )
        depth, width, alpha = base
        depth, width = adt.base[0] or depth, adt.base[1] or width
        if alpha is not None and alpha >= adt.beta:
            depth, width = depth + adt.depth_step, width - adt.width_step
        elif alpha is not None:
            depth, width = depth - adt.depth_step, width + adt.width_step
        return self.clamp(depth, width)

    def learn(self, plan, levels, before, after, accepted, update):
        if update and levels:
            self.last = (*plan, (accepted + self.adt.bonus) / levels)
        if self.last[2] is not None:
            self.at |= {position: self.last for position in range(before, after)}


@st.composite
def adt_trees(draw):
    depths = sorted(draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
    widths = sorted(draw(st.tuples(st.integers(1, 20), st.integers(1, 20))))
    return ADTTree(
        initial=draw(st.sampled_from(INITIAL)),
        beta=draw(st.sampled_from((0.5, 1.0))),
        depths=tuple(depths),
        widths=tuple(widths),
        depth_step=draw(st.integers(0, 2)),
        width_step=draw(st.integers(0, 5)),
        nodes=draw(st.integers(9, 40)),
        first=(draw(st.integers(1, 9)), draw(st.integers(1, 20))),
        radius=draw(st.sampled_from((1.0, 2.0, 3.0))),
        flock_distance=draw(st.sampled_from(FLOCK_DISTANCE)),
        bonus=draw(st.booleans()),
        base=(draw(st.sampled_from((0, 0, 1, 4))), draw(st.sampled_from((0, 0, 2, 25)))),
    )


def kept(layout: TokenLayout, positions: list[int]) -> TokenLayout:
    forced = layout.forced.clone()
    forced[:, positions] = 0
    return replace(layout, forced=forced)


LAYOUTS = {
    "plain": TokenLayout.plain(5, 4),
    "line_ends": with_line_ends(5, 4),
    "kept": kept(TokenLayout.plain(5, 4), [0, 1, 6, 9, 10, 11, 12, 18]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@given(adt_trees(), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_choice_is_the_one_made_by_hand(name, adt, seed):
    """Rows of a batch at their own pace, some rounds of which are skipped or have empty trees."""
    adt.check()
    layout, rng, batch = LAYOUTS[name], random.Random(seed), 3
    history, hand = adt.start(batch, layout, "cpu"), [ByHand(adt, layout) for _ in range(batch)]
    committed = torch.ones(batch, dtype=torch.int64)
    while (committed < layout.length).any():
        u = torch.tensor([[rng.random(), rng.random()] for _ in range(batch)])
        plan = adt.shape(history, committed, layout, u)
        going = committed < layout.length
        for b in going.nonzero()[:, 0].tolist():
            expected = hand[b].shape(int(committed[b]), u[b].tolist())
            assert (int(plan[0][b]), int(plan[1][b])) == expected, (b, int(committed[b]))
        levels = torch.tensor([rng.randint(0, int(d)) for d in plan[0]])
        accepted = torch.tensor([rng.randint(0, int(n)) for n in levels])
        after = torch.where(going, (committed + accepted + 1).clamp(max=layout.length), committed)
        update = going & torch.tensor([rng.random() < 0.8 for _ in range(batch)])
        history = adt.learn(history, plan, tree_of(levels), None, committed, after, accepted, update)
        for b in range(batch):
            numbers = (int(x[b]) for x in (levels, committed, after, accepted))
            hand[b].learn([int(x[b]) for x in plan], *numbers, bool(update[b]))
        committed = after


def test_the_extent_is_that_of_the_largest_trees():
    """Of images with 2, 5 and no tokens to go."""
    adt, left = ADTTree(depths=(1, 5), widths=(1, 9), nodes=12), torch.tensor([2, 5, 0])
    plan = torch.tensor([3, 1, 4]), torch.tensor([5, 7, 9])
    assert adt.extent(None, plan, left).tolist() == [2, 7]
    assert adt.extent(None, plan, torch.zeros_like(left)).amax() == 0
    passes = [adt.next_extent(Extent(), read, pads=False).drafter_passes for read in ((2, 7), (0, 0))]
    assert passes == [2, 1], "the first observes"


# Whole runs.


def test_no_tree_is_deeper_than_what_is_left_of_the_image():
    layout = plain(1, 2)
    model = ToyModel(layout)
    method = DraftTree(ToyDrafter(model), ADTTree(first=(3, 2), depths=(1, 4), widths=(1, 3), nodes=12))
    assert method.sample(request(model, layout)).trace.totals["draft_passes"] == 1  # observed, never expanded
