"""Draft trees: their shapes, and the tree a drafter grew for every image of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..constants import counting


@dataclass(frozen=True)
class Tree:
    """The drafts of a batch. Slot 0 is the root (the last token decided); every parent stands before its children.

    All [B, M + 1]: token (int64); parent, the slot it hangs from (int64; the root's is 0); depth below the root
    (int64); rank among its siblings in the order they were drawn, from 0 (int64); exists (bool); probability under the
    law it was drawn from (fp32; 1 for the root). levels: the deepest level; width: the most siblings (on the host).
    laws [B, E, V+] and law_of [M + 1] (int64): slot s's children were drawn without replacement from row law_of[s].
    laws is None where children are simply the drafter's most likely tokens. seen [1, M + 1, M + 1]: ancestors(), where
    they are the same in every tree of this shape.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    rank: Tensor
    exists: Tensor
    probability: Tensor
    levels: int
    width: int
    laws: Tensor | None = None
    law_of: Tensor | None = None
    seen: Tensor | None = None

    def children(self) -> Tensor:
        """Slots [B, M + 1, width] (int64) of every slot's children in the order they were drawn, -1 where none is."""
        batch, slots = self.token.shape
        table = torch.full((batch, slots * self.width + 1), -1, device=self.token.device)
        index = counting(slots, self.token.device)
        child = self.exists & (index > 0)  # the root is nobody's
        place = torch.where(child, self.parent * self.width + self.rank, slots * self.width)
        return table.scatter(1, place, index.expand(batch, -1))[:, :-1].unflatten(1, (slots, self.width))

    def ancestors(self) -> Tensor:
        """Mask [B, M + 1, M + 1] (bool): is slot j slot i itself or above it."""
        if self.seen is not None:
            return self.seen.expand(len(self.token), -1, -1)
        slots = self.token.shape[1]
        own = torch.eye(slots, dtype=torch.bool, device=self.token.device)
        seen = own.expand(len(self.token), -1, -1)
        for _ in range(self.levels):
            seen = own | seen.gather(1, self.parent.unsqueeze(-1).expand(-1, -1, slots))
        return seen

    def paths(self) -> Tensor:
        """Slots [B, M + 1, levels] (int64) from the root (left out) down to every slot; 0 behind its end."""
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
        """Deepest level [B] and most drafts on one level [B] of each image's tree (int64; 0 where it has no draft)."""
        level = torch.where(self.exists, self.depth, 0)
        counts = torch.zeros((len(level), self.levels + 1), dtype=torch.int64, device=level.device)
        counts = counts.scatter_add(1, level, self.exists.long())[:, 1:]
        return level.amax(1), counts.amax(1)


@dataclass(frozen=True)
class Level:
    """One level of a shape: every draft's parent (its place in the level above) and rank; the first ``inner`` have
    children."""

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    inner: int


Shape = tuple[Level, ...]


@dataclass(frozen=True)
class Tables:
    """A shape as constant tensors: slots [M + 1] as in Tree, without the tokens; and what growing such a tree needs.

    Of the drafts of a level [w], one per level: parents, as in Level; offers: the place of each among the likeliest
    tokens of all drafts of the level above, where each offers as many as any of them has children; origins: where the
    parent's law begins in those laid behind each other; possible: is the vocabulary so large.

    seen: per level who of its ``inner`` drafts sees which of all inner drafts so far [1, inner, E]. law_level,
    law_place [E]: level and place of the slot behind which each law stands.
    """

    parent: Tensor
    depth: Tensor
    rank: Tensor
    law_of: Tensor
    ancestors: Tensor
    parents: tuple[Tensor, ...]
    offers: tuple[Tensor, ...]
    origins: tuple[Tensor, ...]
    possible: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    law_level: Tensor
    law_place: Tensor


@cache  # for good: captured steps go on reading them
def tables(shape: Shape, vocab: int, device: torch.device) -> Tables:
    """The constants of a shape over ``vocab`` tokens, made once: a step that is being captured cannot send numbers to
    the device."""
    parent, depth, rank, law_of = [0], [0], [0], [0]
    expanded = [0]  # slots with laws: the root and all inner drafts
    inner = []
    above = 0  # first slot of the level above
    for number, level in enumerate(shape, 1):
        first = len(parent)
        parent += [above + place for place in level.parent]
        depth += [number] * len(level.parent)
        rank += level.rank
        law_of += [len(expanded) + i if i < level.inner else 0 for i in range(len(level.parent))]
        inner.append(range(len(expanded), len(expanded) + level.inner))
        expanded += range(first, first + level.inner)
        above = first
    lines = [{0}]  # every slot with those above it
    for slot in range(1, len(parent)):
        lines.append(lines[parent[slot]] | {slot})
    ancestors = [[j in line for j in range(len(parent))] for line in lines]
    seen = [[[[expanded[j] in lines[expanded[i]] for j in range(1, rows.stop)] for i in rows]] for rows in inner]
    counts = [1, *(level.inner for level in shape)]

    def ready(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    offers = [(level, min(max(level.rank) + 1, vocab)) for level in shape]
    return Tables(
        *map(ready, (parent, depth, rank, law_of)), ready([ancestors], torch.bool),
        tuple(ready(list(level.parent)) for level in shape),
        tuple(ready([p * most + min(r, most - 1) for p, r in zip(level.parent, level.rank)]) for level, most in offers),
        tuple(ready([p * vocab for p in level.parent]) for level in shape),
        tuple(ready([r < most for r in level.rank], torch.bool) for level, most in offers),
        tuple(ready(rows, torch.bool) for rows in seen), ready([depth[slot] for slot in expanded]),
        ready([i for count in counts for i in range(count)]),
    )


Path = tuple[int, ...]  # child numbers from the root: (0, 1) is the second child of the first child

# Published static trees as the number of children of every draft, level by level (the root first, zeros at the end left
# out). Li et al., EAGLE (ICML 2024): 25 drafts on 4, 8, 8, 3, 2; LANTERN++ (Park et al., 2025): 57 on 5, 13, 16, 14, 9.
_PUBLISHED = {
    "eagle_25": ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)),
    "lantern_57": ((5,), (4, 3, 3, 2, 1), (4, 3, 3, 2, 2, 1, 0, 1), (4, 3, 2, 1, 2, 1, 0, 1), (3, 2, 0, 0, 2, 1, 0, 1)),
}  # fmt: skip
PUBLISHED = tuple(_PUBLISHED)


def published(name: str) -> tuple[Path, ...]:
    """The paths of a published static tree. Raises ValueError for another name."""
    if name not in _PUBLISHED:
        raise ValueError(f"tree is {name!r}; choose one of {', '.join(PUBLISHED)}, or give a list of paths.")
    paths, above = [], [()]
    for counts in _PUBLISHED[name]:
        above = [(*path, rank) for path, count in zip(above, counts) for rank in range(count)]
        paths += above
    return tuple(paths)


@lru_cache(maxsize=256)
def shape_of(paths: tuple[Path, ...]) -> Shape:
    """The shape of a list of paths. Raises ValueError unless they are a prefix-closed tree of distinct paths."""
    given = set(paths)
    if not given or len(given) < len(paths) or any(not path or min(path) < 0 for path in given):
        raise ValueError("A tree is a list of distinct, non-empty paths of child numbers from 0, such as (0,), (0, 1).")
    for path in given:
        for needed in (path[:-1], (*path[:-1], path[-1] - 1)):
            if needed and needed[-1] >= 0 and needed not in given:
                raise ValueError(f"The tree has {path} but lacks {needed}: parents and earlier siblings must be in it.")
    parents = {path[:-1] for path in given}
    levels, above = [], [()]
    for depth in range(1, max(map(len, given)) + 1):
        here = sorted((p for p in given if len(p) == depth), key=lambda path: (path not in parents, sum(path), path))
        levels.append(Level(
            tuple(above.index(path[:-1]) for path in here), tuple(path[-1] for path in here),
            sum(path in parents for path in here),
        ))
        above = here
    return tuple(levels)
