"""Growing draft trees with a drafter: children sampled from its probabilities, or its most likely tokens."""

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
from .trees import Shape, Tree, tree_buffers

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

    def probs(self, logits: Tensor, position: Tensor) -> Tensor:
        """q [B, F, V+] at positions [B, F] from the drafter's logits [R, F, V+], processed exactly as the target's.

        Greedy decoding (temperature 0) drafts at temperature 1, where q has more than one token.
        """
        params = replace(self.params, temperature=self.params.temperature or 1.0)
        return probabilities(logits, params, self.vocab, self.layout.forced_at(position) if self.forcing else None)

    def expand(self, tokens: Tensor, position: Tensor, hidden: Tensor, tree_mask: Tensor) -> StepOut:
        return self.drafter.expand(self.state, tokens, position, hidden, tree_mask)


@dataclass(frozen=True)
class Root:
    """The root of every tree: the last decided token [B], the number decided [B], and the drafter's StepOut after
    it."""

    token: Tensor
    committed: Tensor
    out: StepOut


def grow_sampled(work: Drafting, root: Root, shape: Shape, round_index: Tensor) -> Tree:
    """A tree of a fixed shape whose siblings are sampled without replacement from q (EAGLE; Li et al., ICML 2024).

    The largest entries of log q + Gumbel noise, in descending order, are such samples (Gumbel top-k; at temperature 0
    without noise). A draft exists only if its parent does, q has mass for it, and its position is within the image. So
    a forced token is an only child.
    """
    positions = root.committed[:, None] + counting(len(shape) + 1, root.token.device)  # level n drafts positions[n - 1]
    # q, hidden state and existence of the drafts to expand, first the root.
    q, hidden = work.probs(root.out.logits, positions[:, :1]), root.out.hidden
    exists_above = torch.ones_like(root.token, dtype=torch.bool)[:, None]
    vocab = q.shape[-1]
    buffers = tree_buffers(shape, vocab, root.token.device)
    drafts, draft_probs = [_root_draft(root)], [q]
    noise = None
    if work.params.temperature > 0:  # for all levels at once: one launch
        draw = round_index * DRAWS + buffers.probs_place
        noise = work.stream.gumbel(root.committed[:, None] + buffers.probs_level, vocab, Purpose.DRAFT, draw)
        noise = noise.split([1, *(level.inner for level in shape)], dim=1)
    for number, (level, constants) in enumerate(zip(shape, buffers.levels, strict=True), 1):
        # Children: every draft above offers its ``top_k`` most likely tokens, of which the shape takes some.
        top_k = min(max(level.rank) + 1, vocab)
        scores = q if noise is None else q.log().add_(noise[number - 1])
        offered = scores.topk(top_k).indices  # [B, F, top_k]
        token = offered.flatten(1)[:, constants.child]
        probability = q.flatten(1).gather(1, constants.probs_start + token)
        within = positions[:, number - 1 : number] < work.layout.length
        exists = exists_above[:, constants.parent] & constants.in_vocab & (probability > 0) & within
        drafts.append(_Drafts(token, exists, probability))
        if level.inner:  # the first ``inner`` of them are expanded
            inner = slice(level.inner)
            here, next_position = (positions[:, n : n + 1].expand(-1, level.inner) for n in (number - 1, number))
            mask = constants.mask.expand(len(token), -1, -1)
            out = work.expand(token[:, inner], here, hidden[:, constants.parent[inner]], mask)
            q, hidden, exists_above = work.probs(out.logits, next_position), out.hidden, exists[:, inner]
            draft_probs.append(q)
    token, exists, probability = (torch.cat(parts, dim=1) for parts in zip(*drafts, strict=True))
    parent, at_depth, rank = (x.expand_as(token) for x in (buffers.parent, buffers.depth, buffers.rank))
    most_siblings = max([0, *(max(level.rank) + 1 for level in shape)])
    return Tree(
        token,
        parent,
        at_depth,
        rank,
        exists,
        probability,
        len(shape),
        most_siblings,
        torch.cat(draft_probs, dim=1),
        buffers.draft_row,
        buffers.tree_mask,
    )


def grow_top_k(
    work: Drafting,
    root: Root,
    levels: int,
    top_k: int,
    nodes: int,
    depth: Tensor | None = None,
    width: Tensor | None = None,
) -> Tree:
    """EAGLE-2's dynamic tree (Li et al., EMNLP 2024): the best ``nodes`` of all candidates by cumulative probability.

    Expansion: on each of ``levels`` levels, every draft of the frontier offers its ``top_k`` most likely tokens as
    candidates, and the best ``top_k`` of these by cumulative log q are the next frontier. depth, width [B] (int64)
    lower ``levels`` and ``top_k`` for each image. Reranking: see _keep_best().
    """
    batch, device = len(root.token), root.token.device
    top_k = min(top_k, root.out.logits.shape[-1])
    index = counting(top_k, device)
    allowed = torch.ones((1, top_k), dtype=torch.bool, device=device) if width is None else index < width[:, None]
    # q, hidden state, cumulative log q, candidate number and tree mask of the frontier, first the root.
    q, hidden = work.probs(root.out.logits, root.committed[:, None]), root.out.hidden
    score = torch.zeros((batch, 1), device=device)
    frontier = torch.full((batch, 1), -1, device=device)  # -1: the root
    tree_mask = torch.zeros((batch, 1, 0), dtype=torch.bool, device=device)
    found: list[_Candidates] = []
    count = 0  # candidates of the levels above
    for number in range(1, levels + 1):
        position = root.committed + number - 1
        best = q.topk(top_k)
        legal = allowed[:, None] & (position < work.layout.length)[:, None, None]
        if depth is not None:
            legal = legal & (number <= depth)[:, None, None]
        scores = (score[..., None] + best.values.log()).masked_fill(~legal, -torch.inf)  # [B, F, top_k]
        found.append(
            _Candidates(
                best.indices.flatten(1),
                frontier[..., None].expand_as(scores).flatten(1),
                number,
                index.expand_as(scores).flatten(1),
                scores.flatten(1),
                best.values.flatten(1),
            )
        )
        if number < levels:
            score, chosen = scores.flatten(1).topk(top_k)
            score = score.masked_fill(~allowed, -torch.inf)
            parent = torch.div(chosen, top_k, rounding_mode="floor")  # place in the frontier
            token = best.indices.flatten(1).gather(1, chosen)
            own = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch, -1, -1)
            tree_mask = torch.cat((take(tree_mask, parent), own), dim=2)
            out = work.expand(token, position[:, None].expand(-1, top_k), take(hidden, parent), tree_mask)
            q, hidden = work.probs(out.logits, position[:, None].expand(-1, top_k) + 1), out.hidden
            frontier = count + chosen
            count += scores[0].numel()
    return _keep_best(found, root, nodes, levels, top_k)


class _Drafts(NamedTuple):
    """Drafts of one level [B, w]: tokens, do they exist, and their probabilities."""

    token: Tensor
    exists: Tensor
    probability: Tensor


@dataclass(frozen=True)
class _Candidates:
    """Candidates of one level [B, c]. Candidates are numbered over all levels; parent -1 is the root.

    score: cumulative log q, minus infinity for one that may not be drafted.
    """

    token: Tensor
    parent: Tensor
    level: int
    rank: Tensor
    score: Tensor
    probability: Tensor


def _root_draft(root: Root) -> _Drafts:
    token = root.token[:, None]
    return _Drafts(token, torch.ones_like(token, dtype=torch.bool), torch.ones_like(token, dtype=torch.float32))


def _keep_best(found: list[_Candidates], root: Root, nodes: int, levels: int, width: int) -> Tree:
    """The tree of the root and the ``nodes`` candidates with the highest scores, in the order of their numbers.

    A parent has a smaller number than its child and never a lower score, and ties go to the smaller number: so the tree
    holds every draft's parent, and before the draft.
    """
    score = torch.cat([c.score for c in found], dim=1)
    total = score.shape[1]
    best = score.sort(dim=1, descending=True, stable=True)
    number, exists = best.indices[:, :nodes], best.values[:, :nodes] > -torch.inf
    # By number, the missing ones last. In int32, as Apple's GPUs have sorted more than 256 int64 numbers wrongly.
    order = torch.where(exists, number, total + number).int().sort(dim=1).values.long()
    exists, number = order < total, order % total
    # Slot of every candidate number. The last entry, where the parent -1 points, is the root's slot 0.
    slot = torch.arange(1, number.shape[1] + 1, device=number.device).expand_as(number)
    slot_of = torch.zeros((len(number), total + 1), dtype=torch.int64, device=number.device)
    slot_of = slot_of.scatter(1, torch.where(exists, number, total), torch.where(exists, slot, 0))

    def picked(values: list[Tensor]) -> Tensor:
        return torch.cat(values, dim=1).gather(1, number)

    level = [torch.full_like(c.token, c.level) for c in found]
    parent = slot_of.gather(1, picked([c.parent for c in found]) % (total + 1))
    drafts = picked([c.token for c in found]), exists, picked([c.probability for c in found])
    token, exists, probability = (torch.cat(pair, dim=1) for pair in zip(_root_draft(root), drafts, strict=True))
    parent, depth, rank = (
        torch.nn.functional.pad(x, (1, 0)) for x in (parent, picked(level), picked([c.rank for c in found]))
    )
    return Tree(token, parent, depth, rank, exists, probability, levels, width)
