"""ADT-Tree: depth and width of the next draft tree adapt to the acceptance of trees nearby.

Lei et al., "Fast inference of visual autoregressive model with adjacency-adaptive dynamical draft trees", 2025
(arXiv:2512.21857): take the shape of a neighbour's tree (section IV-A), then go deeper and narrower if its drafts were
accepted, else shallower and wider (IV-B, eq. 2). Shapes depend on earlier rounds only, so an exact acceptance rule
stays exact.

The authors' repository lacks the method. A tree's acceptance rate alpha = tau / d is its accepted length over its
levels, of which pruning and the end of the image may leave fewer than planned. The paper says two things of it: at 1
every level was used (section IV-B), so that accepted drafts alone count, and tau counts the token sampled after them,
too (section V; ``bonus``). Where the paper does not say: the first tree is EAGLE-2's; in the first column the left
neighbour is the last tree, too; a round that decided tokens without verifying a draft teaches nothing, and these tokens
get the shape of the last verified tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.verification import Verified
from ..contract import Extent
from ..layout import TokenLayout
from ..rng import Purpose, Stream
from ..settings import Setting, setting
from .auto import FIRST, acceptance_of, best_paths
from .costs import PassCosts
from .growing import DRAWS, Drafting, Root, grow_top_k
from .structures import Structure
from .trees import Tree

INITIAL = ("horizontal", "vertical", "random", "tokenflock")
FLOCK_DISTANCE = ("euclidean", "printed")
STEP = 10  # captured trees have widths that are multiples of it
GOOD = 0.85  # acceptance of first children with which the deepest tree pays


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

    initial: the shape to adapt. horizontal: the left neighbour's, which is the last tree's (in the first column, too);
        vertical: the upper neighbour's (in the first row the last tree's); random: uniform within the bounds;
        tokenflock: the mean over tokens at most ``radius`` away, weighted by radius + 1 - distance (eqs. 6-8).
    beta (0 to 1): go deeper if alpha >= beta, else shallower; depth_step, width_step: by how much (l_d, l_k).
    depths, widths: inclusive bounds. A tree of one level may be wider, since its cost does not grow with the square.
    nodes: the most drafts verified, and the most siblings. first: shape of the first tree, clamped to the bounds.
    flock_distance: euclidean, or as printed in eqs. 7-8 the signed column difference.
    bonus: alpha also counts the token sampled after the accepted drafts, so that all levels but one suffice for 1.
    base: a fixed depth and width that eq. 2 changes, in place of the neighbour's (table V); 0: the neighbour's.
    pays: lower the bounds to what pays on the device at hand, see ``fit`` (ours).

    alpha is that of the tree whose shape is adapted; for random and tokenflock, that of the last tree.
    """

    initial: str = setting("horizontal", options=INITIAL)
    beta: float = setting(1.0, 0, 1)
    depth_step: int = setting(1, 0, 32)
    width_step: int = setting(10, 0, 64)
    depths: tuple[int, int] = (1, 9)
    widths: tuple[int, int] = (4, 39)
    nodes: int = 58
    first: tuple[int, int] = (5, 10)
    radius: float = setting(2.0, 1, 64)
    flock_distance: str = setting("euclidean", options=FLOCK_DISTANCE)
    bonus: bool = False
    base: tuple[int, int] = (0, 0)
    pays: bool = False
    kind: ClassVar[str] = "adt"

    def check(self) -> None:
        super().check()
        for name, (low, high), limit in (("depths", self.depths, 32), ("widths", self.widths, 64)):
            if not 1 <= low <= high <= limit:
                raise ValueError(
                    f"{name} are {low} to {high}, but must rise within 1 to {limit}. Set the lower one "
                    f"({name[:-1]}_min) to at most the upper one ({name[:-1]}_max)."
                )
        for name, value, low, high in (
            ("nodes", self.nodes, self.depths[1], 1024),
            ("first depth", self.first[0], 1, 32),
            ("first width", self.first[1], 1, 64),
            ("base depth", self.base[0], 0, 32),
            ("base width", self.base[1], 0, 64),
        ):
            Setting(low, high).check(name, value)

    def describe(self) -> dict[str, Any]:
        """Without the settings of table V, of alpha and of costs where they are off: earlier reports lack them."""
        off = {"bonus": False, "base": (0, 0), "pays": False}
        return {k: value for k, value in super().describe().items() if k not in off or value != off[k]}

    @property
    def measures(self) -> bool:
        return self.pays

    def fit(self, costs: PassCosts) -> ADTTree:
        """With bounds that pay: as many drafts as the tree of auto.py has before anything was accepted, and as many
        levels as it has if most first children are accepted, since a tree gets deeper where all its levels were."""
        usual, good = (
            best_paths(acceptance_of(first, self.depths[1]), costs, self.nodes)[0] for first in (FIRST, GOOD)
        )
        deepest = max(map(len, good), default=1)
        nodes = max(len(usual), deepest)
        shallowest, widest = min(self.depths[0], deepest), min(self.widths[1], nodes)
        widths = min(self.widths[0], widest), widest
        return replace(self, pays=False, nodes=nodes, depths=(shallowest, deepest), widths=widths)

    def notices(self) -> list[str]:
        depth, width = self.base
        deepest, widest = self.depths[1], self.nodes if depth == 1 else min(self.widths[1], self.nodes)
        if depth <= deepest and width <= widest:
            return []
        return [
            f"The base of ADT-Tree (depth {depth}, width {width}; 0: the neighbour's) is beyond its trees, which have "
            f"at most {deepest} levels of {widest} drafts. Choose the preset LlamaGen (pays=False), or a smaller base."
        ]

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"ADT-Tree, {settings['initial']}"

    def size(self) -> tuple[int, int]:
        """The most drafts and the most levels of a tree."""
        return self.nodes, self.depths[1]

    @property
    def widest(self) -> int:
        """The most drafts of a level."""
        return self.nodes if self.depths[0] == 1 else min(self.widths[1], self.nodes)

    def expansions(self) -> int:
        """The most drafts that the drafter expands in a round, over the images of a batch."""
        return (self.depths[1] - 1) * self.widest

    def start(self, batch: int, layout: TokenLayout, device: torch.device) -> History:
        """The memory before any tree was verified."""
        is_free = layout.forced.cpu().expand(batch, -1) < 0  # on the CPU: Apple's GPUs have had no cummax
        free = torch.where(is_free, torch.arange(layout.length), 0).cummax(1).values.to(device)
        return History(opening(self, free), opening(self, free[:, 0]), free)

    def shape(self, history: History, committed: Tensor, layout: TokenLayout, u: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and width [B] (int64) of the tree after ``committed`` [B] (int64, at least 1) tokens, eq. (2).

        Before any tree was verified, the first shape. u [B, 2]: uniform numbers in [0, 1) for ``random``.
        """
        position = committed.clamp(max=layout.length - 1)  # the shape for complete images does not matter
        base = neighbour(self, history, position, layout, u)
        good, bad = base.alpha >= self.beta, base.alpha < self.beta  # both false for NaN
        way = good.long() - bad.long()
        depth, width = (
            torch.full_like(near, fixed) if fixed else near
            for near, fixed in zip((base.depth, base.width), self.base, strict=True)
        )
        return clamp(self, depth + way * self.depth_step, width - way * self.width_step)

    def plan(
        self, history: History, committed: Tensor, layout: TokenLayout, stream: Stream, round_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Depth and width [B] of the next trees."""
        u = torch.zeros((len(committed), 2), device=committed.device)
        if self.initial == "random":
            draw = round_index * DRAWS + torch.arange(2, device=committed.device)
            u = stream.uniform(committed[:, None].expand(-1, 2), Purpose.SHAPE, draw)
        return self.shape(history, committed, layout, u)

    def extent(self, history: History, plan: tuple[Tensor, Tensor], left: Tensor) -> Tensor:
        """Levels and width of the batch's largest trees.

        Complete images, with nothing ``left``, have no tree. The host needs the extent to launch the round, so it waits
        for a GPU here, once per round.
        """
        depth, width = plan
        levels = torch.minimum(depth, left)
        return torch.stack((levels.amax(), torch.where(levels > 0, width, 0).amax()))

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        """Its values are levels and width. A level costs a pass of the drafter, but wider ones hardly more on a GPU."""
        levels, width = (max(x, 1) for x in read)
        if pads:
            width = min(-(-width // STEP) * STEP, self.widest)
        return Extent((levels, width), (levels, width, self.nodes), drafter_passes=levels)

    def grow(
        self, work: Drafting, root: Root, plan: tuple[Tensor, Tensor], extent: Extent, round_index: Tensor
    ) -> Tree:
        """The next tree."""
        deepest, widest = extent.values
        levels = torch.minimum(plan[0], work.layout.length - root.committed)
        return grow_top_k(work, root, deepest, widest, self.nodes, levels, plan[1])

    def learn(
        self,
        history: History,
        plan: tuple[Tensor, Tensor],
        tree: Tree,
        verified: Verified | None,
        before: Tensor,
        after: Tensor,
        accepted: Tensor,
        update: Tensor,
    ) -> History:
        """The memory after a round that planned ``plan`` and verified ``tree``; see remember()."""
        levels = tree.spread()[0]
        alpha = (accepted + self.bonus) / levels
        return remember(history, before, after, TreeShapes(*plan, alpha), update & (levels > 0))


def opening(tree: ADTTree, like: Tensor) -> TreeShapes:
    """The first shape, in tensors of the size of ``like``; never verified."""
    depth, width = clamp(tree, *(torch.full_like(like, x) for x in tree.first))
    return TreeShapes(depth, width, torch.full_like(like, torch.nan, dtype=torch.float32))


def clamp(tree: ADTTree, depth: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Depth and width (int64) clamped to the bounds."""
    depth = depth.clamp(*tree.depths)
    widest = torch.where(depth > 1, min(tree.widths[1], tree.nodes), tree.nodes)
    return depth, torch.minimum(width.clamp(min=tree.widths[0]), widest)


def neighbour(tree: ADTTree, history: History, position: Tensor, layout: TokenLayout, u: Tensor) -> TreeShapes:
    """The shape [B] to adapt, and the alpha that decides the direction (section IV-A; eqs. 6-8)."""
    last = history.last
    if tree.initial == "random":
        depth, width = (
            (low + (x * (high - low + 1)).long()).clamp(max=high)
            for x, (low, high) in zip(u.unbind(1), (tree.depths, tree.widths), strict=True)
        )
        return TreeShapes(depth, width, last.alpha)
    if tree.initial == "tokenflock":
        return flock(tree, history, position, layout)
    return above(history, position, layout) if tree.initial == "vertical" else last


def above(history: History, position: Tensor, layout: TokenLayout) -> TreeShapes:
    """The tree of the upper neighbour [B], or the last tree if there is none or it was not verified."""
    up = position - layout.stride
    found = history.at.at(history.free.gather(1, up.clamp(min=0)[:, None])[:, 0])
    return found.where((up >= 0) & ~found.alpha.isnan(), history.last)


def flock(tree: ADTTree, history: History, position: Tensor, layout: TokenLayout) -> TreeShapes:
    """The rounded weighted mean of the trees around position [B], or the last tree if none is near."""
    place, at = torch.arange(layout.length, device=position.device), history.at
    here = position[:, None]
    rows = torch.div(here, layout.stride, rounding_mode="floor") - torch.div(
        place, layout.stride, rounding_mode="floor"
    )
    columns = here % layout.stride - place % layout.stride
    distance = (rows**2 + columns**2).float().sqrt()
    known = (history.free == place) & ~at.alpha.isnan()  # not forced, and decided: later positions have no alpha
    near = known & (distance <= tree.radius)
    measured = distance if tree.flock_distance == "euclidean" else columns
    weight = torch.where(near, tree.radius + 1 - measured, 0)
    total = weight.sum(1)

    def mean(values: Tensor) -> Tensor:  # rounds half up, in spite of round-off
        return ((weight * values).sum(1) / total.clamp(min=1e-9) + 0.5 + 1e-5).floor().long()

    last = history.last
    return TreeShapes(mean(at.depth), mean(at.width), last.alpha).where(total > 0, last)


def remember(history: History, before: Tensor, after: Tensor, tried: TreeShapes, update: Tensor) -> History:
    """The memory after positions before .. after - 1 ([B], int64) were decided.

    tried [B]: the round's tree; update [B] (bool): was it verified. If not, the last verified tree takes its place.
    """
    last = tried.where(update, history.last)
    place = torch.arange(history.free.shape[1], device=before.device)
    new = (place >= before[:, None]) & (place < after[:, None])
    at = TreeShapes(last.depth[:, None], last.width[:, None], last.alpha[:, None]).where(new, history.at)
    return History(at, last, history.free)


ANOLE = ADTTree(width_step=3, widths=(4, 13))
