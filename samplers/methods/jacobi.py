"""Jacobi decoding: the target drafts for itself, a window of guesses (draft tokens) past the committed ones.

Jacobi   Song et al., ICML 2021; Santilli et al., ACL 2023 (greedy: equality test)
SJD      Teng et al., "Accelerating auto-regressive text-to-image generation with training-free speculative Jacobi
         decoding", ICLR 2025 (arXiv:2410.01699): probabilistic test, all other guesses
         resampled                                                                         reuse="resample"
MC-SJD   So et al., "MC-SJD: maximal coupling speculative Jacobi decoding for autoregressive visual generation
         acceleration", ICML 2026 (arXiv:2510.24211): guesses are coupled                  reuse="coupled"
SJD++    Teng et al., 2025 (arXiv:2512.07503): guesses of high confidence are reused
         (section 4.1); biased                                                             reuse="threshold_paper"
         Jacobi decoding with sampling (table 6): every token is resampled, a guess is
         accepted if it is the new sample                                                  reuse="equality"
         no refinement (section 5.6): new first guesses in every pass                      reuse="none"
ours     SJD++'s reuse, made lossless                                                      reuse="threshold_exact"
         Gumbel-Jacobi: fixed noise, the test is equality, the image is next-token's       reuse="gumbel"

One forward pass feeds the last committed token (the root) and W - 1 guesses. With n tokens committed, column k predicts
position n + k: p_k(x) = p(x | prompt, committed tokens, guesses 0 .. k-1). Guess k, x_k, was sampled from q_k, the
prediction for the same position one pass earlier (or, for a new position, the probabilities of a neighbour). So a pass
is a step of speculative decoding whose drafter is the last Jacobi iteration:

1. verify    accept guess k if u_k < p_k(x_k) / q_k(x_k), else sample another token from [p_k - q_k]+; commit all up to
             the first rejection, whose new token is the last one (gumbel, equality: sample from p_k, and accept the
             guess if it is the sample)
2. refine    choose new guesses past these tokens, by p_k of this pass: coupled, gumbel and equality take what was
             sampled there in 1., the others sample anew
3. move      the window past the committed tokens, and sample first guesses at its end

The lossless modes rest on one invariant: given the guesses before it in the window, guess k is a sample from q_k.

With settling (settling.py), guesses that hardly change any more are accepted without a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...device.graphs import map_tensors
from ...kernels.sampling import at, categorical, may_read, perturbed_argmax, redraw
from ...kernels.verification import EPS, maximal_coupling
from ..constants import constant, counting
from ..contract import Extent, Request, Result, SamplingParams, StepOut
from ..drafts.guesses import INITIAL, DraftState, first_guesses
from ..engine.run import DiscreteMethod, Run
from ..rng import Purpose
from ..rules.acceptance import AcceptanceRule, Exact, bind_rule
from ..settings import check_settings, setting, within
from ..trace import Source, Trace
from .settling import accept_settled, count_settled
from .window import Draft, Tested, Window

REUSE = {  # SJD.reuse -> in words, after the options of the SJD++ Sampler
    "coupled": "SJD, coupled",
    "gumbel": "SJD, same seed",
    "threshold_paper": "SJD++ reuse (paper)",
    "threshold_exact": "SJD++ reuse (exact)",
    "resample": "SJD, redraw",
    "equality": "Jacobi, sampling",
    "none": "SJD, no refinement",
}
AUTOMATIC = 16  # tokens of the window, if none is given
COMPARED = ("gumbel", "equality")  # the test is equality with a sample, without a probability of acceptance


@dataclass(frozen=True)
class SJD(DiscreteMethod):
    """Speculative Jacobi decoding.

    window: tokens W per forward pass, the root included (2 to S). Default: 16, at most S.
    reuse: one of REUSE, see SJD.refine. All sample exactly from the model's distribution but "threshold_paper"
    (SJD++ as printed). initial: one of INITIAL, see first_guesses().
    threshold: SJD++'s tau (> 0). rule: how a guess is verified; its depth is its place in the window, from 1.
    settle: guesses whose distribution changed by less than this (0 to 1, 0: exact) are accepted without a test (see
    settling.py); for reuse="coupled" only.
    """

    window: int | None = setting(None, 2, advice="without one, the method chooses")
    reuse: str = setting("coupled", options=tuple(REUSE))
    initial: str = setting("mixed", options=INITIAL)
    threshold: float = setting(0.5, 0, advice="SJD++ uses 0.5", above=True)
    rule: AcceptanceRule = field(default_factory=Exact)
    settle: float = setting(0.0, 0, 1, exact=0)
    name: ClassVar[str] = "sjd"

    def begin(self, run: Run, committed: Tensor, out: StepOut) -> Window:
        first, length = committed[:, None], run.inputs.layout.length
        if run.draft_state.noise is not None:
            run.draft_state.noise.put(first, run.inputs.stream.gumbel(first, run.model.vocab_total))
        positions = torch.arange(length + 2 * self.columns, device=first.device).expand(len(first), -1)
        window = Window(
            committed,
            torch.zeros_like(first).expand(-1, 2),
            passes=torch.zeros_like(first[:1]),
            initial_u=run.inputs.stream.uniform(positions, Purpose.INITIAL),
            settled_count=torch.zeros_like(committed) if self.settle > 0 else None,
        )
        return self.decide(run, window, run.probs(out.logits[:, -1:], first - 1), Source.PREFILL)

    def step(self, run: Run, window: Window, extent: Extent = Extent()) -> Window:
        offsets = constant(tuple(range(-1, self.columns - 1)), window.token.device, torch.int64)
        token, position = window.token[:, :-1], window.committed[:, None] + offsets
        after = self.decide(run, window, run.predict(token, position), Source.BONUS)
        run.keep(after.committed - window.committed)
        return after

    def decide(self, run: Run, window: Window, p: Tensor, unguessed: Source) -> Window:
        """Test, record and move the window, from the predictions p [B, W or 1, V+] of a forward pass.

        unguessed: the source of a token that is sampled where there is no guess.
        """
        columns, device, state = p.shape[1], p.device, run.draft_state
        position = window.committed[:, None] + counting(columns, device)
        exists = constant((True,) * (columns - 1) + (False,), device, torch.bool).expand(len(p), -1)

        tested = self.verify(run, window, p, position, exists)
        if window.settled_count is not None:
            tested = accept_settled(run, window, tested, p, position)
        count = run.count_decided(tested.accepted, window.committed)
        max_count = int(count.max()) if may_read(count) else columns
        decided = counting(columns, device) < count[:, None]
        self.record(run, window, tested, p, position, decided, max_count, unguessed)

        guess, q = self.refine(run, window, tested, p, position, exists)
        state.draft_probs.put(position, q)
        if state.target_probs is not state.draft_probs:
            state.target_probs.put(position, p)

        # The window moves by at most ``max_count`` positions. It is, with the first guesses behind it,
        #   root | decided tokens | refined guesses | first guesses, and a placeholder
        #          0 .. count-1     count .. W-1      W .. W+max_count-1
        # and the next one begins at the last decided token, its root. Without refinement, first guesses follow that.
        root = placeholder = window.token[:, :1]
        if self.reuse == "none":
            known = window.committed[:, None] + count[:, None] - 1
            last = torch.cat((root, guess), dim=1).gather(1, count[:, None])
            new = known + counting(self.columns + 1, device)[1:]
        else:
            known, last = position[:, -1:], guess[:, -1:]
            new = window.committed[:, None] + counting(self.columns + max_count, device)[columns:]
        if guess is not tested.token:
            guess = torch.where(decided, tested.token, guess)
        if state.tokens is not None:
            state.tokens.put(position, guess.unsqueeze(-1).float())
        noise = None
        if state.noise is not None:
            state.noise.put(new, noise := run.inputs.stream.gumbel(new, p.shape[-1]))
            noise = noise[:, :-1]
        first, first_q = first_guesses(
            self.initial,
            state,
            known,
            last,
            new[:, :-1],
            window.initial_u.gather(1, new[:, :-1]),
            noise,
            run.inputs.layout,
            run.model.vocab,
            run.forcing,
        )
        state.draft_probs.put(new[:, :-1], first_q)
        if self.reuse == "none":
            token = torch.cat((last, first, placeholder), dim=1)
        else:
            token = torch.cat((root, guess, first, placeholder), dim=1)
            token = token.gather(1, count[:, None] + counting(self.columns + 1, device))
        settled_count = None
        if window.settled_count is not None:
            settled_count = count_settled(tested.tv_change, self.settle * run.strength_at(position), exists, count)
        return Window(window.committed + count, token, window.passes + 1, window.initial_u, settled_count)

    def verify(self, run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor) -> Tested:
        """Test every guess by itself, also those past the first rejection."""
        given = run, window, p, position, exists
        if self.reuse in COMPARED:
            return compare(self.reuse, *given)  # is the guess the token that is sampled from p_k
        u, v = run.inputs.stream.uniforms(position, (Purpose.ACCEPT, Purpose.REDRAW), window.passes)
        if self.rule.is_exact:
            return verify_exact(*given, u, v)
        return verify_by_rule(self.rule, *given, u, v)  # LANTERN, Cool-SD, ...

    def refine(
        self, run: Run, window: Window, tested: Tested, p: Tensor, position: Tensor, exists: Tensor
    ) -> tuple[Tensor, Tensor]:
        """New guesses [B, W], and the q [B, W, V+] that the next pass tests them with.

        gumbel, equality: the sample of the test. none: nothing, as first guesses follow the decided tokens.
        coupled: keep x_k with min(1, p_k/q_k), else sample from [p_k - q_k]+ (MC-SJD); q is p_k.
        resample: sample from p_k (SJD; SJD++, eq. 6); q is p_k.
        threshold_*: keep x_k if its confidence C_k = p_k(x_k) / q_k(x_k) > threshold, else sample from p_k. As q,
        threshold_paper takes p_k, although a kept guess is no sample from it (SJD++, eq. 2 of the next pass; biased),
        threshold_exact the true distribution of the new guess,
        q_k 1[p_k/q_k > threshold] + (sum q_k 1[p_k/q_k <= threshold]) p_k.
        """
        if self.reuse == "coupled" and not self.rule.is_exact:  # tokens of a relaxed test are no samples from p
            return verify_exact(run, window, p, position, exists, tested.u, tested.v).token, p
        if self.reuse in (*COMPARED, "coupled", "none"):
            return tested.token, p  # which the test has sampled from p (none: it is not used)
        fresh = categorical(p, tested.v)
        if self.reuse == "resample":
            return fresh, p
        draft = draft_of(run, window, position, exists)
        confident = p > self.threshold * draft.q  # C > threshold, for every id
        keep = exists & confident.gather(-1, draft.token.unsqueeze(-1)).squeeze(-1)
        token = torch.where(keep, draft.token, fresh)
        if self.reuse == "threshold_paper":
            return token, p
        fresh_mass = (draft.q * ~confident).sum(-1, keepdim=True)
        return token, torch.where(exists.unsqueeze(-1), draft.q * confident + fresh_mass * p, p)

    def record(
        self,
        run: Run,
        window: Window,
        tested: Tested,
        p: Tensor,
        position: Tensor,
        decided: Tensor,
        max_count: int,
        unguessed: Source,
    ) -> None:
        """Record the columns that are ``decided`` [B, W] (bool), at most the first ``max_count``."""
        columns, device = p.shape[1], p.device

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[:, :max_count]

        source = constant((Source.RESIDUAL.value,) * (columns - 1) + (unguessed.value,), device)[:max_count]
        source = source.expand(len(p), -1).masked_fill(cut(tested.accepted), Source.ACCEPTED)
        if tested.relaxed is not None:
            source = source.masked_fill(cut(tested.relaxed), Source.RELAXED)
        run.record.write(
            cut(position),
            cut(decided),
            cut(tested.token),
            cut(p),
            source=source,
            finalised_at=window.passes,
            depth=constant((*range(1, columns), 0), device, torch.int64)[:max_count],
            q=cut(tested.q),
            ratio=cut(tested.ratio),
            drift_bound=cut(tested.drift_bound),
        )

    @property
    def columns(self) -> int:
        """W of a method that is bound to a request."""
        assert self.window is not None
        return self.window

    @property
    def lossless(self) -> bool:
        return self.rule.lossless and self.reuse != "threshold_paper" and not self.settle

    @property
    def same_image(self) -> bool:
        return self.reuse == "gumbel"

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)
        length = request.length
        if self.window is not None and not 2 <= self.window <= length:
            legal = within(2, length, "leave window out (0 on the node)")
            raise ValueError(
                f"window is {self.window}, but this image has {length} token{'s' * (length > 1)}: {legal}."
            )
        check_settings(self)
        self.rule.check()
        if self.settle and self.reuse != "coupled":
            raise ValueError(
                f"settle is {self.settle}, but reuse={self.reuse!r} does not settle. Use settle=0 (settling), or "
                "reuse='coupled' (refinement)."
            )
        if self.reuse in COMPARED and not self.rule.lossless:
            raise ValueError(
                f"The refinement {REUSE[self.reuse]!r} (reuse={self.reuse!r}) compares tokens, so the rule "
                f"{self.rule.name!r} has nothing to relax. Use the exact rule, or the coupled refinement "
                "(reuse='coupled')."
            )

    def width(self, request: Request) -> int:
        """The window W."""
        return self.window or min(AUTOMATIC, request.length)

    def describe(self, request: Request) -> dict[str, Any]:
        settings = {
            "method": self.name,
            "window": self.width(request),
            "reuse": self.reuse,
            "initial": self.initial,
            "rule": self.rule.describe(),
            "lossless": self.lossless,
        }
        settings |= {"threshold": self.threshold} if self.reuse.startswith("threshold") else {}
        return settings | ({"settle": self.settle} if self.settle else {})

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"{REUSE[settings['reuse']]}, window {settings['window']}"

    def bind(self, request: Request) -> SJD:
        return replace(self, window=self.width(request), rule=bind_rule(self.rule, request.model))

    def draft_state(self, request: Request, into: DraftState | None) -> DraftState:
        model, layout = request.model, request.layout
        state = into or DraftState.empty(
            self.reuse, self.initial, request.batch, layout.stride, self.columns, model.vocab_total, model.device
        )
        map_tensors(Tensor.zero_, state)
        return state

    def annotate(self, trace: Trace) -> None:
        trace.positions["refinements"] = refinements(trace.positions["finalised_at"], self.columns)


def compare(reuse: str, run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor) -> Tested:
    """Sample a token from p, and accept the guess if it is the same."""
    if reuse == "gumbel":
        token = perturbed_argmax(p, run.draft_state.noise.at(position))
    else:
        token = categorical(p, run.inputs.stream.uniform(position, Purpose.TARGET, window.passes))
    q, ratio = q_and_ratio(run, window, p, position, exists)
    return Tested(token, exists & (token == window.guess), q, ratio)


def verify_exact(run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor, u: Tensor, v: Tensor) -> Tested:
    """SJD's test (which SJD++ restates in eqs. 2, 3): the maximal coupling of q and p, in one kernel. The token is a
    sample from p, and equals the guess with the highest possible probability, 1 - TV(p, q)."""
    drafts = run.draft_state.draft_probs.rows
    return Tested(*maximal_coupling(p, drafts, position, window.guess, exists, u, v), u=u, v=v)


def verify_by_rule(
    rule: AcceptanceRule, run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> Tested:
    """Accept guesses with the rule's own probability, else sample from its own residual."""
    draft, strength = draft_of(run, window, position, exists), run.strength_at(position)
    case = p, draft.q, draft.token, draft.depth, strength
    accepted = exists & (u < rule.accept_probability(*case))
    if rule.plain:  # q is zero where there is no guess, so the residual there is p
        redrawn = redraw(p, draft.q, v)
    else:
        redrawn = categorical(torch.where(exists.unsqueeze(-1), rule.residual(*case), p), v)
    token = torch.where(accepted, draft.token, redrawn)
    q, ratio = q_and_ratio(run, window, p, position, exists)
    if rule.lossless:
        return Tested(token, accepted, q, ratio, u=u, v=v)
    relaxed = accepted & (u >= ratio)
    return Tested(token, accepted, q, ratio, relaxed, rule.drift_bound(*case) * exists, u, v)


def q_and_ratio(run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """q and p / q of the guesses [B, W], 0 where there is none."""
    q = run.draft_state.draft_probs.entry(position, window.guess)
    return q * exists, at(p, window.guess) / q.clamp(min=EPS) * exists


def draft_of(run: Run, window: Window, position: Tensor, exists: Tensor) -> Draft:
    """The guesses of the window, with the q that they were sampled from."""
    depth = position - window.committed[:, None] + 1
    return Draft(window.guess, run.draft_state.draft_probs.at(position) * exists.unsqueeze(-1), depth)


@dataclass(frozen=True)
class Jacobi(SJD):
    """Greedy Jacobi decoding, with the equality test. All images of a batch are the same, the argmax image.

    Of the request's parameters only cfg is used.
    """

    reuse: str = field(default="gumbel", init=False)
    initial: str = setting("repeat", options=INITIAL)
    threshold: float = field(default=0.5, init=False)
    rule: AcceptanceRule = field(default_factory=Exact, init=False)
    settle: float = field(default=0.0, init=False)
    name: ClassVar[str] = "jacobi"

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"Jacobi, window {settings['window']}"

    def bind(self, request: Request) -> Jacobi:
        return replace(self, window=self.width(request))

    def sample(self, request: Request) -> Result:
        return super().sample(replace(request, params=SamplingParams(cfg=request.params.cfg, temperature=0)))


def refinements(fixed: Tensor, width: int) -> Tensor:
    """Forward passes [B, S] (int32) that each position spent in the window before the one that committed its token.

    fixed [B, S]: the pass that committed each token, not decreasing. A pass with n committed tokens sees positions up
    to n + width - 1.
    """
    passes = torch.arange(int(fixed.max()) + 1, dtype=fixed.dtype).expand(len(fixed), -1).contiguous()
    committed = torch.searchsorted(fixed, passes, right=True)  # tokens after every pass
    position = torch.arange(fixed.shape[1]).expand_as(fixed)
    before = torch.searchsorted(committed, position - (width - 1))  # the last pass that did not see it
    return (fixed - before - 1).clamp(min=0).int()
