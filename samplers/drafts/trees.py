"""Draft trees: their shapes, and the tree a drafter grew for every image of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.drafting import ancestors, children_of
from ..constants import constant, counting


@dataclass(frozen=True)
class Tree:
    """The drafts of a batch. Slot 0 is the root (the last token decided); every parent comes before its children.

    All [B, M + 1]: token (int64); parent: the parent's slot (int64; the root's is 0); depth below the root (int64,
    EAGLE's tree_position_ids); rank among the siblings in the order they were drafted, from 0 (int64); exists (bool);
    probability: q of the draft (fp32; 1 for the root). levels: the deepest level; width: the most siblings (on the
    host).
    draft_probs [B, E, V+] and draft_row [M + 1] (int64): the children of slot s were sampled without replacement from
    row draft_row[s]. draft_probs is None where children are the drafter's most likely tokens. fixed_mask
    [1 or B, M + 1, M + 1]: tree_mask(), where it is known; fixed_children [1 or B, M + 1, width]: children(), but 0 for
    none, and with those of a fixed shape that do not exist.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    rank: Tensor
    exists: Tensor
    probability: Tensor
    levels: int
    width: int
    draft_probs: Tensor | None = None
    draft_row: Tensor | None = None
    fixed_mask: Tensor | None = None
    fixed_children: Tensor | None = None
    _spread: ClassVar[tuple[Tensor, Tensor] | None] = None  # of a tree, once it is known

    @property
    def sampled(self) -> bool:
        """Are children samples from the drafter, not its most likely tokens?"""
        return self.draft_probs is not None

    def children(self) -> Tensor:
        """Slots [B, M + 1, width] (int64) of the children of every slot in the order they were drafted; -1 for none."""
        batch, slots = self.token.shape
        table = self.fixed_children
        if table is None:
            table = children_of(self.parent, self.rank, self.exists, self.width)
        slot = constant((-1, *range(1, slots)), self.token.device, torch.int64)  # the root is nobody's child
        there = torch.where(self.exists, slot, -1)
        return there.gather(1, table.flatten(1).expand(batch, -1)).unflatten(1, (slots, self.width))

    def tree_mask(self) -> Tensor:
        """Mask [B, M + 1, M + 1] (bool): is slot j slot i itself or an ancestor of it."""
        if self.fixed_mask is not None:
            return self.fixed_mask.expand(len(self.token), -1, -1)
        return ancestors(self.parent, self.levels)

    def retrieve_indices(self) -> Tensor:
        """Slots [B, M + 1, levels] (int64) on the path from the root (left out) to every slot; 0 past its end."""
        slots = torch.arange(self.token.shape[1], device=self.token.device).expand_as(self.token)
        path = torch.zeros((*self.token.shape, self.levels + 1), dtype=torch.int64, device=self.token.device)
        for _ in range(self.levels):
            path = path.scatter(2, self.depth.gather(1, slots).unsqueeze(-1), slots.unsqueeze(-1))
            slots = self.parent.gather(1, slots)
        return path[..., 1:]

    def leaves(self) -> Tensor:
        """Is a slot [B, M + 1] (bool) a draft without children."""
        inner = torch.zeros_like(self.token).scatter_add(1, self.parent, self.exists.long()) > 0
        inner[:, 0] = True
        return self.exists & ~inner

    def spread(self) -> tuple[Tensor, Tensor]:
        """Deepest level [B] and most drafts on one level [B] of each image's tree (int64; 0 if it has no draft)."""
        found = self._spread
        if found is None:
            level = self.depth * self.exists
            on_level = level[..., None] == counting(max(self.levels, 1) + 1, level.device)[1:]
            found = level.amax(1), on_level.sum(1).amax(1)
            object.__setattr__(self, "_spread", found)
        return found


@dataclass(frozen=True)
class TreeLevel:
    """One level of a shape: every draft's parent (its place in the level above) and rank.

    Its first ``inner`` drafts have children.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    inner: int


Shape = tuple[TreeLevel, ...]


@dataclass(frozen=True)
class LevelBuffers:
    """Constant tensors to grow one level of a shape from the F drafts above that have children, w drafts [w] each.

    parent: as in TreeLevel. child: index of the draft among the F * siblings best tokens above, where every parent
    offers as many as any of them has children. mask [1, inner, E]: which of the E inner drafts down to this level each
    of its inner ones descends from, itself included.
    """

    parent: Tensor
    child: Tensor
    siblings: int
    mask: Tensor


@dataclass(frozen=True)
class TreeBuffers:
    """A shape as constant tensors. [M + 1]: parent, depth, rank and draft_row, as in Tree; tree_mask [1, M + 1, M + 1]
    and children [1, M + 1, most siblings], as Tree's fixed ones.

    probs_level, probs_place [E]: level and place in it of the slot that each row of Tree.draft_probs follows.
    """

    parent: Tensor
    depth: Tensor
    rank: Tensor
    draft_row: Tensor
    tree_mask: Tensor
    children: Tensor
    levels: tuple[LevelBuffers, ...]
    probs_level: Tensor
    probs_place: Tensor


@cache  # for good: captured steps keep reading them
def tree_buffers(shape: Shape, device: torch.device) -> TreeBuffers:
    """The constants of a shape, made once: a captured step cannot send numbers to the device."""
    parent, depth, rank, draft_row = [0], [0], [0], [0]  # of every slot, first the root
    expanded = [0]  # the slots with children, which are the rows of Tree.draft_probs: the root and all inner drafts
    inner_rows = []  # rows of the inner drafts of each level
    above = 0  # first slot of the level above
    for number, level in enumerate(shape, 1):
        first, row, width = len(parent), len(expanded), len(level.parent)
        parent += [above + place for place in level.parent]
        depth += [number] * width
        rank += level.rank
        draft_row += [row + i if i < level.inner else 0 for i in range(width)]
        inner_rows.append(range(row, row + level.inner))
        expanded += range(first, first + level.inner)
        above = first
    line = [{0}]  # every slot with its ancestors
    for slot in range(1, len(parent)):
        line.append(line[parent[slot]] | {slot})

    def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    levels = []
    for level, rows in zip(shape, inner_rows, strict=True):
        siblings = max(level.rank) + 1
        levels.append(
            LevelBuffers(
                parent=tensor(list(level.parent)),
                child=tensor([p * siblings + r for p, r in zip(level.parent, level.rank, strict=True)]),
                siblings=siblings,
                mask=tensor(
                    [[[expanded[j] in line[expanded[i]] for j in range(1, rows.stop)] for i in rows]], torch.bool
                ),
            )
        )
    tree_mask = [[ancestor in line[slot] for ancestor in range(len(parent))] for slot in range(len(parent))]
    most_siblings = max([0, *(level.siblings for level in levels)])
    children = [[0] * most_siblings for _ in parent]
    for slot in range(1, len(parent)):
        children[parent[slot]][rank[slot]] = slot
    places = [place for inner in (1, *(level.inner for level in shape)) for place in range(inner)]
    return TreeBuffers(
        tensor(parent),
        tensor(depth),
        tensor(rank),
        tensor(draft_row),
        tensor([tree_mask], torch.bool),
        tensor([children]),
        tuple(levels),
        probs_level=tensor([depth[slot] for slot in expanded]),
        probs_place=tensor(places),
    )


Path = tuple[int, ...]  # child numbers from the root: (0, 1) is the second child of the first child

# Published static trees: number of children of every draft, level by level from the root (zeros at the end omitted).
# Li et al., EAGLE (ICML 2024): 25 drafts on 4, 8, 8, 3, 2; LANTERN++ (Park et al., 2025): 57 on 5, 13, 16, 14, 9.
_PUBLISHED = {
    "eagle_25": ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)),
    "lantern_57": ((5,), (4, 3, 3, 2, 1), (4, 3, 3, 2, 2, 1, 0, 1), (4, 3, 2, 1, 2, 1, 0, 1), (3, 2, 0, 0, 2, 1, 0, 1)),
}
PUBLISHED = tuple(_PUBLISHED)


def published_paths(name: str) -> tuple[Path, ...]:
    """The paths of a published static tree. Raises ValueError for another name."""
    if name not in _PUBLISHED:
        raise ValueError(f"tree is {name!r}; choose one of {', '.join(map(repr, PUBLISHED))}, or give a list of paths.")
    paths, above = [], [()]
    for counts in _PUBLISHED[name]:
        above = [(*path, rank) for path, count in zip(above, counts, strict=False) for rank in range(count)]
        paths += above
    return tuple(paths)


@lru_cache(maxsize=256)
def shape_of(paths: tuple[Path, ...]) -> Shape:
    """The shape of a list of paths. Raises ValueError unless they are a prefix-closed tree of distinct paths."""
    distinct = set(paths)
    if not distinct or len(distinct) < len(paths) or any(not path or min(path) < 0 for path in distinct):
        raise ValueError(
            "The tree is not a list of distinct, non-empty paths of child numbers. Count children from 0, "
            "as in (0,), (1,), (0, 0)."
        )
    for path in distinct:
        for needed in (path[:-1], (*path[:-1], path[-1] - 1)):
            if needed and needed[-1] >= 0 and needed not in distinct:
                raise ValueError(
                    f"The tree has {path} but lacks {needed}. Add it: a tree needs the parents and "
                    "earlier siblings of its paths."
                )
    parents = {path[:-1] for path in distinct}
    levels: list[TreeLevel] = []
    above: list[Path] = [()]
    for depth in range(1, max(map(len, distinct)) + 1):
        here = sorted((p for p in distinct if len(p) == depth), key=lambda path: (path not in parents, sum(path), path))
        levels.append(
            TreeLevel(
                tuple(above.index(path[:-1]) for path in here),
                tuple(path[-1] for path in here),
                sum(path in parents for path in here),
            )
        )
        above = here
    return tuple(levels)
