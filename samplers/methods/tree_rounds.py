"""The parts of a round of speculative decoding, and what it hands on to the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.sampling import images_where, may_read, take
from ..constants import counting
from ..contract import Extent
from ..drafts.growing import Drafting, Root
from ..drafts.structures import Structure
from ..drafts.trees import Tree
from ..engine.run import Run
from ..rules.acceptance import AcceptanceRule
from ..verification.tree import (
    RoundRandom,
    TargetProbs,
    Verified,
    block_verification,
    draft_tv,
    recursive_rejection,
    sample_after_root,
    verify_by_sampling,
)


@dataclass(frozen=True)
class Observed:
    """What the drafter observes next: tokens [B, U] at positions ``begin`` [B] and on, the first ``count`` [B] valid.

    hidden [R, U, D]: the target's hidden state one position before each token.
    """

    token: Tensor
    begin: Tensor
    count: Tensor
    hidden: Tensor

    def where(self, condition: Tensor, other: Observed) -> Observed:
        """These for the images where condition [B], else ``other``."""
        return Observed(*(images_where(condition, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def pad(self, width: int) -> Observed:
        """With U at least ``width``, so that rounds have one shape and are captured once."""
        missing = width - self.token.shape[1]
        if missing <= 0:
            return self
        pad = torch.nn.functional.pad
        return replace(self, token=pad(self.token, (0, missing)), hidden=pad(self.hidden, (0, 0, 0, missing)))


@dataclass(frozen=True)
class Round:
    """The state of speculative decoding.

    committed [B]: tokens decided so far; root [B]: the last of them, which is not in the target's cache yet; observed:
    what the drafter has not observed yet. history, plan, extent: the structure's memory, its next trees, and what the
    host must know of them (drafts/structures.py). passes [B]: forward passes that verified each image; index []: of
    the next round, from 1.
    """

    committed: Tensor
    root: Tensor
    observed: Observed
    history: Any
    plan: tuple[Tensor, Tensor] | None
    extent: Tensor | None
    passes: Tensor
    index: Tensor
    draft: ClassVar[None] = None


def start_drafting(run: Run) -> Drafting:
    """What a tree is grown with."""
    assert run.drafter is not None
    inputs, vocab = run.inputs, run.model.vocab
    return Drafting(run.drafter, run.draft_state, inputs.layout, run.params, vocab, inputs.stream, run.forcing)


def draft(structure: Structure, run: Run, state: Round, extent: Extent) -> Tree:
    """Let the drafter observe the tokens of the last round, and grow a tree."""
    new, work = state.observed, start_drafting(run)
    position = new.begin[:, None] + counting(new.token.shape[1], new.begin.device)
    out = work.drafter.observe(run.draft_state, new.token, position, new.hidden, new.count)
    return structure.grow(work, Root(state.root, state.committed, out), state.plan, extent, state.index)


def accept(
    structure: Structure, rule: AcceptanceRule, run: Run, state: Round, tree: Tree, logits: Tensor, position: Tensor
) -> tuple[Verified, Callable[[Tensor], Tensor]]:
    """Verify in the way that suits the children and the rule.

    logits [R, M + 1, V+] and position [B, M + 1] are those of the slots. Also returns a function: slots [B, n] ->
    the target's probabilities [B, n, V+] after them.
    """

    def visited(slots: Tensor) -> Tensor:
        return run.probs(take(logits, slots), position.gather(1, slots))

    def p(slot: Tensor) -> Tensor:
        return visited(slot[:, None])[:, 0]

    probs: TargetProbs = p  # verification visits few slots: compute their probabilities on demand
    probs_after: Callable[[Tensor], Tensor] = visited
    if structure.block or not may_read(position):
        probs = run.probs(logits, position)
        probs_after = partial(take, probs)

    random = RoundRandom(run.inputs.stream, state.index, state.committed)
    if not tree.levels:
        return sample_after_root(tree, probs, random), probs_after
    if structure.block:
        return block_verification(tree, probs, random), probs_after
    if not tree.sampled and rule.is_exact:
        return verify_by_sampling(tree, probs, random), probs_after
    levels = state.committed[:, None] + counting(tree.levels + 1, position.device)
    return recursive_rejection(rule, tree, probs, run.strength_at(levels), random), probs_after


def record_tokens(
    run: Run,
    state: Round,
    tree: Tree,
    verified: Verified,
    count: Tensor,
    probs_after: Callable[[Tensor], Tensor],
    similarity: Tensor | None = None,
) -> None:
    """Record the first ``count`` [B] verified tokens; probs_after: see accept(); similarity [B, 1]: of the tree's
    paths, where it was computed."""
    number, (depth, width) = counting(tree.levels + 2, count.device)[1:], tree.spread()
    before = torch.nn.functional.pad(verified.path, (1, 0))
    p = probs_after(before)
    distance = draft_tv(tree, before, p)
    run.record.write(
        state.committed[:, None] + number - 1,
        number <= count[:, None],
        verified.token,
        p,
        source=verified.source,
        finalised_at=state.passes[:, None],
        depth=torch.where(verified.tested, number, 0),
        rank=verified.rank,
        q=verified.q,
        ratio=verified.ratio,
        drift_bound=verified.drift_bound,
        tree_depth=depth[:, None],
        tree_width=width[:, None],
        similarity=similarity,
        draft_tv=None if distance is None else distance * verified.tested,
    )


def record_round(
    run: Run, state: Round, tree: Tree, accepted: Tensor, count: Tensor, width: int, skipped: Tensor | int
) -> None:
    """Record a round that accepts ``accepted`` [B] drafts and decides ``count`` [B] tokens."""
    if run.forcing:  # forced tokens are not counted
        position = state.committed[:, None] + counting(tree.levels, count.device)
        free = run.inputs.layout.forced_ids(position) < 0
        accepted = (free & (position < (state.committed + accepted)[:, None])).sum(1)
    nodes, depth = tree.exists[:, 1:].sum(1), tree.spread()[0]
    run.record.round(accepted=accepted, committed=count, width=width, nodes=nodes, depth=depth, skipped=skipped)


def advance(structure: Structure, run: Run, state: Round, token: Tensor, count: Tensor) -> Round:
    """Count the first ``count`` [B] of the new tokens [B, L], and plan the next trees."""
    committed, index = state.committed + count, state.index + 1
    last = token.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0]
    plan = structure.plan(state.history, committed, run.inputs.layout, run.inputs.stream, index)
    extent = structure.extent(state.history, plan, run.inputs.layout.length - committed)
    root = torch.where(count > 0, last, state.root)
    return replace(state, committed=committed, root=root, plan=plan, extent=extent, index=index)
