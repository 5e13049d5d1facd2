"""ADT-Tree: depth and width of the next draft tree adapt to the acceptance of trees nearby.

Lei et al., "Fast inference of visual autoregressive model with adjacency-adaptive dynamical draft trees", 2025
(arXiv:2512.21857): take the shape of a neighbour's tree (section IV-A), then go deeper and narrower if its drafts were
accepted, else shallower and wider (IV-B, eq. 2). Shapes depend on earlier rounds only, so an exact acceptance rule
stays exact.

The authors' repository lacks the method. Where the paper does not say: a tree's acceptance rate alpha is its accept
length (accepted drafts, without the token sampled after them) over its levels, so 1 means that every level was used;
the first tree is EAGLE-2's; a round that decided tokens without verifying a draft teaches nothing, and these tokens get
the shape of the last verified tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..layout import TokenLayout
from ..rng import Purpose, Stream
from ..settings import setting
from .growing import DRAWS, Drafting, Root, grow_sampled, grow_top_k
from .structures import Extent, Structure
from .trees import Shape, Tree, shape_of

INITIAL = ("horizontal", "vertical", "random", "tokenflock")
CHILDREN = ("top_k", "sampled")
ROW_START = ("previous", "above", "reset")
ALPHA_OVER = ("effective", "requested")
FLOCK_DISTANCE = ("euclidean", "printed")


@dataclass(frozen=True)
class TreeShapes:
    """Planned depth and width (int64) of some trees, and their acceptance rate alpha (fp32; NaN: never verified)."""

    depth: Tensor
    width: Tensor
    alpha: Tensor

    def where(self, condition: Tensor, other: TreeShapes) -> TreeShapes:
        """These where ``condition`` holds, else ``other``."""
        return TreeShapes(
            torch.where(condition, self.depth, other.depth),
            torch.where(condition, self.width, other.width),
            torch.where(condition, self.alpha, other.alpha),
        )

    def at(self, position: Tensor) -> TreeShapes:
        """Of maps [B, S]: the entries at position [B]."""
        index = position[:, None]
        return TreeShapes(*(x.gather(1, index)[:, 0] for x in (self.depth, self.width, self.alpha)))


@dataclass(frozen=True)
class History:
    """at [B, S]: the tree whose round decided each position; last [B]: the last verified tree.

    free [B, S] (int64): the last position up to this one that is not forced (0 if there is none). A forced position
    shares its tree.
    """

    at: TreeShapes
    last: TreeShapes
    free: Tensor


@dataclass(frozen=True)
class ADTTree(Structure):
    """A tree of changing shape. The defaults are the paper's for LlamaGen; see ANOLE.

    initial: the shape to adapt. horizontal: the left neighbour's, which is the last tree's; vertical: the upper
        neighbour's (in the first row the last tree's); random: uniform within the bounds; tokenflock: the mean over
        tokens at most ``radius`` away, weighted by radius + 1 - distance (eqs. 6-8).
    children: top_k (EAGLE-2) or sampled (EAGLE; each level then has at most nodes / depth drafts).
    beta: go deeper if alpha >= beta, else shallower; depth_step, width_step: by how much (l_d, l_k).
    depths, widths: inclusive bounds. A tree of one level may be wider, since its cost does not grow with the square.
    nodes: the most drafts verified, and the most siblings. first: shape of the first tree, clamped to the bounds.
    row_start: what horizontal does in the first column: the previous token's tree, that above, or ``first`` again.
    alpha_over: the levels of the tree itself (pruning and the end of the image leave fewer than requested), or those
        requested.
    flock_distance: euclidean, or as printed in eqs. 7-8 the signed column difference.

    alpha is that of the tree whose shape is adapted; for random and tokenflock, that of the last tree.
    """

    initial: str = setting("horizontal", options=INITIAL)
    children: str = setting("top_k", options=CHILDREN)
    beta: float = setting(1.0, 0, 1)
    depth_step: int = setting(1, 0, 32)
    width_step: int = setting(10, 0, 64)
    depths: tuple[int, int] = (1, 9)
    widths: tuple[int, int] = (4, 39)
    nodes: int = 58
    first: tuple[int, int] = (5, 10)
    radius: float = setting(2.0, 1, 64)
    row_start: str = setting("previous", options=ROW_START)
    alpha_over: str = setting("effective", options=ALPHA_OVER)
    flock_distance: str = setting("euclidean", options=FLOCK_DISTANCE)
    kind: ClassVar[str] = "adt"
    varies: ClassVar[bool] = True

    @property
    def sampled(self) -> bool:
        return self.children == "sampled"

    def check(self) -> None:
        super().check()
        for name, (low, high), most in (("depths", self.depths, 32), ("widths", self.widths, 64)):
            if not 1 <= low <= high <= most:
                raise ValueError(
                    f"{name} are {low} to {high}, but must rise within 1 to {most}. Set the lower one "
                    f"({name[:-1]}_min) to at most the upper one ({name[:-1]}_max)."
                )
        for name, value, low, high in (
            ("nodes", self.nodes, self.depths[1], 1024),
            ("first depth", self.first[0], 1, 32),
            ("first width", self.first[1], 1, 64),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, but must be {low} to {high}.")

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"ADT-Tree, {settings['initial']}"

    def size(self) -> tuple[int, int]:
        """The most drafts and the most levels of a tree. Sampled trees of a batch share slots, level by level."""
        if self.children == "top_k":
            return self.nodes, self.depths[1]
        shallowest = self.depths[0]
        widest = [min(self.widths[1], self.nodes // max(level, shallowest)) for level in range(1, self.depths[1] + 1)]
        if shallowest == 1:
            widest[0] = self.nodes
        return sum(widest), self.depths[1]

    def expansions(self) -> int:
        """The most drafts that the drafter expands in a round, over the images of a batch."""
        if self.children == "sampled":
            return self.size()[0]
        widest = self.nodes if self.depths[0] == 1 else min(self.widths[1], self.nodes)
        return (self.depths[1] - 1) * widest

    def start(self, batch: int, layout: TokenLayout, device: torch.device) -> History:
        """The memory before any tree was verified."""
        is_free = layout.forced.cpu().expand(batch, -1) < 0  # on the CPU: Apple's GPUs have had no cummax
        free = torch.where(is_free, torch.arange(layout.length), 0).cummax(1).values.to(device)
        return History(self.opening(free), self.opening(free[:, 0]), free)

    def opening(self, like: Tensor) -> TreeShapes:
        """The first shape, in tensors of the size of ``like``; never verified."""
        depth, width = self.bounded(*(torch.full_like(like, x) for x in self.first))
        return TreeShapes(depth, width, torch.full_like(like, torch.nan, dtype=torch.float32))

    def bounded(self, depth: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and width (int64) clamped to the bounds."""
        depth = depth.clamp(*self.depths)
        most = torch.where(depth > 1, min(self.widths[1], self.nodes), self.nodes)
        return depth, torch.minimum(width.clamp(min=self.widths[0]), most)

    def shape(self, history: History, committed: Tensor, layout: TokenLayout, u: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and width [B] (int64) of the tree after ``committed`` [B] (int64, at least 1) tokens, eq. (2).

        Before any tree was verified, the first shape. u [B, 2]: uniform numbers in [0, 1) for ``random``.
        """
        position = committed.clamp(max=layout.length - 1)  # the shape for complete images does not matter
        base = self.neighbour(history, position, layout, u)
        good, bad = base.alpha >= self.beta, base.alpha < self.beta  # both false for NaN
        way = good.long() - bad.long()
        return self.bounded(base.depth + way * self.depth_step, base.width - way * self.width_step)

    def neighbour(self, history: History, position: Tensor, layout: TokenLayout, u: Tensor) -> TreeShapes:
        """The shape [B] to adapt, and the alpha that decides the direction (section IV-A; eqs. 6-8)."""
        last = history.last
        if self.initial == "random":
            depth, width = (
                (low + (x * (high - low + 1)).long()).clamp(max=high)
                for x, (low, high) in zip(u.unbind(1), (self.depths, self.widths), strict=True)
            )
            return TreeShapes(depth, width, last.alpha)
        if self.initial == "tokenflock":
            return self.flock(history, position, layout)
        above = self.above(history, position, layout)
        if self.initial == "vertical":
            return above
        first_column = position % layout.stride == 0
        if self.row_start == "above":
            return above.where(first_column, last)
        if self.row_start == "reset":
            return self.opening(position).where(first_column, last)
        return last

    def above(self, history: History, position: Tensor, layout: TokenLayout) -> TreeShapes:
        """The tree of the upper neighbour [B], or the last tree if there is none or it was not verified."""
        up = position - layout.stride
        found = history.at.at(history.free.gather(1, up.clamp(min=0)[:, None])[:, 0])
        return found.where((up >= 0) & ~found.alpha.isnan(), history.last)

    def flock(self, history: History, position: Tensor, layout: TokenLayout) -> TreeShapes:
        """The rounded weighted mean of the trees around position [B], or the last tree if none is near."""
        place, at = torch.arange(layout.length, device=position.device), history.at
        here = position[:, None]
        rows = torch.div(here, layout.stride, rounding_mode="floor") - torch.div(
            place, layout.stride, rounding_mode="floor"
        )
        columns = here % layout.stride - place % layout.stride
        distance = (rows**2 + columns**2).float().sqrt()
        known = (history.free == place) & ~at.alpha.isnan()  # not forced, and decided: later positions have no alpha
        near = known & (distance <= self.radius)
        measured = distance if self.flock_distance == "euclidean" else columns
        weight = torch.where(near, self.radius + 1 - measured, 0)
        total = weight.sum(1)

        def mean(values: Tensor) -> Tensor:  # rounds half up, in spite of round-off
            return ((weight * values).sum(1) / total.clamp(min=1e-9) + 0.5 + 1e-5).floor().long()

        last = history.last
        return TreeShapes(mean(at.depth), mean(at.width), last.alpha).where(total > 0, last)

    def plan(
        self, history: History, committed: Tensor, layout: TokenLayout, stream: Stream, round_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Depth and width [B] of the next trees."""
        u = torch.zeros((len(committed), 2), device=committed.device)
        if self.initial == "random":
            draw = round_index * DRAWS + torch.arange(2, device=committed.device)
            u = stream.uniform(committed[:, None].expand(-1, 2), Purpose.SHAPE, draw)
        return self.shape(history, committed, layout, u)

    def extent(self, plan: tuple[Tensor, Tensor], left: Tensor) -> Tensor:
        """The extent of the batch's largest trees: levels and width (top_k), or the width of every level (sampled).

        Complete images, with nothing ``left``, have no tree. The host needs the extent to launch the round, so it waits
        for a GPU here, once per round.
        """
        depth, width = plan
        levels = torch.minimum(depth, left)
        if self.children == "top_k":
            widest = torch.where(levels > 0, width, 0).amax()
            return torch.stack((levels.amax(), widest))
        numbers = torch.arange(1, self.depths[1] + 1, device=depth.device)
        return torch.where(numbers <= levels[:, None], self.sampled_width(plan)[:, None], 0).amax(0)

    def sampled_width(self, plan: tuple[Tensor, Tensor]) -> Tensor:
        """Drafts [B] on each level of a sampled tree."""
        return torch.minimum(plan[1], torch.div(self.nodes, plan[0], rounding_mode="floor"))

    def passes(self, extent: Extent) -> int:
        """Forward passes in which the drafter expands drafts in a round."""
        return max(extent[0], 1) - 1 if self.children == "top_k" else sum(w > 0 for w in extent[1:])

    def grow(
        self, work: Drafting, root: Root, plan: tuple[Tensor, Tensor], extent: Extent, round_index: Tensor
    ) -> Tree:
        """The next tree."""
        left = work.layout.length - root.committed
        levels = torch.minimum(plan[0], left)
        if self.children == "top_k":
            deepest, widest = (max(x, 1) for x in extent)
            return grow_top_k(work, root, deepest, widest, self.nodes, levels, plan[1])
        widths = tuple(w for w in extent if w) or (1,)
        return grow_sampled(work, root, nested(widths), round_index, levels, self.sampled_width(plan))

    def learn(
        self,
        history: History,
        plan: tuple[Tensor, Tensor],
        tree: Tree,
        before: Tensor,
        after: Tensor,
        accepted: Tensor,
        update: Tensor,
    ) -> History:
        """The memory after a round that planned ``plan`` and verified ``tree``; see remember()."""
        effective = tree.spread()[0]
        levels = effective if self.alpha_over == "effective" else plan[0]
        return remember(history, before, after, TreeShapes(*plan, accepted / levels), update & (effective > 0))


def remember(history: History, before: Tensor, after: Tensor, tried: TreeShapes, update: Tensor) -> History:
    """The memory after positions before .. after - 1 ([B], int64) were decided.

    tried [B]: the round's tree; update [B] (bool): was it verified. If not, the last verified tree takes its place.
    """
    last = tried.where(update, history.last)
    place = torch.arange(history.free.shape[1], device=before.device)
    new = (place >= before[:, None]) & (place < after[:, None])
    at = TreeShapes(last.depth[:, None], last.width[:, None], last.alpha[:, None]).where(new, history.at)
    return History(at, last, history.free)


@lru_cache(maxsize=256)
def nested(widths: tuple[int, ...]) -> Shape:
    """The sampled tree with the ``widths`` (not increasing) most promising paths of each level, by smallest total rank.

    The first w drafts of a level have their parents among the first w above, so narrower and shallower trees are parts
    of it.
    """
    paths, above = [], [()]
    for width in widths:
        # Child r of parent i follows (i + 1)(r + 1) - 1 others with smaller or equal parents and ranks.
        children = ((*path, rank) for i, path in enumerate(above) for rank in range(width // (i + 1)))
        above = sorted(children, key=lambda path: (sum(path), path))[:width]
        paths += above
    return shape_of(tuple(paths))


LLAMAGEN = ADTTree()
ANOLE = ADTTree(width_step=3, widths=(4, 13))
