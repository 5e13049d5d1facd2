"""Speculative decoding with a drafter: draft, verify, commit.

One loop for every method of this kind. They differ in three parts, each in a file of its own (VVS, vvs.py, also in its
rounds: some accept drafts unverified):

drafter     small AR model or EAGLE feature drafter                      (contract.Drafter)
structure   chain, static tree, dynamic tree, adjacency-adaptive tree    drafts/
rule        exact, LANTERN, LANTERN++, UniformRSD, Cool-SD, ...          rules/

A round, whose parts are in tree_rounds.py:

1. draft     the drafter observes the tokens of the last round, and grows a tree after the last one decided (the root)
2. verify    one forward pass of the target feeds the root and all drafts; verification accepts a path of the tree and
             samples the token after it, the next root
3. commit    the cache keeps root and path. With the path a, b of this tree, c is the next root:

             fed     root a a' b b'      (the slots of the tree: 0, 1, ...)
             kept    root a    b         -> decided: a b c
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...device.graphs import Graphs
from ...kernels.sampling import categorical, take
from ..contract import Drafter, Extent, Request, StepOut
from ..drafts.auto import Auto
from ..drafts.costs import USUAL
from ..drafts.structures import Structure
from ..engine.run import DiscreteMethod, Run
from ..engine.session import session_key
from ..rng import Purpose
from ..rules.acceptance import AcceptanceRule, Exact, bind_rule
from ..trace import Source, Trace
from .pass_costs import pass_costs
from .tree_rounds import Observed, Round, accept, advance, draft, record_round, record_tokens

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
        return advance(self.structure, run, state, token, one)

    def step(self, run: Run, state: Round, extent: Extent = Extent()) -> Round:
        """Draft a tree, verify it with one forward pass, and commit what it accepts."""
        tree = draft(self.structure, run, state, extent)
        position = (state.committed[:, None] + tree.depth - 1).clamp(min=0)
        out = run.model.step(run.cache, tree.token, position, tree.tree_mask())
        verified, probs_after = accept(self.structure, self.rule, run, state, tree, out.logits, position)

        active = state.committed < run.inputs.end
        count = torch.where(active, torch.minimum(verified.accepted + 1, run.inputs.end - state.committed), 0)
        path = torch.nn.functional.pad(verified.path, (1, 0))
        run.keep(torch.where(active, verified.accepted + 1, 0), path)
        accepted = torch.where(active, verified.accepted, 0)
        record_tokens(run, state, tree, verified, count, probs_after)
        record_round(run, state, tree, accepted, count, tree.token.shape[1], skipped=0)
        history = self.structure.learn(
            state.history, state.plan, tree, verified, state.committed, state.committed + count, accepted, active
        )
        observed = Observed(verified.token, state.committed, count, take(out.hidden, path))
        if run.pads:
            observed = observed.pad(self.max_drafter_inputs)
        state = replace(state, observed=observed, history=history, passes=state.passes + active)
        return advance(self.structure, run, state, verified.token, count)

    def fit(self, run: Run, committed: Tensor, out: StepOut, graphs: Graphs, request: Request) -> DraftTree:
        if not self.structure.measures:
            return self
        costs = pass_costs(run, committed, out, graphs, self.width(request), self.structure.expansions())
        return replace(self, structure=self.structure.fit(costs))

    def without_measuring(self) -> DraftTree:
        return replace(self, structure=self.structure.fit(USUAL)) if self.structure.measures else self

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        return self.structure.next_extent(before, read, pads)

    def bind(self, request: Request) -> DraftTree:
        return replace(self, rule=bind_rule(self.rule, request.model))

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
