"""Growing draft trees with a drafter: children drawn from its law, or its most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.sampling import take
from ..constants import counting
from ..contract import Drafter, SamplingParams, StepOut
from ..layout import TokenLayout
from ..probabilities import probabilities
from ..rng import Purpose, Stream
from .trees import Shape, Tree, tables

DRAWS = 4096  # random numbers of one purpose that a round may use at a position; more than any tree has drafts


@dataclass(frozen=True)
class Drafting:
    """A drafter at work on a batch. layout and stream are the run's; forcing: does the layout force any token."""

    drafter: Drafter
    state: Any
    layout: TokenLayout
    params: SamplingParams
    vocab: int
    stream: Stream
    forcing: bool = True

    def laws(self, logits: Tensor, position: Tensor) -> Tensor:
        """q [B, F, V+] at positions [B, F] from the drafter's logits [R, F, V+], processed exactly as the target's.

        Greedy decoding (temperature 0) drafts from the law of temperature 1, which has more than one child to offer.
        """
        params = replace(self.params, temperature=self.params.temperature or 1.0)
        return probabilities(logits, params, self.vocab, self.layout.forced_at(position) if self.forcing else None)

    def expand(self, tokens: Tensor, position: Tensor, hidden: Tensor, seen: Tensor) -> StepOut:
        return self.drafter.expand(self.state, tokens, position, hidden, seen)


@dataclass(frozen=True)
class Root:
    """Where trees start: the last decided token [B], how many are decided [B], and the drafter's StepOut behind it."""

    token: Tensor
    committed: Tensor
    out: StepOut


def grow_sampled(
    work: Drafting, root: Root, shape: Shape, turn: Tensor, depth: Tensor | None = None, width: Tensor | None = None
) -> Tree:
    """A tree of the given shape whose siblings are drawn without replacement from q (EAGLE; Li et al., ICML 2024).

    The largest entries of log q + Gumbel noise, in falling order, are such draws (at temperature 0 without noise).
    depth, width [B] (int64) cut each image's tree to its first levels and the first drafts of each level. A draft
    exists only where its parent does, q has mass for it, and the image has not ended; so a forced token is an only
    child.
    """
    places = root.committed[:, None] + counting(len(shape) + 1, root.token.device)  # of all levels, and one more
    law, hidden = work.laws(root.out.logits, places[:, :1]), root.out.hidden
    vocab = law.shape[-1]
    known = tables(shape, vocab, root.token.device)
    above = torch.ones_like(root.token, dtype=torch.bool)[:, None]  # do the drafts (first the root) exist
    nodes, laws = [_root_node(root)], [law]
    noise = None
    if work.params.temperature > 0:  # for the laws behind the root and all drafts that have children, in one go
        draw = turn * DRAWS + known.law_place
        noise = work.stream.gumbel(root.committed[:, None] + known.law_level, vocab, Purpose.DRAFT, draw)
        noise = noise.split([1, *(level.inner for level in shape)], dim=1)
    for number, (level, parent) in enumerate(zip(shape, known.parents, strict=True), 1):
        most = min(max(level.rank) + 1, vocab)
        scores = law if noise is None else law.log().add_(noise[number - 1])
        ordered = scores.topk(most).indices  # [B, F, most]
        token = ordered.flatten(1)[:, known.offers[number - 1]]
        probability = law.flatten(1).gather(1, known.origins[number - 1] + token)
        within = places[:, number - 1 : number] < work.layout.length
        exists = above[:, parent] & known.possible[number - 1] & (probability > 0) & within
        if depth is not None:
            exists = exists & (number <= depth[:, None])
        if width is not None:
            exists = exists & (counting(len(parent), parent.device) < width[:, None])
        nodes.append(_Drafts(token, exists, probability))
        if level.inner:
            inner = slice(level.inner)
            seen = known.seen[number - 1].expand(len(token), -1, -1)
            here, following = (places[:, n : n + 1].expand(-1, level.inner) for n in (number - 1, number))
            out = work.expand(token[:, inner], here, hidden[:, parent[inner]], seen)
            law, hidden, above = work.laws(out.logits, following), out.hidden, exists[:, inner]
            laws.append(law)
    token, exists, probability = (torch.cat(parts, dim=1) for parts in zip(*nodes, strict=True))
    parent, at_depth, rank = (x.expand_as(token) for x in (known.parent, known.depth, known.rank))
    widest = max(max(level.rank) for level in shape) + 1
    return Tree(token, parent, at_depth, rank, exists, probability, len(shape), widest, torch.cat(laws, dim=1),
                known.law_of, known.ancestors)


def grow_top_k(
    work: Drafting, root: Root, levels: int, most: int, nodes: int, depth: Tensor | None = None,
    width: Tensor | None = None,
) -> Tree:
    """EAGLE-2's dynamic tree (Li et al., EMNLP 2024): the ``nodes`` best of all candidates by cumulative probability.

    Every draft of the frontier offers its ``most`` likeliest tokens; the ``most`` best of a level by cumulative log q
    are the next frontier, for ``levels`` levels. depth, width [B] (int64) lower levels and ``most`` for each image.
    Sorted by score, ties by level: a parent never scores less than its child, so the tree is prefix-closed.
    """
    batch, device = len(root.token), root.token.device
    most = min(most, root.out.logits.shape[-1])
    index = counting(most, device)
    allowed = torch.ones((1, most), dtype=torch.bool, device=device) if width is None else index < width[:, None]
    law, hidden = work.laws(root.out.logits, root.committed[:, None]), root.out.hidden
    score = torch.zeros((batch, 1), device=device)
    frontier = torch.full((batch, 1), -1, device=device)  # candidate number of each draft to expand; -1: the root
    seen = torch.zeros((batch, 1, 0), dtype=torch.bool, device=device)
    found: list[_Candidates] = []
    count = 0
    for number in range(1, levels + 1):
        position = root.committed + number - 1
        best = law.topk(most)
        legal = allowed[:, None] & (position < work.layout.length)[:, None, None]
        if depth is not None:
            legal = legal & (number <= depth)[:, None, None]
        scores = (score[..., None] + best.values.log()).masked_fill(~legal, -torch.inf)  # [B, F, most]
        found.append(_Candidates(
            best.indices.flatten(1), frontier[..., None].expand_as(scores).flatten(1), number,
            index.expand_as(scores).flatten(1), scores.flatten(1), best.values.flatten(1),
        ))
        if number < levels:
            score, chosen = scores.flatten(1).topk(most)
            score = score.masked_fill(~allowed, -torch.inf)
            parent = torch.div(chosen, most, rounding_mode="floor")  # place in the frontier that offered it
            token = best.indices.flatten(1).gather(1, chosen)
            own = torch.eye(most, dtype=torch.bool, device=device).expand(batch, -1, -1)
            seen = torch.cat((take(seen, parent), own), dim=2)
            out = work.expand(token, position[:, None].expand(-1, most), take(hidden, parent), seen)
            law, hidden = work.laws(out.logits, position[:, None].expand(-1, most) + 1), out.hidden
            frontier = count + chosen
            count += scores[0].numel()
    return _keep_best(found, root, nodes, levels, most)


class _Drafts(NamedTuple):
    """Drafts of one level [B, w]: tokens, do they exist, and their probabilities."""

    token: Tensor
    exists: Tensor
    probability: Tensor


@dataclass(frozen=True)
class _Candidates:
    """Candidates of one level [B, c]; parent counts candidates from the first level on, -1 being the root."""

    token: Tensor
    parent: Tensor
    level: int
    rank: Tensor
    score: Tensor
    probability: Tensor


def _root_node(root: Root) -> _Drafts:
    token = root.token[:, None]
    return _Drafts(token, torch.ones_like(token, dtype=torch.bool), torch.ones_like(token, dtype=torch.float32))


def _keep_best(found: list[_Candidates], root: Root, nodes: int, levels: int, width: int) -> Tree:
    """The best ``nodes`` candidates in their old order (so parents first) behind the root."""
    score = torch.cat([c.score for c in found], dim=1)
    total = score.shape[1]
    best = score.sort(dim=1, descending=True, stable=True)
    kept = best.indices[:, :nodes]
    alive = best.values[:, :nodes] > -torch.inf
    # The dead go last. In int32, as Apple's GPUs have sorted more than 256 int64 numbers wrongly.
    place = torch.where(alive, kept, total + kept).int().sort(dim=1).values.long()
    alive, place = place < total, place % total
    slots = torch.arange(1, place.shape[1] + 1, device=place.device).expand_as(place)
    # Slot of every candidate; the root's, 0, stands behind the last candidate, where the parent -1 points.
    slot_of = torch.zeros((len(place), total + 1), dtype=torch.int64, device=place.device)
    slot_of = slot_of.scatter(1, torch.where(alive, place, total), torch.where(alive, slots, 0))

    def picked(values: list[Tensor]) -> Tensor:
        return torch.cat(values, dim=1).gather(1, place)

    level = [torch.full_like(c.token, c.level) for c in found]
    parent = slot_of.gather(1, picked([c.parent for c in found]) % (total + 1))
    drafts = picked([c.token for c in found]), alive, picked([c.probability for c in found])
    first = _root_node(root)
    token, exists, probability = (torch.cat(pair, dim=1) for pair in zip(first, drafts, strict=True))
    parent, depth, rank = (
        torch.nn.functional.pad(x, (1, 0)) for x in (parent, picked(level), picked([c.rank for c in found]))
    )
    return Tree(token, parent, depth, rank, exists, probability, levels, width)
