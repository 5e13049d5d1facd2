"""Speculative decoding with a drafter: draft, verify, commit.

One loop for every method of this kind. They differ in three parts, each in a file of its own (VVS, vvs.py, also in its
rounds: some accept drafts unverified):

drafter     small AR model or EAGLE feature drafter                      (contract.Drafter)
structure   chain, static tree, dynamic tree, adjacency-adaptive tree    drafts/
rule        exact, LANTERN, LANTERN++, UniformRSD, Cool-SD, ...          rules/

A round:

1. draft     the drafter observes the tokens of the last round, and grows a tree after the last one decided (the root)
2. verify    one forward pass of the target feeds the root and all drafts; verification accepts a path of the tree and
             samples the token after it, the next root
3. commit    the cache keeps root and path. With the path a, b of this tree, c is the next root:

             fed     root a a' b b'      (the slots of the tree: 0, 1, ...)
             kept    root a    b         -> decided: a b c
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...device.graphs import Graphs
from ...kernels.sampling import categorical, may_read, take
from ..constants import counting
from ..contract import Drafter, Request, StepOut
from ..drafts.auto import Auto
from ..drafts.costs import USUAL
from ..drafts.growing import Drafting, Root
from ..drafts.structures import Structure
from ..drafts.trees import Tree
from ..engine.run import DiscreteMethod, Extent, Halfway, Run
from ..engine.session import session_key
from ..rng import Purpose
from ..rules.acceptance import AcceptanceRule, Exact, bound
from ..trace import Source, Trace
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
from .pass_costs import pass_costs
from .rounds import Drafted, Observed, Round

log = logging.getLogger(__name__)
DRAFTERS = {"eagle": "EAGLE", "model": "small model"}  # kind of a drafter -> for people


@dataclass(frozen=True)
class DraftTree(DiscreteMethod):
    """Speculative decoding with ``drafter``; exact with rule=Exact(), whatever the structure."""

    drafter: Drafter
    structure: Structure = field(default_factory=Auto)
    rule: AcceptanceRule = field(default_factory=Exact)
    name: str = "draft_tree"
    feeds_tree: ClassVar[bool] = True
    round_fields: ClassVar[tuple[str, ...]] = ("accepted", "committed", "width", "nodes", "depth", "skipped")

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def draft_width(self) -> int:
        """The most uncommitted tokens in the drafter's cache."""
        return max(self.structure.expansions(), self.max_drafter_inputs)

    @property
    def max_drafter_inputs(self) -> int:
        """The most tokens that the drafter observes after a round."""
        return 1 + self.structure.size()[1]

    def begin(self, run: Run, committed: Tensor, out: StepOut) -> Round:
        first, one = committed[:, None], torch.ones_like(committed)
        p = run.probs(out.logits, first - 1)
        token = categorical(p, run.inputs.stream.uniform(first, Purpose.REDRAW))
        run.record.write(first, first >= 0, token, p, source=Source.PREFILL, finalised_at=0)
        run.record.round(accepted=0, committed=committed + 1, width=1, nodes=0, depth=0, skipped=0)
        observed = Observed(token, committed, one, out.hidden)
        if run.pads:
            observed = observed.pad(self.max_drafter_inputs)
        history = self.structure.start(len(one), run.inputs.layout, one.device)
        state = Round(committed, token[:, 0], observed, history, None, None, passes=one, index=torch.zeros_like(one[0]))
        return self.advance(run, state, token, one)

    def step(self, run: Run, state: Any, extent: Extent = Extent()) -> Round | Halfway:
        """A round, or a half of it where the host measures drafting."""
        if isinstance(state, Drafted):
            return self.verify(run, state.round, state.tree)
        tree = self.draft(run, state, extent)
        return self.verify(run, state, tree) if run.pads else Drafted(state, tree)

    def draft(self, run: Run, state: Round, extent: Extent) -> Tree:
        """Let the drafter observe the tokens of the last round, and grow a tree."""
        new = state.observed
        position = new.begin[:, None] + counting(new.token.shape[1], new.begin.device)
        out = self.drafter.observe(run.memory, new.token, position, new.hidden, new.count)
        work = Drafting(
            self.drafter, run.memory, run.inputs.layout, run.params, run.model.vocab, run.inputs.stream, run.forcing
        )
        return self.structure.grow(work, Root(state.root, state.committed, out), state.plan, extent, state.index)

    def verify(self, run: Run, state: Round, tree: Tree) -> Round:
        """Verify the tree with one forward pass, and commit what it accepts."""
        position = (state.committed[:, None] + tree.depth - 1).clamp(min=0)
        out = run.model.step(run.cache, tree.token, position, tree.tree_mask())
        verified, probs_after = self.accept(run, state, tree, out.logits, position)

        active = state.committed < run.inputs.end
        count = torch.where(active, torch.minimum(verified.accepted + 1, run.inputs.end - state.committed), 0)
        path = torch.nn.functional.pad(verified.path, (1, 0))
        run.keep(torch.where(active, verified.accepted + 1, 0), path)
        accepted = torch.where(active, verified.accepted, 0)
        self.record(run, state, tree, verified, count, probs_after)
        self.record_round(run, state, tree, accepted, count, tree.token.shape[1], skipped=0)
        history = self.structure.learn(
            state.history, state.plan, tree, verified, state.committed, state.committed + count, accepted, active
        )
        observed = Observed(verified.token, state.committed, count, take(out.hidden, path))
        if run.pads:
            observed = observed.pad(self.max_drafter_inputs)
        state = replace(state, observed=observed, history=history, passes=state.passes + active)
        return self.advance(run, state, verified.token, count)

    def accept(
        self, run: Run, state: Round, tree: Tree, logits: Tensor, position: Tensor
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
        if self.structure.block or not may_read(position):
            probs = run.probs(logits, position)
            probs_after = partial(take, probs)

        random = RoundRandom(run.inputs.stream, state.index, state.committed)
        if not tree.levels:
            return sample_after_root(tree, probs, random), probs_after
        if self.structure.block:
            return block_verification(tree, probs, random), probs_after
        if not tree.sampled and self.rule.exact:
            return verify_by_sampling(tree, probs, random), probs_after
        levels = state.committed[:, None] + counting(tree.levels + 1, position.device)
        return recursive_rejection(self.rule, tree, probs, run.strength_at(levels), random), probs_after

    def advance(self, run: Run, state: Round, token: Tensor, count: Tensor) -> Round:
        """Count the first ``count`` [B] of the new tokens [B, L], and plan the next trees."""
        committed, index = state.committed + count, state.index + 1
        last = token.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0]
        plan = self.structure.plan(state.history, committed, run.inputs.layout, run.inputs.stream, index)
        extent = self.structure.extent(state.history, plan, run.inputs.layout.length - committed)
        root = torch.where(count > 0, last, state.root)
        return replace(state, committed=committed, root=root, plan=plan, extent=extent, index=index)

    def record(
        self,
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
        self, run: Run, state: Round, tree: Tree, accepted: Tensor, count: Tensor, width: int, skipped: Tensor | int
    ) -> None:
        """Record a round that accepts ``accepted`` [B] drafts and decides ``count`` [B] tokens."""
        if run.forcing:  # forced tokens are not counted
            position = state.committed[:, None] + counting(tree.levels, count.device)
            free = run.inputs.layout.forced_ids(position) < 0
            accepted = (free & (position < (state.committed + accepted)[:, None])).sum(1)
        nodes, depth = tree.exists[:, 1:].sum(1), tree.spread()[0]
        run.record.round(accepted=accepted, committed=count, width=width, nodes=nodes, depth=depth, skipped=skipped)

    def fit(self, run: Run, committed: Tensor, out: StepOut, graphs: Graphs, request: Request) -> DraftTree:
        if not self.structure.measures:
            return self
        costs = pass_costs(run, committed, out, graphs, self.width(request), self.structure.expansions())
        return replace(self, structure=self.structure.fit(costs))

    def without_measuring(self) -> DraftTree:
        return replace(self, structure=self.structure.fit(USUAL)) if self.structure.measures else self

    def own_choices(self) -> dict[str, Any]:
        return {"structure": self.structure.describe()}

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        return self.structure.next_extent(before, read, pads)

    def bound(self, request: Request) -> DraftTree:
        return replace(self, rule=bound(self.rule, request.model))

    def notices(self, trace: Trace) -> list[str]:
        """What people should know of a finished run, a sentence each."""
        return self.structure.notices()

    def annotate(self, trace: Trace) -> None:
        if notices := self.notices(trace):
            log.warning("%s", " ".join(notices))
            trace.settings["notices"] = notices
        if isinstance(self.structure, Auto) and not self.structure.opening.variant:
            return  # drafts do not pay
        nodes = trace.rounds["nodes"]
        if len(nodes) > 1 and not nodes.any():
            log.warning(
                "The drafter proposed no tokens in this run, so it saved nothing: its predictions are NaN or infinite. "
                "The image is unaffected. Reload the drafter's file, or load the model with another dtype."
            )

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)
        self.structure.check()
        self.rule.check()
        if self.structure.block and not isinstance(self.rule, Exact):
            raise ValueError(
                "Block verification is exact and cannot be relaxed. Use a chain without it, or the exact rule."
            )

    def width(self, request: Request) -> int:
        """The root and the tree."""
        return 1 + self.structure.size()[0]

    def describe(self, request: Request) -> dict[str, Any]:
        return {
            "method": self.name,
            "drafter": self.drafter.kind,
            "structure": self.structure.describe(),
            "rule": self.rule.describe(),
            "lossless": self.lossless,
        }

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        """The drafter; its structure is described by itself."""
        return DRAFTERS.get(settings["drafter"]) or settings["drafter"]

    def session_key(self, request: Request) -> Hashable:
        structure = self.structure.describe() | {"costs": None}  # which a trace names, but no step depends on
        return session_key(request, self.drafter, repr(self.describe(request) | {"structure": structure}))
