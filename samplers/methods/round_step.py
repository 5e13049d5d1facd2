"""A round of speculative decoding as two functions of tensors: draft, and settle (verify or take, commit).

All that is not a tensor, and the memory of the caches, stays the same during a run; so a round can be captured as CUDA
graphs, one for every shape it can have, and needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import at, categorical, readable, take
from ..constants import counting
from ..contract import ARModel, Drafter, SamplingParams
from ..drafts.growing import Drafting, Root
from ..drafts.structures import Extent, Plan, Structure
from ..drafts.trees import Tree
from ..engine.prefill import Start
from ..layout import TokenLayout
from ..probabilities import probabilities
from ..rng import Purpose, Stream
from ..rules.acceptance import AcceptanceRule, Exact
from ..trace import Record, Source
from ..verification.tree import Laws, Numbers, Verified, block_verification, recursive_rejection, sample_and_match
from . import skipping as vvs
from .rounds import Carry, Decided, Pending, Told, after_verification, fed_mask, kept_slots, rejoin
from .skipping import Skipping

ROUND = ("accepted", "committed", "width", "nodes", "depth", "skipped")


@dataclass(frozen=True)
class DraftInputs:
    """What of a Carry drafting reads: a captured step gets a copy of all it is given."""

    stream: Stream
    layout: TokenLayout
    skippable: Tensor | None
    committed: Tensor
    told: Told
    pending: Pending
    plan: Plan
    skipped: Tensor
    turn: Tensor

    @classmethod
    def of(cls, carry: Carry) -> DraftInputs:
        return cls(*(getattr(carry, field.name) for field in fields(cls)))


@dataclass(frozen=True)
class RoundStep:
    """A run's rounds. target and state: those of the model and the drafter, whose caches rounds change in place.

    length: S; forcing: does the layout force any token; told: the least number of tokens the drafter is told at a time,
    of which the last may mean nothing; record: what was decided, also written in place.
    """

    model: ARModel
    target: Any
    drafter: Drafter
    state: Any
    structure: Structure
    rule: AcceptanceRule
    skipping: Skipping | None
    params: SamplingParams
    codebook: Tensor | None
    length: int
    forcing: bool
    told: int
    record: Record

    def begin(
        self, start: Start, stream: Stream, layout: TokenLayout, strength: Tensor, skippable: Tensor | None
    ) -> Carry:
        """The carry behind the first token that is not given, which is drawn from the prediction at the start."""
        out, begin, batch, device = start.out, start.committed, len(strength), strength.device
        none, first = torch.zeros_like(begin), begin[:, None]
        one = none + 1
        p = self.laws(out.logits, first, layout)
        token = categorical(p, stream.uniform(first, Purpose.REDRAW))
        levels = self.structure.size()[1]
        self.record.begin(start.tokens, begin)
        self.record.write(
            first, first >= 0, token, p, finalised_at=0, source=self.source(first, Source.PREFILL, layout)
        )
        self.record.round(accepted=0, committed=begin + 1, width=1, nodes=0, depth=0, skipped=0)
        history = self.structure.start(batch, layout, device)
        told = Told(token, begin, one, out.hidden)
        carry = Carry(
            stream, layout, strength, skippable, begin, told,
            Pending(token, torch.zeros_like(p[..., 0]), one), history, None, None, none > 0, one,
            out.hidden.expand(-1, levels, -1) if self.skipping else None, one, none[0],
        )
        return self.commit(carry, Decided(token, one, told))

    def draft(self, extent: Extent, carry: DraftInputs) -> tuple[Tree, Tensor]:
        """Tell the drafter what was decided, let it grow a tree, and choose who takes it unverified [B] (bool)."""
        told = carry.told
        position = told.begin[:, None] + counting(told.token.shape[1], told.begin.device)
        out = self.drafter.observe(self.state, told.token, position, told.hidden, told.count)
        work = Drafting(
            self.drafter, self.state, carry.layout, self.params, self.model.vocab, carry.stream, self.forcing
        )
        root = Root(carry.pending.root, carry.committed, out)
        tree = self.structure.grow(work, root, carry.plan, extent, carry.turn)
        skip = torch.zeros_like(carry.skipped)
        if self.skipping:
            skip = (carry.committed < self.length) & vvs.decide(
                self.skipping, tree, self.codebook, carry.turn, carry.committed, self.length, carry.skipped,
                carry.skippable,
            )
        return tree, skip

    def settle(self, judging: bool, taking: bool, carry: Carry, tree: Tree, skip: Tensor) -> Carry:
        """Verify the trees of some images (``judging``), take those of ``skip`` [B] as they are (``taking``), commit.

        Finished images stay as they are.
        """
        before, active = carry.committed, carry.committed < self.length
        judged, accepted = active & ~skip, torch.zeros_like(before)
        pending, q, plan, fed = carry.pending, tree.probability, carry.plan, 0
        decided = None
        if judging:
            fed = pending.token.shape[1] + tree.token.shape[1] - 1
            carry, decided, accepted = self.verify(carry, tree, judged)
        if taking:
            taken, q = self.take_unverified(carry, tree, skip)
            decided = taken if decided is None else decided.where(~skip, taken)
        free = accepted
        if self.forcing:
            position = before[:, None] + counting(tree.levels, before.device)
            free = ((position < (before + accepted)[:, None]) & (carry.layout.forced_at(position) < 0)).sum(1)
        self.record.round(
            accepted=free, committed=decided.count, width=fed, nodes=tree.exists[:, 1:].sum(1), depth=tree.spread()[0],
            skipped=skip,
        )
        history = self.structure.learn(
            carry.history, plan, tree, before, before + decided.count, accepted, judged
        )
        pending = rejoin(pending, decided, q, skip, 1 + taking * self.structure.size()[1])
        return self.commit(replace(carry, history=history, pending=pending, skipped=skip), decided)

    def verify(self, carry: Carry, tree: Tree, judged: Tensor) -> tuple[Carry, Decided, Tensor]:
        """One pass of the target over pending tokens and drafts: what it decided, and how many drafts it accepted [B].

        Only the images ``judged`` [B] (bool) are moved on. A pass also is the verification after the fact of pending
        tokens: it changes nothing about them, but tells how likely they were, and the caches their true states.
        """
        pending, waiting = carry.pending, carry.pending.token.shape[1]
        index = counting(waiting, judged.device)
        ahead = torch.cat((index - pending.count[:, None], tree.depth[:, 1:] - 1), dim=1)
        fed = torch.cat((pending.token, tree.token[:, 1:]), dim=1)
        position = (carry.committed[:, None] + ahead).clamp(min=0)
        out = self.model.step(self.target, fed, position, fed_mask(pending, tree))
        behind = partial(self.behind, carry, out.logits, position)
        if self.structure.block or not readable(position):
            p: Laws = behind(None)
            behind = partial(take, p)
        else:  # a walk down a tree meets few of its slots: compute laws as they are met

            def p(node: Tensor) -> Tensor:
                return behind(node[:, None])[:, 0]

        columns = carry.committed[:, None] + counting(tree.levels + 1, judged.device)
        strength = carry.strength.gather(1, columns.clamp(max=self.length - 1))
        verified = self.judge(tree, p, strength, Numbers(carry.stream, carry.turn, carry.committed))

        kept = kept_slots(pending, verified)
        count = torch.where(judged, pending.count + verified.accepted, 0)
        self.model.commit(self.target, count, kept)
        refresh = self.skipping is not None and self.skipping.refresh and waiting > 1
        if refresh:
            self.drafter.rewind(self.state, torch.where(judged, pending.count - 1, 0))
        decided = after_verification(
            pending, verified, out.hidden, kept, carry.committed, self.length, judged, refresh
        )
        self.note(carry, tree, verified, decided, behind, columns)
        if self.skipping:
            if waiting > 1:
                law = self.laws(out.logits[:, : waiting - 1], position[:, : waiting - 1] + 1, carry.layout)
                self.note_pending(carry, law, judged)
            carry = replace(carry, features=vvs.push_features(carry.features, take(out.hidden, kept), count),
                            known=carry.known + count)
        return replace(carry, own_passes=carry.own_passes + judged), decided, torch.where(judged, verified.accepted, 0)

    def behind(self, carry: Carry, logits: Tensor, position: Tensor, slots: Tensor | None) -> Tensor:
        """The target's laws [B, n, V+] behind slots [B, n] of the trees (None: all), from a pass's logits [R, T, V+]
        for tokens at positions [B, T]."""
        waiting, count = carry.pending.token.shape[1], carry.pending.count[:, None]
        if slots is None:
            if waiting == 1:
                return self.laws(logits, position + 1, carry.layout)
            slots = counting(position.shape[1] - waiting + 1, position.device).expand(len(position), -1)
        place = torch.where(slots > 0, slots + waiting, count) - 1
        return self.laws(take(logits, place), position.gather(1, place) + 1, carry.layout)

    def judge(self, tree: Tree, p: Laws, strength: Tensor, numbers: Numbers) -> Verified:
        """Verify in the way that suits the children and the rule."""
        if self.structure.block:
            return block_verification(tree, p, numbers)
        if tree.laws is None and isinstance(self.rule, Exact):
            return sample_and_match(tree, p, numbers)
        return recursive_rejection(self.rule, tree, p, strength, numbers)

    def take_unverified(self, carry: Carry, tree: Tree, skip: Tensor) -> tuple[Decided, Tensor]:
        """A path of the tree as if it were verified, for the images ``skip`` [B]; and its draft probabilities."""
        u = carry.stream.uniform(carry.committed[:, None], Purpose.SKIP, carry.turn)[:, 0]
        slots, count = vvs.choose_path(self.skipping, tree, u)
        count = torch.where(skip, count, 0)
        token, q = tree.token.gather(1, slots), tree.probability.gather(1, slots)
        if tree.laws is None:
            q = torch.ones_like(q)  # proposed for certain
        elif self.skipping.path != "first":  # picked among siblings, which is not drawing from q either
            q = torch.where((tree.rank * tree.exists).amax(1, keepdim=True) > 0, 1.0, q)
        hidden = vvs.stale_features(carry.features, carry.known, count, slots.shape[1])
        columns = carry.committed[:, None] + counting(slots.shape[1], skip.device)
        depth, width = tree.spread()
        self.record.write(
            columns, columns < (carry.committed + count)[:, None], token, None,
            finalised_at=carry.own_passes[:, None] - 1, source=self.source(columns, Source.SKIPPED, carry.layout),
            depth=tree.depth.gather(1, slots), q=q, rank=tree.rank.gather(1, slots),
            tree_depth=depth[:, None], tree_width=width[:, None],
        )
        return Decided(token, count, Told(token, carry.committed, count, hidden)), q

    def commit(self, carry: Carry, decided: Decided) -> Carry:
        """Count the new tokens and plan the next round."""
        committed, turn = carry.committed + decided.count, carry.turn + 1
        plan = self.structure.plan(carry.history, committed, carry.layout, carry.stream, turn)
        extent = self.structure.extent(plan, self.length - committed, coarse=self.told > 0)
        return replace(
            carry, committed=committed, turn=turn, plan=plan, extent=extent, told=decided.told.padded(self.told)
        )

    def laws(self, logits: Tensor, position: Tensor, layout: TokenLayout) -> Tensor:
        """Target laws [B, T, V+] at positions [B, T]."""
        forced = layout.forced_at(position) if self.forcing else None
        return probabilities(logits, self.params, self.model.vocab, forced)

    def source(self, position: Tensor, source: Source | Tensor, layout: TokenLayout) -> Source | Tensor:
        """``source``, or that of a forced token."""
        return torch.where(layout.forced_at(position) >= 0, Source.FORCED, source) if self.forcing else source

    def note(
        self, carry: Carry, tree: Tree, verified: Verified, decided: Decided, behind: Callable[[Tensor], Tensor],
        columns: Tensor,
    ) -> None:
        """Record a verified round; ``behind``: the target's laws behind slots [B, n]."""
        parents = torch.nn.functional.pad(verified.path, (1, 0))
        number = counting(tree.levels + 2, columns.device)[1:]
        depth, width = tree.spread()
        self.record.write(
            columns, number <= decided.count[:, None], verified.token, behind(parents),
            finalised_at=carry.own_passes[:, None], source=self.source(columns, verified.source, carry.layout),
            depth=torch.where(verified.tested, number, 0), rank=verified.rank, q=verified.q,
            ratio=verified.ratio, tv_bound=verified.tv_bound,
            tree_depth=depth[:, None], tree_width=width[:, None],
        )

    def note_pending(self, carry: Carry, p: Tensor, judged: Tensor) -> None:
        """Record what the pass says of tokens taken unverified before it: their laws p [B, P - 1, V+], and the drift of
        not having tested them.

        That is the TV bound of accepting for certain: [1 - p/q]+ for a draft drawn from q, 1 - p for another one.
        """
        count, token = carry.pending.count[:, None], carry.pending.token[:, 1:]
        index = counting(token.shape[1], token.device)
        meant = judged[:, None] & (index < count - 1)
        ratio = at(p, token) / carry.pending.q[:, 1:].clamp(min=1e-30)
        self.record.write(
            carry.committed[:, None] - count + 1 + index, meant, token, p, ratio=ratio,
            tv_bound=(1 - ratio).clamp(min=0),
        )
