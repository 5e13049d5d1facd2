"""Jacobi-type decoding: the target drafts for itself, a window of guesses ahead of what is committed.

Jacobi   Song et al., ICML 2021; Santilli et al., ACL 2023 (greedy: equality test)
SJD      Teng et al., "Accelerating auto-regressive text-to-image generation with training-free speculative Jacobi
         decoding", ICLR 2025: probabilistic test, every other guess redrawn each pass        reuse="resample"
SJD++    Teng et al., 2025: guesses with a high ratio are reused (section 3.3); biased         reuse="threshold_paper"
         and two lossless twins of that reuse                           reuse="coupled", reuse="threshold_exact"
         Gumbel-Jacobi: fixed noise, so the test is equality and the picture is next-token's   reuse="gumbel"

One pass feeds the last committed token and W - 1 guesses. Its predictions P_0 .. P_{W-1} stand at positions n .. n+W-1;
guess k was drawn from q_k. The lossless modes rest on one invariant: given the guesses before it, guess k follows q_k.
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
from ...kernels.sampling import at, categorical, perturbed_argmax, readable
from ...kernels.verification import maximal_coupling
from ..constants import counting, numbers
from ..contract import ARModel, Method, Request, Result, SamplingParams
from ..drafts.guesses import INITIAL, Memory, fresh_guesses
from ..engine.loop import decode
from ..engine.memory import run_bytes
from ..engine.prefill import Start, read_prefix
from ..engine.session import open_session, session_key
from ..layout import TokenLayout
from ..probabilities import check_finite, probabilities
from ..rng import Purpose, Stream
from ..rules.acceptance import EPS, AcceptanceRule, Draft, Exact, accept_or_redraw, check_strength
from ..settings import check_settings, setting
from ..trace import Record, Source

REUSE = ("coupled", "gumbel", "threshold_paper", "threshold_exact", "resample")


@dataclass(frozen=True)
class Window:
    """The guesses of a batch, one row per image.

    committed [B]: n, tokens decided so far; token [B, W + 1]: the root, which is token n - 1, then the guesses for
    positions n .. n+W-1, of which the last is none.
    """

    committed: Tensor
    token: Tensor

    @property
    def guess(self) -> Tensor:
        """[B, W]"""
        return self.token[:, 1:]


@dataclass(frozen=True)
class Run:
    """What all steps of a run have in common. forcing: does the layout force any token."""

    method: SJD
    rule: AcceptanceRule  # bound to the model
    params: SamplingParams
    width: int
    forcing: bool
    model: ARModel
    state: Any
    memory: Memory
    record: Record


@dataclass(frozen=True)
class Carry:
    """What a step hands to the next one.

    turn [1, 1] (int64): passes so far; initial [B, S + 2 W]: uniform numbers for the first
    guess of every position; strength [1 or B, S]: see Request.
    """

    window: Window
    turn: Tensor
    stream: Stream
    initial: Tensor
    layout: TokenLayout
    strength: Tensor | None

    @property
    def committed(self) -> Tensor:
        return self.window.committed

    @property
    def draft(self) -> Tensor:
        return self.window.token[:, 1:-1]


@dataclass(frozen=True)
class Verified:
    """Outcome of a pass for the W columns, which predict ``position``: in which of them a guess ``exists``, the law p
    [B, W, V+], the law q of the guess at the guess itself, the ratio of the two there (0 without a guess), tokens,
    accepted, which of these only a relaxed rule let pass and the bound ``tv_bound`` on its drift (None: there is no
    such rule), and how many tokens each image commits (``count`` [B]).

    u, v [B, W]: the uniform numbers of the pass (None with Gumbel noise).
    """

    position: Tensor
    exists: Tensor
    p: Tensor
    q: Tensor
    ratio: Tensor
    token: Tensor
    accepted: Tensor
    relaxed: Tensor | None
    tv_bound: Tensor | None
    count: Tensor
    u: Tensor | None
    v: Tensor | None


def verify(run: Run, carry: Carry, p: Tensor) -> Verified:
    """Decide the window's guesses against p [B, W, V+]: accept a run of them and fix the token behind it.

    SJD eq. (3): accept guess k while u_k < p_k(x_k) / q_k(x_k), draw the first rejected position from norm([p - q]+);
    a relaxed rule puts its own probability and law in their place.
    """
    window, memory, rule = carry.window, run.memory, run.rule
    batch, seen, _ = p.shape
    position = window.committed[:, None] + counting(seen, p.device)
    exists = numbers((True,) * (seen - 1) + (False,), p.device, torch.bool).expand(batch, -1)
    u = v = q = ratio = relaxed = tv_bound = None
    if run.method.reuse == "gumbel":
        token = perturbed_argmax(p, memory.noise.at(position))
        accepted = exists & (token == window.guess)
    else:
        u, v = carry.stream.uniforms(position, (Purpose.ACCEPT, Purpose.REDRAW), carry.turn)
        if isinstance(rule, Exact):
            token, accepted, q, ratio = coupled(run, window, p, position, exists, u, v)
        else:
            strength = torch.ones(position.shape, device=p.device)
            if carry.strength is not None:
                strength = carry.strength.expand(batch, -1).gather(1, position.clamp(max=carry.layout.length - 1))
            draft = drawn(run, carry, position, exists)
            outcome = accept_or_redraw(rule, p, draft, u, v, strength)
            token, accepted = outcome.token, outcome.accepted
            if not rule.lossless:
                relaxed = outcome.relaxed
                tv_bound = rule.tv_bound(p, draft.q, draft.token, draft.depth, strength) * exists
    if q is None:
        q = memory.drawn.entry(position, window.guess)
        q, ratio = q * exists, at(p, window.guess) / q.clamp(min=EPS) * exists
    # Accepted guesses in a row, and the token behind them; the last column is never accepted.
    most = numbers((seen,), p.device, torch.int64)
    leading = torch.where(accepted, most, numbers(tuple(range(1, seen + 1)), p.device, torch.int64)).amin(-1)
    count = torch.minimum(leading, carry.layout.length - window.committed)
    return Verified(position, exists, p, q, ratio, token, accepted, relaxed, tv_bound, count, u, v)


def coupled(
    run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, W] that follow p and are the guesses as often as can be; whether they are; the guesses' q and p/q."""
    return maximal_coupling(p, run.memory.drawn.rows, position, window.guess, exists, u, v)


def drawn(run: Run, carry: Carry, position: Tensor, exists: Tensor) -> Draft:
    """The window's guesses, with the laws they were drawn from."""
    depth = position - carry.committed[:, None] + 1
    return Draft(carry.window.guess, run.memory.drawn.at(position) * exists.unsqueeze(-1), depth, exists)


def refine(run: Run, carry: Carry, verified: Verified) -> tuple[Tensor, Tensor]:
    """New guesses [B, W] and their laws [B, W, V+] for the positions behind the committed run.

    coupled: maximal coupling of q_k and p_k (keep with min(1, p/q), else residual); law p_k.
    resample: x_k ~ p_k (SJD). threshold_*: keep where C_k = p_k(x_k) / q_k(x_k) > threshold, else redraw from p_k;
    threshold_paper calls the law p_k (SJD++ eq. 2, biased), threshold_exact states the true one,
    q_k 1[p_k/q_k > t] + (sum q_k 1[p_k/q_k <= t]) p_k.
    """
    method, window, p, position, exists = run.method, carry.window, verified.p, verified.position, verified.exists
    if method.reuse == "gumbel" or (method.reuse == "coupled" and isinstance(method.rule, Exact)):
        return verified.token, p
    if method.reuse == "coupled":
        return coupled(run, window, p, position, exists, verified.u, verified.v)[0], p
    redrawn = categorical(p, verified.v)
    if method.reuse == "resample":
        return redrawn, p
    draft = drawn(run, carry, position, exists)
    confident = p > method.threshold * draft.q  # C > threshold, for every id
    keep = exists & confident.gather(-1, draft.token.unsqueeze(-1)).squeeze(-1)
    token = torch.where(keep, draft.token, redrawn)
    if method.reuse == "threshold_paper":
        return token, p
    redraw_mass = (draft.q * ~confident).sum(-1, keepdim=True)
    return token, torch.where(exists.unsqueeze(-1), draft.q * confident + redraw_mass * p, p)


def slide(run: Run, carry: Carry, verified: Verified, decided: Tensor, first: int) -> Window:
    """The next window behind the committed run: refined guesses go on, the rest are fresh.

    decided [B, W]: which columns the pass commits; first: the most of an image, as far as the host knows.
    """
    window, memory, layout = carry.window, run.memory, carry.layout
    position, count, seen = verified.position, verified.count, verified.p.shape[1]
    token, law = refine(run, carry, verified)
    memory.drawn.put(position, law)
    if memory.laws is not memory.drawn:
        memory.laws.put(position, verified.p)

    known = position[:, -1:]
    ahead = counting(run.width + first, position.device)[seen:]  # the last of them has no guess
    new = window.committed[:, None] + ahead
    noise = None
    if memory.noise is not None:
        noise = carry.stream.gumbel(new, verified.p.shape[-1])
        memory.noise.put(new, noise)
        noise = noise[:, :-1]
    guess, guess_law = fresh_guesses(
        run.method.initial, memory.laws, known, token[:, -1:], new[:, :-1], carry.initial.gather(1, new[:, :-1]), noise,
        layout, run.model.vocab, run.forcing,
    )
    memory.drawn.put(new[:, :-1], guess_law)

    if token is not verified.token:
        token = torch.where(decided, verified.token, token)
    none = root = window.token[:, :1]
    every = torch.cat((root, token, guess, none), dim=1)
    source = count[:, None] + counting(run.width + 1, position.device)
    return Window(window.committed + count, every.gather(1, source))


def note(run: Run, carry: Carry, verified: Verified, decided: Tensor, first: int, bare: Source) -> None:
    """Record a pass, which decides the columns ``decided`` [B, W] (bool), ``first`` at most of each image. bare: where
    a token comes from that is drawn without a guess."""
    position, token, accepted, p = (
        x[:, :first] for x in (verified.position, verified.token, verified.accepted, verified.p)
    )
    seen, device = verified.p.shape[1], position.device
    sources = numbers((Source.RESIDUAL.value,) * (seen - 1) + (bare.value,), device)[:first]  # where all are refused
    source = sources.expand(position.shape).masked_fill(accepted, Source.ACCEPTED)
    if verified.relaxed is not None:
        source = source.masked_fill(verified.relaxed[:, :first], Source.RELAXED)
    if run.forcing:
        source = source.masked_fill(carry.layout.forced_at(position) >= 0, Source.FORCED)
    bound = {} if verified.tv_bound is None else {"tv_bound": verified.tv_bound[:, :first]}
    run.record.write(
        position, decided[:, :first], token, p, finalised_at=carry.turn, source=source,
        depth=numbers((*range(1, seen), 0), device, torch.int64)[:first], q=verified.q[:, :first],
        ratio=verified.ratio[:, :first], **bound,
    )


def refinements(fixed: Tensor, width: int) -> Tensor:
    """Passes [B, S] (int32) that a token's position spent in the window before that which fixed it.

    fixed [B, S]: the passes that fixed the tokens, which never fall. A pass behind n decided tokens sees positions up
    to n + width - 1.
    """
    passes = torch.arange(int(fixed.max()) + 1, dtype=fixed.dtype).expand(len(fixed), -1).contiguous()
    decided = torch.searchsorted(fixed, passes, right=True)  # tokens after every pass
    position = torch.arange(fixed.shape[1]).expand_as(fixed)
    before = torch.searchsorted(decided, position - (width - 1))  # the last pass that did not see it
    return (fixed - before - 1).clamp(min=0).int()


def decide(run: Run, carry: Carry, logits: Tensor, bare: Source) -> Carry:
    """What follows from a pass's logits [R, W, V+]: tokens, their record, and the next window."""
    layout, window = carry.layout, carry.window
    forced = None
    if run.forcing:
        forced = layout.forced_at(window.committed[:, None] + counting(logits.shape[1], logits.device))
    verified = verify(run, carry, probabilities(logits, run.params, run.model.vocab, forced))
    first = int(verified.count.max()) if readable(verified.count) else verified.p.shape[1]
    decided = counting(verified.p.shape[1], logits.device) < verified.count[:, None]
    note(run, carry, verified, decided, first, bare)
    return replace(carry, window=slide(run, carry, verified, decided, first), turn=carry.turn + 1)


def step(run: Run, carry: Carry) -> Carry:
    """One pass: feed root and guesses, decide, keep the cache of what was accepted. Complete images stay as they are.
    """
    window = carry.window
    ahead = numbers(tuple(range(-1, run.width - 1)), window.token.device, torch.int64)
    out = run.model.step(run.state, window.token[:, :-1], window.committed[:, None] + ahead)
    following = decide(run, carry, out.logits, Source.BONUS)
    run.model.commit(run.state, following.committed - window.committed)
    return following


def begin(run: Run, start: Start, layout: TokenLayout, stream: Stream, strength: Tensor | None) -> Carry:
    """What the first prediction decides: the first token that is not given, and the first window."""
    batch, device = len(stream.keys), run.model.device
    run.record.begin(start.tokens, start.committed)
    first = start.committed[:, None]
    if run.memory.noise is not None:
        run.memory.noise.put(first, stream.gumbel(first, run.model.vocab_total))
    places = torch.arange(layout.length + 2 * run.width, device=device).expand(batch, -1)
    carry = Carry(
        window=Window(start.committed, torch.zeros_like(first).expand(-1, 2)),
        turn=torch.zeros((1, 1), dtype=torch.int64, device=device),
        stream=stream, initial=stream.uniform(places, Purpose.INITIAL), layout=layout, strength=strength,
    )
    return decide(run, carry, start.out.logits[:, -1:], Source.PREFILL)


@dataclass(frozen=True)
class SJD(Method):
    """Speculative Jacobi decoding.

    window: tokens per pass W, the root included (2 .. S); None: 32 (16 on a CPU, where wider passes cost more than the
    passes they save), or S if that is less.
    reuse: one of REUSE; "coupled", "gumbel", "threshold_exact" and "resample" draw from exactly the model's law,
    "threshold_paper" (SJD++ as printed) does not. initial: one of INITIAL. threshold: SJD++'s tau (> 0).
    rule: how a guess is verified, its depth being its place in the window, from 1; refinement stays exact.
    """

    window: int | None = None
    reuse: str = setting("coupled", options=REUSE)
    initial: str = setting("mixed", options=INITIAL)
    threshold: float = 0.5
    rule: AcceptanceRule = field(default_factory=Exact)
    name: ClassVar[str] = "sjd"

    @property
    def lossless(self) -> bool:
        return self.rule.lossless and self.reuse != "threshold_paper"

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)
        length = request.length
        if self.window is not None and not 2 <= self.window <= length:
            raise ValueError(f"window is {self.window}, but this image has {length} tokens: use 2 to {length}.")
        check_settings(self)
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}, but must be above 0 (SJD++ uses 0.5).")
        self.rule.check()
        if self.reuse == "gumbel" and not self.rule.lossless:
            raise ValueError(
                f"reuse='gumbel' keeps a guess when it equals the token to be drawn: there is no ratio that the rule "
                f"{self.rule.name!r} could relax. Use the exact rule, or reuse='coupled'."
            )

    def width(self, request: Request) -> int:
        return self.window or min(16 if request.model.device.type == "cpu" else 32, request.length)

    def describe(self, request: Request) -> dict[str, Any]:
        settings = {
            "method": self.name, "window": self.width(request), "reuse": self.reuse, "initial": self.initial,
            "rule": self.rule.describe(), "lossless": self.lossless,
        }
        return settings | ({"threshold": self.threshold} if self.reuse.startswith("threshold") else {})

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"SJD, {settings['reuse'].replace('_', ' ')}"

    def session_key(self, request: Request) -> Hashable:
        return session_key(request, self, self.width(request))

    def run_bytes(self, request: Request) -> int:
        return run_bytes(request, self.width(request))

    def sample(self, request: Request) -> Result:
        self.check(request)
        model, params, batch = request.model, request.params, request.batch
        layout, begun = request.layout.to(model.device), time.perf_counter()
        rule = self.rule.bind(model)
        strength = check_strength(request.strength, batch, layout.length, model.device)
        width = self.width(request)
        forcing = layout.forces
        with open_session(model, self.session_key(request)) as session:
            state = model.start(
                request.conditioning, request.negative, batch, layout, slack=width, guided=params.guided,
                into=session.state,
            )
            memory = session.draft_state or Memory.empty(
                self.reuse, batch, layout.stride, width, model.vocab_total, model.device
            )
            mapped(Tensor.zero_, memory)
            session.adopt(state, memory)
            session.record = session.record or Record.empty(layout.length, batch, model.device, round_fields=())
            record = session.record
            start = read_prefix(model, state, layout, batch, callback=request.callback)
            check_finite(start.out)
            run = Run(self, rule, session.params(params, model.device), width, forcing, model, state, memory, record)
            carry = begin(run, start, layout, Stream.of(request.seed, batch, model.device), strength)
            step_ms = decode(request, session, state, partial(step, run), carry, width, start.prefix_length, begun)
            settings = self.describe(request) | {"rule": rule.describe()} | asdict(params)
            trace = record.finish(
                layout, request.seed, settings, time.perf_counter() - begun, width=width, milliseconds=step_ms
            )
            trace.positions["refinements"] = refinements(trace.positions["finalised_at"], width)
            return Result(record.image.clone(), trace)


@dataclass(frozen=True)
class Jacobi(SJD):
    """Greedy Jacobi decoding: the arg-max image (the batch's images are equal), with the equality test.

    Of the request's parameters, cfg counts.
    """

    reuse: str = field(default="gumbel", init=False)
    initial: str = setting("repeat", options=INITIAL)
    threshold: float = field(default=0.5, init=False)
    rule: AcceptanceRule = field(default_factory=Exact, init=False)
    name: ClassVar[str] = "jacobi"

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return "Jacobi"

    def sample(self, request: Request) -> Result:
        return super().sample(replace(request, params=SamplingParams(cfg=request.params.cfg, temperature=0)))
