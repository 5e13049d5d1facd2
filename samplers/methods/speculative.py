"""Speculative decoding with a drafter: draft, verify, commit.

One loop for every method of this kind. They differ in four parts, each in a file of its own:

drafter     small AR model or EAGLE feature drafter                      (contract.Drafter)
structure   chain, static tree, dynamic tree, adjacency-adaptive tree    drafts/
rule        exact, LANTERN, LANTERN++, UniformRSD, Cool-SD, ...          rules/
skipping    some drafts are accepted unverified (VVS)                       skipping.py

A round (round_step.py): the drafter observes the tokens of the last round and grows a tree after the last one decided
(the root). One forward pass of the target feeds the root and all drafts. Verification accepts a path of the tree and
samples the token after it, the next root. The caches keep the accepted path.

The root is decided but not yet in the target's cache, and neither are tokens that were accepted unverified after it.
They are ``uncached``, and the next forward pass feeds them before the tree (rounds.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..contract import Drafter, Method, Progress, Request, Result
from ..drafts.structures import Extent, Static, Structure
from ..engine.memory import run_bytes
from ..engine.prefill import read_prefix
from ..engine.session import Poll, Session, open_session, session_key
from ..probabilities import check_finite
from ..rng import Stream
from ..rules.acceptance import AcceptanceRule, Exact, check_strength
from ..trace import Record, Trace
from .round_step import ROUND, RoundStep
from .skipping import Skipping, check_codebook, check_skippable

log = logging.getLogger(__name__)
DRAFTERS = {"eagle": "EAGLE", "model": "small model"}  # kind of a drafter -> for people


@dataclass(frozen=True)
class DraftTree(Method):
    """Speculative decoding with ``drafter``; exact with rule=Exact() and skipping=None, whatever the structure."""

    drafter: Drafter
    structure: Structure = field(default_factory=Static)
    rule: AcceptanceRule = field(default_factory=Exact)
    skipping: Skipping | None = None
    name: str = "draft_tree"

    @property
    def lossless(self) -> bool:
        return self.rule.lossless and self.skipping is None

    @property
    def bounded(self) -> bool:
        """Is the drift bound known after a run? Not where sampled drafts decide themselves whether they are verified:
        neither those that are nor those that are not are a sample from the drafter any more."""
        return not (self.skipping and self.skipping.schedule == "dynamic" and self.structure.sampled)

    @property
    def one_shape(self) -> bool:
        """See Method: skipping asks the host whether a round is verified, and trees may vary."""
        return self.skipping is None and not self.structure.varies

    @property
    def draft_width(self) -> int:
        """The most uncommitted tokens in the drafter's cache."""
        return max(self.structure.expansions(), self.max_drafter_inputs)

    @property
    def max_drafter_inputs(self) -> int:
        """The most tokens that the drafter observes after a round: new ones, and with ``refresh`` those before
        again."""
        return 2 * self.structure.size()[1] + 1

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)
        self.structure.check()
        self.rule.check()
        if self.skipping is not None:
            self.skipping.check()
            check_codebook(self.skipping, request.model.codebook)
        if self.structure.block and not isinstance(self.rule, Exact):
            raise ValueError(
                "Block verification is exact and cannot be relaxed. Use a chain without it, or the exact rule."
            )

    def width(self, request: Request) -> int:
        """The root and the tree, and after a skipped round the tokens accepted unverified."""
        drafts, levels = self.structure.size()
        return 1 + drafts + (levels if self.skipping else 0)

    def describe(self, request: Request) -> dict[str, Any]:
        settings = {
            "method": self.name,
            "drafter": self.drafter.kind,
            "structure": self.structure.describe(),
            "rule": self.rule.describe(),
            "lossless": self.lossless,
        }
        settings |= {"skipping": asdict(self.skipping)} if self.skipping else {}
        return settings if self.bounded else settings | {"bounded": False}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        """The drafter; its structure is described by itself."""
        return DRAFTERS.get(settings["drafter"], settings["drafter"])

    def session_key(self, request: Request) -> Hashable:
        return session_key(request, self.drafter, repr(self.describe(request)))

    def run_bytes(self, request: Request) -> int:
        return run_bytes(request, self.width(request), self.drafter, self.draft_width)

    def sample(self, request: Request) -> Result:
        self.check(request)
        with open_session(self, request, self.drafter) as session:
            run = SpeculativeRun(self, request, session)
            while True:
                if request.callback:
                    record = session.record
                    request.callback(Progress(record.image, run.known, run.step.length, run.passes, p=record.p))
                if run.done:
                    break
                run.round()
            return Result(run.step.record.image.clone(), run.finish())


class SpeculativeRun:
    """A run on the host, which launches rounds and learns how far the images are.

    ``known`` [B]: decided tokens it knows of; ``passes``: forward passes of the target so far, the prompt's included.
    """

    def __init__(self, method: DraftTree, request: Request, session: Session):
        self.method, self.request, self.session = method, request, session
        model, params, batch = request.model, request.params, request.batch
        self.start_time = time.perf_counter()
        layout = request.layout.to(model.device)
        rule = method.rule.bind(model)
        codebook = None if model.codebook is None else model.codebook.to(model.device)
        strength = check_strength(request.strength, batch, layout.length, model.device)
        if strength is None:
            strength = torch.ones((1, layout.length), device=model.device)
        skippable = check_skippable(request.skippable, batch, layout.length, model.device)
        prompt = (request.conditioning, request.negative, batch, layout)
        guided = params.guided
        target_state = model.start(*prompt, slack=method.width(request), guided=guided, into=session.state)
        drafter_state = method.drafter.start(
            target_state, *prompt, slack=method.draft_width, guided=guided, into=session.draft_state
        )
        session.adopt(target_state, drafter_state)
        session.record = session.record or Record.empty(layout.length, batch, model.device, round_fields=ROUND)
        start = read_prefix(model, target_state, layout, batch, method.drafter, drafter_state, request.callback)
        check_finite(start.out)
        self.step = RoundStep(
            model,
            target_state,
            method.drafter,
            drafter_state,
            method.structure,
            rule,
            method.skipping,
            session.params(params, model.device),
            codebook,
            layout.length,
            bool((layout.forced >= 0).any()),
            method.max_drafter_inputs if session.graphs.one_shape else 0,
            session.record,
        )
        stream = Stream.of(request.seed, batch, model.device)
        self.state = self.step.begin(start, stream, layout, strength.expand(batch, -1), skippable)
        self.poll = Poll(model.device, batch)
        self.known = torch.maximum(self.poll(self.state.committed), start.prefix_length + 1)  # and the first sampled
        self.passes, self.expansions = 1, []
        # When every round ended, first the prompt's forward pass; and when the drafting of every round ended.
        self.times, self.drafted = [self.start_time, time.perf_counter()], [self.start_time]
        self.extent = self.read_extent()

    @property
    def done(self) -> bool:
        """Is every image known to be complete?"""
        return int(self.known.min()) >= self.step.length

    def round(self) -> None:
        """Draft, verify (or skip that), commit."""
        step, session = self.step, self.session
        shape, verifies = self.shape(), True
        if session.graphs.active and self.method.one_shape:
            self.state = session.launch(shape, step.whole, self.state)
        else:
            tree, skip = session.call("draft", step.draft, self.extent, self.state)
            self.drafted.append(time.perf_counter())
            verifies, skips = self.branches(skip)
            self.state = session.call(
                "verify_and_commit", step.verify_and_commit, verifies, skips, self.state, tree, skip
            )
        self.expansions.append(1 + self.method.structure.passes(self.extent))
        self.extent = self.read_extent()
        self.known = torch.maximum(self.known, self.poll(self.state.committed))
        self.passes += verifies
        self.times.append(time.perf_counter())

    def shape(self) -> tuple[Hashable, ...]:
        """The shape of the next round: attention lengths, and which sampling parameters are on."""
        step, method = self.step, self.method
        longest = int(self.known.max()) + self.poll.lag * (method.structure.size()[1] + 1)
        widths = method.width(self.request), method.draft_width + 1
        target, drafter = (None if self.session.graphs.one_shape else longest + width for width in widths)
        return (
            step.model.set_attention_length(step.target_state, target),
            step.drafter.set_attention_length(step.drafter_state, drafter),
            step.params.switches,
        )

    def branches(self, skip: Tensor) -> tuple[bool, bool]:
        """Does any image verify its tree, and does any skip that [B]? Waits for a GPU if the method skips at all."""
        if self.method.skipping is None:
            return True, False
        active = self.state.committed < self.step.length
        any_verifying, any_skipping = torch.stack(((active & ~skip).any(), skip.any())).tolist()
        return any_verifying or not any_skipping, any_skipping

    def read_extent(self) -> Extent:
        """What the host must know to launch the next round. Waits for a GPU only if the structure varies."""
        return () if self.state.extent is None else tuple(self.state.extent.tolist())

    def finish(self) -> Trace:
        """The trace of the run. The time that drafting took is known only on a CPU, where the host waits for it."""
        surplus = min(self.poll.lag, len(self.expansions))  # rounds launched before the end was known
        ends = self.times[1 + surplus :]
        begins = [self.start_time, *ends[:-1]]
        times = {"milliseconds": [1000 * (end - begin) for begin, end in zip(begins, ends, strict=True)]}
        if not self.poll.lag and len(self.drafted) == len(begins):  # captured rounds have no times of their own
            drafted = zip(begins, self.drafted, strict=True)
            times["draft_milliseconds"] = [1000 * (end - begin) for begin, end in drafted]
        settings = self.method.describe(self.request) | asdict(self.request.params)
        expansions = self.expansions[: len(self.expansions) - surplus]
        trace = self.step.record.finish(
            self.request.layout,
            self.request.seed,
            settings,
            time.perf_counter() - self.start_time,
            sum(expansions),
            **times,
        )
        if self.expansions and not trace.rounds["nodes"].any():
            log.warning(
                "The drafter proposed no tokens in this run, so it saved nothing: its predictions are NaN or infinite. "
                "The image is unaffected. Reload the drafter's file, or load the model with another dtype."
            )
        return trace
