"""Growing draft trees with a drafter: children sampled from its probabilities, or its most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.drafting import children, keep_best
from ...kernels.sampling import take
from ..constants import constant, counting
from ..contract import Drafter, SamplingParams, StepOut
from ..layout import TokenLayout
from ..probabilities import sampling_probs
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

    def forced_ids(self, position: Tensor) -> Tensor | None:
        """The ids forced at positions [B, levels], or -1; None if no token is forced."""
        return self.layout.forced_ids(position) if self.forcing else None

    def probs(self, logits: Tensor, forced: Tensor | None, level: int) -> Tensor:
        """q [B, F, V+] from the drafter's logits [R, F, V+] for a level, processed exactly as the target's. forced: see
        ``forced_ids``.

        Greedy decoding (temperature 0) drafts at temperature 1, where q has more than one token.
        """
        params = replace(self.params, temperature=self.params.temperature or 1.0)
        here = None if forced is None else forced[:, level : level + 1].expand(-1, logits.shape[1])
        return sampling_probs(logits, params, self.vocab, here)

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
    levels, vocab, device = len(shape), root.out.logits.shape[-1], root.token.device
    buffers = tree_buffers(shape, device)
    positions = root.committed[:, None] + counting(levels + 1, device)  # level n (from 0) drafts positions[n]
    most, forced = (positions < work.layout.length) * vocab, work.forced_ids(positions)
    # q, hidden state and score (see kernels/drafting.py) of the drafts to expand, first the root.
    q, hidden = work.probs(root.out.logits, forced, 0), root.out.hidden
    one, score = (constant((value,), device).expand(len(root.token), 1) for value in (1.0, 0.0))
    grown, draft_probs = [(root.token[:, None], one, score)], [q]
    noise = None
    if work.params.temperature > 0:  # for all levels at once: one launch
        draw = torch.add(buffers.probs_place, round_index, alpha=DRAWS)
        noise = work.stream.gumbel(positions[:, buffers.probs_level], vocab, Purpose.DRAFT, draw)
        noise = noise.split([1, *(level.inner for level in shape)], dim=1)
    for n, (level, constants) in enumerate(zip(shape, buffers.levels, strict=True)):
        token, probability, score = children(
            q, None if noise is None else noise[n], score, most[:, n : n + 1], constants.child, constants.siblings
        )
        grown.append((token, probability, score))
        if level.inner:  # the first ``inner`` of them are expanded
            inner = slice(level.inner)
            here, mask = positions[:, n : n + 1].expand(-1, level.inner), constants.mask.expand(len(token), -1, -1)
            above = hidden.expand(-1, level.inner, -1) if hidden.shape[1] == 1 else hidden[:, constants.parent[inner]]
            out = work.expand(token[:, inner], here, above, mask)
            q, hidden, score = work.probs(out.logits, forced, n + 1), out.hidden, score[:, inner]
            draft_probs.append(q)
    token, probability, score = (torch.cat(parts, dim=1) for parts in zip(*grown, strict=True))
    parent, depth, rank = (x.expand_as(token) for x in (buffers.parent, buffers.depth, buffers.rank))
    return Tree(
        token,
        parent,
        depth,
        rank,
        score > -torch.inf,
        probability,
        levels,
        buffers.children.shape[2],
        torch.cat(draft_probs, dim=1),
        buffers.draft_row,
        buffers.tree_mask,
        buffers.children,
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
    lower ``levels`` and ``top_k`` for each image. Reranking: see kernels/drafting.py.
    """
    batch, device = len(root.token), root.token.device
    top_k = min(top_k, root.out.logits.shape[-1])
    positions = root.committed[:, None] + counting(levels, device)  # level n (from 0) drafts positions[n]
    forced, most = work.forced_ids(positions), (positions < work.layout.length) * top_k
    if depth is not None and width is not None:
        most = torch.minimum(most, width[:, None] * (counting(levels, device) < depth[:, None]))
    index, own = counting(top_k, device), torch.eye(top_k, dtype=torch.bool, device=device).expand(batch, -1, -1)
    # q, hidden state, score (see kernels/drafting.py) and tree mask of the frontier, first the root.
    q, hidden = work.probs(root.out.logits, forced, 0), root.out.hidden
    score = constant((0.0,), device).expand(batch, 1)
    tree_mask = own[:, :1, :0]
    found, expanded = [], [root.token[:, None][:, :0]]
    for n in range(levels):
        offered = counting(q.shape[1] * top_k, device)
        token, probability, scores = children(q, None, score, most[:, n : n + 1], offered, top_k)
        found.append((token, probability, scores))
        if n + 1 < levels:
            score, chosen = scores.topk(top_k)
            if width is not None:
                score = score.masked_fill(index >= width[:, None], -torch.inf)
            parent = torch.div(chosen, top_k, rounding_mode="floor")  # place in the frontier
            tree_mask = torch.cat((take(tree_mask, parent), own), dim=2)
            here = positions[:, n : n + 1].expand(-1, top_k)
            out = work.expand(token.gather(1, chosen), here, take(hidden, parent), tree_mask)
            q, hidden = work.probs(out.logits, forced, n + 1), out.hidden
            expanded.append(chosen)
    token, probability, score = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    token, parent, depth, rank, exists, probability, mask, slots = keep_best(
        token, probability, score, torch.cat(expanded, dim=1), root.token, nodes, top_k
    )
    drafts = token, parent, depth, rank, exists, probability
    return Tree(*drafts, levels, top_k, fixed_mask=mask, fixed_children=slots)
