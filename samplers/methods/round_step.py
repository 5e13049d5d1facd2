"""A round of speculative decoding as two functions of tensors: draft(), and verify_and_commit().

Everything that is not a tensor, and the memory of the caches, is constant during a run. So a round whose tree has
always the same shape, and is always verified, can be captured as one CUDA graph: whole().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import at, categorical, readable, take
from ..constants import counting
from ..contract import ARModel, Drafter, SamplingParams, StepOut
from ..drafts.growing import Drafting, Root
from ..drafts.structures import Extent, Structure
from ..drafts.trees import Tree
from ..engine.prefill import Start
from ..layout import TokenLayout
from ..probabilities import probabilities
from ..rng import Purpose, Stream
from ..rules.acceptance import AcceptanceRule, Exact
from ..trace import Record, Source
from ..verification.tree import (
    RoundRandom,
    TargetProbs,
    Verified,
    block_verification,
    recursive_rejection,
    sample_and_match,
)
from . import skipping as vvs
from .rounds import (
    Decided,
    DrafterInputs,
    RoundState,
    Uncached,
    after_verification,
    commit_path,
    fed_mask,
    next_uncached,
)
from .skipping import Skipping

ROUND = ("accepted", "committed", "width", "nodes", "depth", "skipped")


@dataclass(frozen=True)
class RoundStep:
    """The rounds of a run. They change target_state and drafter_state (the caches) and the record in place.

    length: S; forcing: does the layout force any token; min_drafter_inputs: the drafter's inputs are padded to this
    many tokens.
    """

    model: ARModel
    target_state: Any
    drafter: Drafter
    drafter_state: Any
    structure: Structure
    rule: AcceptanceRule
    skipping: Skipping | None
    params: SamplingParams
    codebook: Tensor | None
    length: int
    forcing: bool
    min_drafter_inputs: int
    record: Record

    def begin(
        self, start: Start, stream: Stream, layout: TokenLayout, strength: Tensor, skippable: Tensor | None
    ) -> RoundState:
        """The state after the first token past the prefix, which is sampled from the prediction at the start."""
        out, committed, batch, device = start.out, start.committed, len(strength), strength.device
        zero, first = torch.zeros_like(committed), committed[:, None]
        one = zero + 1
        p = self.target_probs(out.logits, first, layout)
        token = categorical(p, stream.uniform(first, Purpose.REDRAW))
        levels = self.structure.size()[1]
        self.record.begin(start.tokens, committed)
        self.record.write(
            first, first >= 0, token, p, finalised_at=0, source=self.source(first, Source.PREFILL, layout)
        )
        self.record.round(accepted=0, committed=committed + 1, width=1, nodes=0, depth=0, skipped=0)
        drafter_inputs = DrafterInputs(token, committed, one, out.hidden)
        state = RoundState(
            stream,
            layout,
            strength,
            skippable,
            committed,
            drafter_inputs,
            Uncached(token, torch.zeros_like(p[..., 0]), one),
            self.structure.start(batch, layout, device),
            None,
            None,
            skipped=zero > 0,
            own_passes=one,
            features=out.hidden.expand(-1, levels, -1) if self.skipping else None,
            known=one,
            round_index=zero[0],
        )
        return self.advance(state, Decided(token, one, drafter_inputs))

    def whole(self, state: RoundState) -> RoundState:
        """A round whose tree has a fixed shape and is verified."""
        return self.verify_and_commit(True, False, state, *self.draft((), state))

    def draft(self, extent: Extent, state: RoundState) -> tuple[Tree, Tensor]:
        """Let the drafter observe the new tokens and grow a tree, and decide who skips verification [B] (bool)."""
        inputs = state.drafter_inputs
        position = inputs.begin[:, None] + counting(inputs.token.shape[1], inputs.begin.device)
        out = self.drafter.observe(self.drafter_state, inputs.token, position, inputs.hidden, inputs.count)
        work = Drafting(
            self.drafter, self.drafter_state, state.layout, self.params, self.model.vocab, state.stream, self.forcing
        )
        root = Root(state.uncached.root, state.committed, out)
        tree = self.structure.grow(work, root, state.plan, extent, state.round_index)
        skip = torch.zeros_like(state.skipped)
        if self.skipping:
            skip = (state.committed < self.length) & vvs.decide(
                self.skipping,
                tree,
                self.codebook,
                state.round_index,
                state.committed,
                self.length,
                state.skipped,
                state.skippable,
            )
        return tree, skip

    def verify_and_commit(
        self, any_verifying: bool, any_skipping: bool, state: RoundState, tree: Tree, skip: Tensor
    ) -> RoundState:
        """Verify the trees, except those of the images ``skip`` [B], which are taken as they are; commit.

        any_verifying, any_skipping: are there images of either kind. Complete images stay as they are.
        """
        before, active = state.committed, state.committed < self.length
        verifying, accept_length = active & ~skip, torch.zeros_like(before)
        uncached, q, plan, width = state.uncached, tree.probability, state.plan, 0
        decided = None
        if any_verifying:
            width = uncached.token.shape[1] + tree.token.shape[1] - 1
            state, decided, accept_length = self.verify(state, tree, verifying)
        if any_skipping:
            taken, q = self.take_unverified(state, tree, skip)
            decided = taken if decided is None else decided.where(~skip, taken)
        free = accept_length  # accepted drafts, forced tokens not counted
        if self.forcing:
            position = before[:, None] + counting(tree.levels, before.device)
            accepted = position < (before + accept_length)[:, None]
            free = (accepted & (state.layout.forced_at(position) < 0)).sum(1)
        self.record.round(
            accepted=free,
            committed=decided.count,
            width=width,
            nodes=tree.exists[:, 1:].sum(1),
            depth=tree.spread()[0],
            skipped=skip,
        )
        history = self.structure.learn(
            state.history, plan, tree, before, before + decided.count, accept_length, verifying
        )
        uncached = next_uncached(uncached, decided, q, skip, 1 + any_skipping * self.structure.size()[1])
        return self.advance(replace(state, history=history, uncached=uncached, skipped=skip), decided)

    def verify(self, state: RoundState, tree: Tree, verifying: Tensor) -> tuple[RoundState, Decided, Tensor]:
        """Verify the trees with one forward pass of the target: the state, new tokens, and accepted drafts [B].

        Only the images ``verifying`` [B] (bool) advance. The pass also computes the probabilities of uncached tokens
        that were accepted unverified. These stay decided, but are recorded, and their true key/value states are cached.
        """
        uncached = state.uncached
        out, position = self.feed(state, tree)

        probs_after = partial(self.probs_after, state, out.logits, position)
        if self.structure.block or not readable(position):
            p: TargetProbs = probs_after(None)
            probs_after = partial(take, p)
        else:  # verification visits few slots: compute their probabilities on demand

            def p(slot: Tensor) -> Tensor:
                return probs_after(slot[:, None])[:, 0]

        new_position = state.committed[:, None] + counting(tree.levels + 1, verifying.device)
        strength = state.strength.gather(1, new_position.clamp(max=self.length - 1))
        random = RoundRandom(state.stream, state.round_index, state.committed)
        verified = self.accept(tree, p, strength, random)

        path = commit_path(uncached, verified)
        count = torch.where(verifying, uncached.count + verified.accepted, 0)
        self.model.commit(self.target_state, count, path)
        was_skipped = uncached.token.shape[1] > 1
        refresh = self.skipping is not None and self.skipping.refresh and was_skipped
        if refresh:
            self.drafter.rewind(self.drafter_state, torch.where(verifying, uncached.count - 1, 0))
        decided = after_verification(
            uncached, verified, out.hidden, path, state.committed, self.length, verifying, refresh
        )

        self.record_verified(state, tree, verified, decided, probs_after, new_position)
        if self.skipping:
            if was_skipped:
                self.record_uncached(state, out.logits, position, verifying)
            state = replace(
                state,
                features=vvs.push_features(state.features, take(out.hidden, path), count),
                known=state.known + count,
            )
        accept_length = torch.where(verifying, verified.accepted, 0)
        return replace(state, own_passes=state.own_passes + verifying), decided, accept_length

    def feed(self, state: RoundState, tree: Tree) -> tuple[StepOut, Tensor]:
        """Feed the target the uncached tokens and all drafts; returns its StepOut and their positions [B, T].

        The last uncached token, the root, is at position committed - 1, and a draft at depth d is d positions later.
        """
        uncached = state.uncached
        index = counting(uncached.token.shape[1], tree.depth.device)
        tree_position_ids = torch.cat((index - uncached.count[:, None], tree.depth[:, 1:] - 1), dim=1)
        position = (state.committed[:, None] + tree_position_ids).clamp(min=0)
        token = torch.cat((uncached.token, tree.token[:, 1:]), dim=1)
        return self.model.step(self.target_state, token, position, fed_mask(uncached, tree)), position

    def probs_after(self, state: RoundState, logits: Tensor, position: Tensor, slots: Tensor | None) -> Tensor:
        """The target's probabilities [B, n, V+] after slots [B, n] of the trees (None: all).

        logits [R, T, V+] and position [B, T] are those of the tokens fed.
        """
        width, count = state.uncached.token.shape[1], state.uncached.count[:, None]
        if slots is None:
            if width == 1:
                return self.target_probs(logits, position + 1, state.layout)
            slots = counting(position.shape[1] - width + 1, position.device).expand(len(position), -1)
        index = torch.where(slots > 0, slots + width, count) - 1  # of the slots among the tokens fed
        return self.target_probs(take(logits, index), position.gather(1, index) + 1, state.layout)

    def accept(self, tree: Tree, p: TargetProbs, strength: Tensor, random: RoundRandom) -> Verified:
        """Verify in the way that suits the children and the rule."""
        if self.structure.block:
            return block_verification(tree, p, random)
        if not tree.sampled and isinstance(self.rule, Exact):
            return sample_and_match(tree, p, random)
        return recursive_rejection(self.rule, tree, p, strength, random)

    def take_unverified(self, state: RoundState, tree: Tree, skip: Tensor) -> tuple[Decided, Tensor]:
        """Take a path of the tree as if it were verified, for the images ``skip`` [B]; and its q [B, levels]."""
        u = state.stream.uniform(state.committed[:, None], Purpose.SKIP, state.round_index)[:, 0]
        slots, count = vvs.choose_path(self.skipping, tree, u)
        count = torch.where(skip, count, 0)
        token, q = tree.token.gather(1, slots), vvs.path_probability(self.skipping, tree, slots)
        hidden = vvs.stale_features(state.features, state.known, count, slots.shape[1])
        position = state.committed[:, None] + counting(slots.shape[1], skip.device)
        depth, width = tree.spread()
        self.record.write(
            position,
            position < (state.committed + count)[:, None],
            token,
            None,
            finalised_at=state.own_passes[:, None] - 1,
            source=self.source(position, Source.SKIPPED, state.layout),
            depth=tree.depth.gather(1, slots),
            q=q,
            rank=tree.rank.gather(1, slots),
            tree_depth=depth[:, None],
            tree_width=width[:, None],
        )
        return Decided(token, count, DrafterInputs(token, state.committed, count, hidden)), q

    def advance(self, state: RoundState, decided: Decided) -> RoundState:
        """Count the new tokens and plan the next round."""
        committed, round_index = state.committed + decided.count, state.round_index + 1
        plan = self.structure.plan(state.history, committed, state.layout, state.stream, round_index)
        extent = self.structure.extent(plan, self.length - committed)
        drafter_inputs = decided.drafter_inputs.padded(self.min_drafter_inputs)
        return replace(
            state, committed=committed, round_index=round_index, plan=plan, extent=extent, drafter_inputs=drafter_inputs
        )

    def target_probs(self, logits: Tensor, position: Tensor, layout: TokenLayout) -> Tensor:
        """The target's probabilities [B, n, V+] at positions [B, n], from logits [R, n, V+]."""
        forced = layout.forced_at(position) if self.forcing else None
        return probabilities(logits, self.params, self.model.vocab, forced)

    def source(self, position: Tensor, source: Source | Tensor, layout: TokenLayout) -> Source | Tensor:
        """``source``, or Source.FORCED where the token is forced."""
        return torch.where(layout.forced_at(position) >= 0, Source.FORCED, source) if self.forcing else source

    def record_verified(
        self,
        state: RoundState,
        tree: Tree,
        verified: Verified,
        decided: Decided,
        probs_after: Callable[[Tensor], Tensor],
        position: Tensor,
    ) -> None:
        """Record the verified tokens at positions [B, L + 1]; probs_after: slots [B, n] -> target probabilities."""
        slot_before = torch.nn.functional.pad(verified.path, (1, 0))
        number = counting(tree.levels + 2, position.device)[1:]
        depth, width = tree.spread()
        self.record.write(
            position,
            number <= decided.count[:, None],
            verified.token,
            probs_after(slot_before),
            finalised_at=state.own_passes[:, None],
            source=self.source(position, verified.source, state.layout),
            depth=torch.where(verified.tested, number, 0),
            rank=verified.rank,
            q=verified.q,
            ratio=verified.ratio,
            tv_bound=verified.tv_bound,
            tree_depth=depth[:, None],
            tree_width=width[:, None],
        )

    def record_uncached(self, state: RoundState, logits: Tensor, position: Tensor, verifying: Tensor) -> None:
        """Record what the pass says about the tokens accepted unverified before it; logits and position as fed.

        Not testing a token drifts as accepting it for certain does: by [1 - p/q]+ with the q that it was taken with
        (skipping.path_probability), whose mean is the total variation of q and p.
        """
        uncached = state.uncached
        width, count, token = uncached.token.shape[1], uncached.count[:, None], uncached.token[:, 1:]
        p = self.target_probs(logits[:, : width - 1], position[:, : width - 1] + 1, state.layout)
        index = counting(token.shape[1], token.device)
        valid = verifying[:, None] & (index < count - 1)
        ratio = at(p, token) / uncached.q[:, 1:].clamp(min=1e-30)
        self.record.write(
            state.committed[:, None] - count + 1 + index,
            valid,
            token,
            p,
            ratio=ratio,
            tv_bound=(1 - ratio).clamp(min=0),
        )
