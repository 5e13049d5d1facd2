"""Jacobi decoding: the target drafts for itself, a window of guesses past the committed tokens.

Jacobi   Song et al., ICML 2021; Santilli et al., ACL 2023 (greedy: equality test)
SJD      Teng et al., "Accelerating auto-regressive text-to-image generation with training-free speculative Jacobi
         decoding", ICLR 2025 (arXiv:2410.01699): probabilistic test, all other guesses
         resampled                                                                         reuse="resample"
MC-SJD   So et al., "MC-SJD: maximal coupling speculative Jacobi decoding for autoregressive visual generation
         acceleration", 2025 (arXiv:2510.24211): guesses are coupled from pass to pass     reuse="coupled"
SJD++    Teng et al., 2025 (arXiv:2512.07503): guesses of high confidence are reused
         (section 4.1); biased                                                             reuse="threshold_paper"
ours     a lossless variant of that reuse                                                  reuse="threshold_exact"
         Gumbel-Jacobi: fixed noise, the test is equality, the image is next-token's       reuse="gumbel"

One forward pass feeds the last committed token (the root) and W - 1 guesses. With n tokens committed, column k predicts
position n + k: p_k(x) = p(x | prompt, committed tokens, guesses 0 .. k-1). Guess k, x_k, was sampled from q_k, the
prediction for the same position one pass earlier (or, for a new position, the probabilities of a neighbour). So a pass
is a step of speculative decoding whose drafter is the last Jacobi iteration:

1. verify        accept the first guesses while u_k < p_k(x_k) / q_k(x_k), and sample the token after them
2. refine        choose new guesses past these tokens, by p_k of this pass
3. next_window   move the window past the committed tokens, and sample first guesses at its end

The lossless modes rest on one invariant: given the guesses before it, guess k is distributed as q_k.

With front drafts (front.py), a pass is fed several guesses for column 0. With settling (settling.py), guesses that
hardly change any more are accepted without a test.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.graphs import mapped
from ...kernels.sampling import at, categorical, perturbed_argmax, readable, take
from ...kernels.verification import maximal_coupling
from ..constants import counting, numbers
from ..contract import Method, Request, Result, SamplingParams
from ..drafts.guesses import INITIAL, Memory, first_guesses
from ..engine.loop import decode
from ..engine.memory import run_bytes
from ..engine.prefill import Start, read_prefix
from ..engine.session import open_session, session_key
from ..layout import TokenLayout
from ..probabilities import check_finite, probabilities
from ..rng import Purpose, Stream
from ..rules.acceptance import EPS, AcceptanceRule, Draft, Exact, accept_or_redraw, check_strength
from ..settings import check_settings, setting, within
from ..trace import Record, Source
from .front import FrontOutcome, draft_front, fed_mask, verify_front, with_front
from .settling import settled, with_settled
from .window import JacobiRun, JacobiState, VerifiedWindow, Window, committed_count, strength_at

REUSE = {  # SJD.reuse -> in words, after the options of the SJD++ Sampler
    "coupled": "SJD, coupled",
    "gumbel": "SJD, same seed",
    "threshold_paper": "SJD++ reuse (paper)",
    "threshold_exact": "SJD++ reuse (exact)",
    "resample": "SJD, redraw",
}


def verify(run: JacobiRun, state: JacobiState, p: Tensor) -> VerifiedWindow:
    """Test the guesses against p [B, W, V+] (SJD, eq. 3).

    Accept guess x_k if u_k < p_k(x_k) / q_k(x_k), else sample from norm([p_k - q_k]+); a relaxed rule has its own
    probability and residual. An image commits the guesses before its first rejection and the token sampled there, or
    after the last guess if none is rejected.
    """
    window, memory, rule = state.window, run.memory, run.rule
    batch, columns, _ = p.shape
    position = window.committed[:, None] + counting(columns, p.device)
    exists = numbers((True,) * (columns - 1) + (False,), p.device, torch.bool).expand(batch, -1)
    u = v = q = ratio = relaxed = tv_bound = None
    if run.method.reuse == "gumbel":
        token = perturbed_argmax(p, memory.noise.at(position))
        accepted = exists & (token == window.guess)
    else:
        u, v = state.stream.uniforms(position, (Purpose.ACCEPT, Purpose.REDRAW), state.step_index)
        if isinstance(rule, Exact):
            token, accepted, q, ratio = coupled(run, window, p, position, exists, u, v)
        else:
            strength = strength_at(state, position)
            draft = window_draft(run, state, position, exists)
            outcome = accept_or_redraw(rule, p, draft, u, v, strength)
            token, accepted = outcome.token, outcome.accepted
            if not rule.lossless:
                relaxed = outcome.relaxed
                tv_bound = rule.tv_bound(p, draft.q, draft.token, draft.depth, strength) * exists
    if q is None:
        q = memory.draft_probs.entry(position, window.guess)
        q, ratio = q * exists, at(p, window.guess) / q.clamp(min=EPS) * exists
    count = committed_count(state, accepted)
    return VerifiedWindow(position, exists, p, q, ratio, token, accepted, relaxed, tv_bound, count, u, v)


def coupled(
    run: JacobiRun, window: Window, p: Tensor, position: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """maximal_coupling() of the guesses with p: tokens [B, W] distributed as p that equal the guesses most often.

    Returns the tokens, whether they are the guesses, and the guesses' q and p / q.
    """
    return maximal_coupling(p, run.memory.draft_probs.rows, position, window.guess, exists, u, v)


def window_draft(run: JacobiRun, state: JacobiState, position: Tensor, exists: Tensor) -> Draft:
    """The guesses of the window, with the q that they were sampled from."""
    depth = position - state.committed[:, None] + 1
    return Draft(state.window.guess, run.memory.draft_probs.at(position) * exists.unsqueeze(-1), depth, exists)


def refine(run: JacobiRun, state: JacobiState, verified: VerifiedWindow) -> tuple[Tensor, Tensor]:
    """New guesses [B, W] at the positions of the window, and the q [B, W, V+] of the next pass.

    coupled: maximal coupling of q_k and p_k (MC-SJD: keep x_k with min(1, p_k/q_k), else sample from the residual); q
    is p_k.
    resample: sample from p_k (SJD); q is p_k.
    threshold_*: keep x_k if its confidence C_k = p_k(x_k) / q_k(x_k) > threshold, else sample from p_k. As q,
    threshold_paper states p_k (SJD++, eq. 2; biased), threshold_exact the true distribution of the new guess,
    q_k 1[p_k/q_k > threshold] + (sum q_k 1[p_k/q_k <= threshold]) p_k.
    """
    method, window, p, position, exists = run.method, state.window, verified.p, verified.position, verified.exists
    if method.reuse == "gumbel" or (method.reuse == "coupled" and isinstance(method.rule, Exact)):
        return verified.token, p  # verify() has done it
    if method.reuse == "coupled":
        return coupled(run, window, p, position, exists, verified.u, verified.v)[0], p
    resampled = categorical(p, verified.v)
    if method.reuse == "resample":
        return resampled, p
    draft = window_draft(run, state, position, exists)
    confident = p > method.threshold * draft.q  # C > threshold, for every id
    keep = exists & confident.gather(-1, draft.token.unsqueeze(-1)).squeeze(-1)
    token = torch.where(keep, draft.token, resampled)
    if method.reuse == "threshold_paper":
        return token, p
    resampled_mass = (draft.q * ~confident).sum(-1, keepdim=True)
    return token, torch.where(exists.unsqueeze(-1), draft.q * confident + resampled_mass * p, p)


def next_window(run: JacobiRun, state: JacobiState, verified: VerifiedWindow, committed: Tensor, most: int) -> Window:
    """Move the window past the committed tokens: refined guesses stay in it, first guesses fill its end.

    committed [B, W] (bool): columns that the pass commits; most: at least the number of them in any image (host).
    """
    window, memory, layout = state.window, run.memory, state.layout
    position, columns = verified.position, verified.p.shape[1]
    guess, q = refine(run, state, verified)
    memory.draft_probs.put(position, q)
    if memory.target_probs is not memory.draft_probs:
        memory.target_probs.put(position, verified.p)

    # The window moves by ``most`` positions at most. Past its end come new positions, the last one a placeholder.
    new = window.committed[:, None] + counting(run.width + most, position.device)[columns:]
    noise = None
    if memory.noise is not None:
        noise = state.stream.gumbel(new, verified.p.shape[-1])
        memory.noise.put(new, noise)
        noise = noise[:, :-1]
    first, first_q = first_guesses(
        run.method.initial,
        memory.target_probs,
        position[:, -1:],
        guess[:, -1:],
        new[:, :-1],
        state.initial.gather(1, new[:, :-1]),
        noise,
        layout,
        run.model.vocab,
        run.forcing,
    )
    memory.draft_probs.put(new[:, :-1], first_q)

    if guess is not verified.token:
        guess = torch.where(committed, verified.token, guess)
    # Tokens from the old root on. ``count`` places later stands the new root, the last committed token.
    root = placeholder = window.token[:, :1]
    sequence = torch.cat((root, guess, first, placeholder), dim=1)
    index = verified.count[:, None] + counting(run.width + 1, position.device)
    still = None
    if verified.moved is not None:
        limit = run.method.settle * strength_at(state, position)
        still = settled(verified.moved, limit, verified.exists, verified.count)
    return Window(window.committed + verified.count, sequence.gather(1, index), still)


def record_pass(
    run: JacobiRun, state: JacobiState, verified: VerifiedWindow, committed: Tensor, most: int, unguessed: Source
) -> None:
    """Record a forward pass, which commits the columns ``committed`` [B, W] (bool), at most the first ``most``.

    unguessed: the source of a token that is sampled where there is no guess.
    """
    position, token, accepted, p = (
        x[:, :most] for x in (verified.position, verified.token, verified.accepted, verified.p)
    )
    columns, device = verified.p.shape[1], position.device
    not_accepted = numbers((Source.RESIDUAL.value,) * (columns - 1) + (unguessed.value,), device)[:most]
    source = not_accepted.expand(position.shape).masked_fill(accepted, Source.ACCEPTED)
    if verified.relaxed is not None:
        source = source.masked_fill(verified.relaxed[:, :most], Source.RELAXED)
    if run.forcing:
        source = source.masked_fill(state.layout.forced_at(position) >= 0, Source.FORCED)
    optional = {"tv_bound": verified.tv_bound, "rank": verified.rank}
    optional = {name: value[:, :most] for name, value in optional.items() if value is not None}
    run.record.write(
        position,
        committed[:, :most],
        token,
        p,
        finalised_at=state.step_index,
        source=source,
        depth=numbers((*range(1, columns), 0), device, torch.int64)[:most],
        q=verified.q[:, :most],
        ratio=verified.ratio[:, :most],
        **optional,
    )


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


def predicted(run: JacobiRun, state: JacobiState, logits: Tensor, position: Tensor) -> Tensor:
    """The target's probabilities [B, T, V+], from the logits [R, T, V+] after tokens at positions [B, T]."""
    forced = state.layout.forced_at(position + 1) if run.forcing else None
    return probabilities(logits, run.params, run.model.vocab, forced)


def decide(
    run: JacobiRun, state: JacobiState, p: Tensor, unguessed: Source, front: FrontOutcome | None = None
) -> JacobiState:
    """Verify, record and move the window, from the predictions p [B, W, V+] of a forward pass."""
    verified = verify(run, state, p)
    if state.window.settled is not None:
        verified = with_settled(run, state, verified)
    if front is not None:
        verified = with_front(state, verified, front)
    columns = p.shape[1]
    most = int(verified.count.max()) if readable(verified.count) else columns
    committed = counting(columns, p.device) < verified.count[:, None]
    record_pass(run, state, verified, committed, most, unguessed)
    window = next_window(run, state, verified, committed, most)
    return replace(state, window=window, step_index=state.step_index + 1)


def step(run: JacobiRun, state: JacobiState) -> JacobiState:
    """One forward pass: feed root and guesses, decide, keep the accepted part of the cache.

    Complete images stay as they are.
    """
    window, width, count = state.window, run.width, run.method.front
    offsets = numbers(tuple(range(-1, width - 1)), window.token.device, torch.int64)
    token, position = window.token[:, :-1], window.committed[:, None] + offsets
    tree_mask = front = path = None
    if count > 1:
        tree, column = draft_front(run, state), window.first_tested
        token = torch.cat((token, tree.token[:, 2:]), dim=1)  # the first is in the window
        position = torch.cat((position, (window.committed + column)[:, None].expand(-1, count - 1)), dim=1)
        tree_mask = fed_mask(width, count, column)
    out = run.model.step(run.model_state, token, position, tree_mask)
    p = predicted(run, state, out.logits, position)
    if count > 1:
        front = verify_front(run, state, tree, p)
        path = front.path(width)
        p = take(p, path)
    after = decide(run, state, p, Source.BONUS, front)
    run.model.commit(run.model_state, after.committed - window.committed, path)
    return after


def begin(run: JacobiRun, start: Start, layout: TokenLayout, stream: Stream, strength: Tensor | None) -> JacobiState:
    """The state after the first prediction, which decides the first token past the prefix and the first window."""
    batch, device = len(stream.keys), run.model.device
    run.record.begin(start.tokens, start.committed)
    first = start.committed[:, None]
    if run.memory.noise is not None:
        run.memory.noise.put(first, stream.gumbel(first, run.model.vocab_total))
    unsettled = torch.zeros_like(start.committed) if run.method.settle > 0 else None
    positions = torch.arange(layout.length + 2 * run.width, device=device).expand(batch, -1)
    state = JacobiState(
        window=Window(start.committed, torch.zeros_like(first).expand(-1, 2), unsettled),
        step_index=torch.zeros((1, 1), dtype=torch.int64, device=device),
        stream=stream,
        initial=stream.uniform(positions, Purpose.INITIAL),
        layout=layout,
        strength=strength,
    )
    return decide(run, state, predicted(run, state, start.out.logits[:, -1:], first - 1), Source.PREFILL)


@dataclass(frozen=True)
class SJD(Method):
    """Speculative Jacobi decoding.

    window: tokens W per forward pass, the root included (2 to S). Default: 32 (16 on a CPU in fp32, where wider passes
    cost more than they save), at most S.
    reuse: one of REUSE, see refine(). "coupled", "gumbel", "threshold_exact" and "resample" sample exactly from the
    model's distribution, "threshold_paper" (SJD++ as printed) does not. initial: one of INITIAL, see first_guesses().
    threshold: SJD++'s tau (> 0). rule: how a guess is verified; its depth is its place in the window, from 1.
    front: drafts K for the first token of the window (1 to 16, at most V), of which K - 1 are fed besides the window;
    exact whatever their number (see front.py). settle: guesses whose distribution moved by less than this (0 to 1, 0:
    exact) are accepted without a test (see settling.py). Both are for reuse="coupled" only.
    """

    window: int | None = setting(None, 2, advice="without one, the method chooses")
    reuse: str = setting("coupled", options=tuple(REUSE))
    initial: str = setting("mixed", options=INITIAL)
    threshold: float = 0.5
    rule: AcceptanceRule = field(default_factory=Exact)
    front: int = setting(1, 1, 16)
    settle: float = setting(0.0, 0, 1, exact=0)
    name: ClassVar[str] = "sjd"

    @property
    def lossless(self) -> bool:
        return self.rule.lossless and self.reuse != "threshold_paper" and not self.settle

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)
        length = request.length
        if self.window is not None and not 2 <= self.window <= length:
            legal = within(2, length, "leave window out (0 on the node)")
            raise ValueError(
                f"window is {self.window}, but this image has {length} token{'s' * (length > 1)}: {legal}."
            )
        check_settings(self)
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}, but must be above 0 (SJD++ uses 0.5).")
        self.rule.check()
        if self.front > 1 and self.reuse != "coupled":
            raise ValueError(
                f"front is {self.front}, but reuse={self.reuse!r} has one draft for every token. Use front=1 "
                "(front_drafts), or reuse='coupled' (refinement)."
            )
        if self.settle and self.reuse != "coupled":
            raise ValueError(
                f"settle is {self.settle}, but reuse={self.reuse!r} does not settle. Use settle=0 (settling), or "
                "reuse='coupled' (refinement)."
            )
        if self.front > request.model.vocab:
            raise ValueError(f"front is {self.front}, but this model has {request.model.vocab} image tokens.")
        if self.reuse == "gumbel" and not self.rule.lossless:
            raise ValueError(
                f"The same-seed refinement (reuse='gumbel') compares tokens, so the rule {self.rule.name!r} has "
                "nothing to relax. Use the exact rule, or the coupled refinement (reuse='coupled')."
            )

    def columns(self, request: Request) -> int:
        """W"""
        model = request.model
        dear = model.device.type == "cpu" and model.dtype == torch.float32
        return self.window or min(16 if dear else 32, request.length)

    def width(self, request: Request) -> int:
        return self.columns(request) + self.front - 1

    def describe(self, request: Request) -> dict[str, Any]:
        settings = {
            "method": self.name,
            "window": self.columns(request),
            "reuse": self.reuse,
            "initial": self.initial,
            "rule": self.rule.describe(),
            "lossless": self.lossless,
        }
        settings |= {"threshold": self.threshold} if self.reuse.startswith("threshold") else {}
        settings |= {"front": self.front} if self.front > 1 else {}
        return settings | ({"settle": self.settle} if self.settle else {})

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        more = f", {settings['front']} front drafts" if "front" in settings else ""
        return f"{REUSE[settings['reuse']]}, window {settings['window']}{more}"

    def session_key(self, request: Request) -> Hashable:
        return session_key(request, self, self.width(request))

    def run_bytes(self, request: Request) -> int:
        return run_bytes(request, self.width(request))

    def sample(self, request: Request) -> Result:
        self.check(request)
        model, params, batch = request.model, request.params, request.batch
        layout, start_time = request.layout.to(model.device), time.perf_counter()
        rule = self.rule.bind(model)
        strength = check_strength(request.strength, batch, layout.length, model.device)
        columns, width = self.columns(request), self.width(request)
        forcing = layout.forces
        codebook = model.codebook.to(model.device) if self.front > 1 and model.codebook is not None else None
        with open_session(self, request) as session:
            model_state = model.start(
                request.conditioning,
                request.negative,
                batch,
                layout,
                slack=width,
                guided=params.guided,
                into=session.state,
            )
            memory = session.draft_state or Memory.empty(
                self.reuse, batch, layout.stride, columns, model.vocab_total, model.device
            )
            mapped(Tensor.zero_, memory)
            session.adopt(model_state, memory)
            session.record = session.record or Record.empty(layout.length, batch, model.device, round_fields=())
            record = session.record
            start = read_prefix(model, model_state, layout, batch, callback=request.callback)
            check_finite(start.out)
            params_of_steps = session.params(params, model.device)
            run = JacobiRun(self, rule, params_of_steps, columns, forcing, model, model_state, memory, record, codebook)
            state = begin(run, start, layout, Stream.of(request.seed, batch, model.device), strength)
            step_ms = decode(
                request,
                session,
                model_state,
                partial(step, run),
                state,
                width,
                start.prefix_length,
                start_time,
                past_end=width if self.front > 1 else 0,
            )
            settings = self.describe(request) | {"rule": rule.describe()} | asdict(params)
            trace = record.finish(
                layout, request.seed, settings, time.perf_counter() - start_time, width=width, milliseconds=step_ms
            )
            trace.positions["refinements"] = refinements(trace.positions["finalised_at"], columns)
            return Result(record.image.clone(), trace)


@dataclass(frozen=True)
class Jacobi(SJD):
    """Greedy Jacobi decoding, with the equality test. All images of a batch are the same, the argmax image.

    Of the request's parameters only cfg is used.
    """

    reuse: str = field(default="gumbel", init=False)
    initial: str = setting("repeat", options=INITIAL)
    threshold: float = field(default=0.5, init=False)
    rule: AcceptanceRule = field(default_factory=Exact, init=False)
    front: int = field(default=1, init=False)
    settle: float = field(default=0.0, init=False)
    name: ClassVar[str] = "jacobi"

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"Jacobi, window {settings['window']}"

    def sample(self, request: Request) -> Result:
        return super().sample(replace(request, params=SamplingParams(cfg=request.params.cfg, temperature=0)))
