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
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.graphs import mapped
from ..kernels.sampling import at, categorical, readable
from ..kernels.verification import couple
from .acceptance import SMALLEST, AcceptanceRule, Draft, Exact, accept_or_redraw, check_strength
from .constants import counting, numbers
from .guesses import INITIAL, Memory, fresh_guesses
from .logits import check_finite, probabilities
from .loop import decode, kind
from .prefill import Start, read_given
from .protocols import ARModel, Decoded, Request, SamplingParams, TokenLayout
from .rng import Purpose, Stream
from .session import session
from .trace import Record, Source

REUSE = ("coupled", "gumbel", "threshold_paper", "threshold_exact", "resample")


@dataclass(frozen=True)
class Window:
    """The guesses of a batch, one row per image.

    committed [B]: n, tokens decided so far; root [B, 1]: token n - 1; token [B, W]: guesses for positions n .. n+W-1,
    of which the last is none; age [B, W]: passes a guess has been through.
    """

    committed: Tensor
    root: Tensor
    token: Tensor
    age: Tensor


@dataclass(frozen=True)
class Run:
    """What all steps of a run have in common. forcing: does the layout force any token."""

    method: SJD
    params: SamplingParams
    width: int
    forcing: bool
    model: ARModel
    state: Any
    memory: Memory


@dataclass(frozen=True)
class Carry:
    """What a step hands to the next one.

    tokens [B, S + 1] (int64); turn [1, 1] (int64): passes so far; initial [B, S + 2 W]: uniform numbers for the first
    guess of every position; strength [1 or B, S]: see Request.
    """

    window: Window
    tokens: Tensor
    record: Record
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
        return self.window.token[:, :-1]


@dataclass(frozen=True)
class Verified:
    """Outcome of a pass for the W columns, which predict ``position``: in which of them a guess ``exists``, the law p
    [B, W, V+], the law q of the guess at the guess itself, the ratio of the two there, tokens, accepted, which of these
    only a relaxed rule let pass (None: there is no such rule), the drift ``leak`` that rule allowed, and how many
    tokens each image commits (``count`` [B]).

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
    leak: Tensor | float
    count: Tensor
    u: Tensor | None
    v: Tensor | None


def verify(run: Run, carry: Carry, p: Tensor) -> Verified:
    """Decide the window's guesses against p [B, W, V+]: accept a run of them and fix the token behind it.

    SJD eq. (3): accept guess k while u_k < p_k(x_k) / q_k(x_k), draw the first rejected position from norm([p - q]+);
    a relaxed rule puts its own probability and law in their place.
    """
    window, memory, rule = carry.window, run.memory, run.method.rule
    batch, seen, _ = p.shape
    columns = counting(seen, p.device)
    exists = (columns < seen - 1).expand(batch, -1)
    position = window.committed[:, None] + columns
    u = v = q = ratio = None
    relaxed, leak = None, 0.0
    if run.method.reuse == "gumbel":
        token = memory.noise.at(position).add_(p.log()).argmax(-1)
        accepted = exists & (token == window.token)
    else:
        u, v = carry.stream.uniforms(position, (Purpose.ACCEPT, Purpose.REDRAW), carry.turn)
        if isinstance(rule, Exact):
            token, accepted, p_guess, q = coupled(run, window, p, position, exists, u, v)
            ratio = p_guess / q.clamp(min=SMALLEST)
        else:
            strength = torch.ones(position.shape, device=p.device)
            if carry.strength is not None:
                strength = carry.strength.expand(batch, -1).gather(1, position.clamp(max=carry.layout.length - 1))
            draft = drawn(run, carry, position, exists)
            outcome = accept_or_redraw(rule, p, draft, u, v, strength)
            token, accepted = outcome.token, outcome.accepted
            if not rule.lossless:
                relaxed = outcome.relaxed
                leak = rule.leak(p, draft.q, draft.token, draft.depth, strength) * exists
    q = memory.drawn.entry(position, window.token) if q is None else q
    ratio = at(p, window.token) / q.clamp(min=SMALLEST) if ratio is None else ratio
    leading = accepted.long().cumprod(-1).sum(-1)  # accepted guesses in a row
    count = torch.minimum(leading + 1, carry.layout.length - window.committed).clamp(min=0)
    return Verified(position, exists, p, q * exists, ratio * exists, token, accepted, relaxed, leak, count, u, v)


def coupled(
    run: Run, window: Window, p: Tensor, position: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, W] that follow p and are the guesses as often as can be; whether they are; the guesses' p and q."""
    laws = run.memory.drawn.rows
    return couple(p, laws, position % laws.shape[1], window.token, exists, u, v)


def drawn(run: Run, carry: Carry, position: Tensor, exists: Tensor) -> Draft:
    """The window's guesses, with the laws they were drawn from."""
    depth = position - carry.committed[:, None] + 1
    return Draft(carry.window.token, run.memory.drawn.at(position) * exists.unsqueeze(-1), depth, exists)


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


def slide(run: Run, carry: Carry, verified: Verified, first: int) -> Window:
    """The next window behind the committed run: refined guesses go on, the rest are fresh.

    first: the most tokens an image commits, as far as the host knows.
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

    source = count[:, None] + counting(run.width, position.device)
    return Window(
        committed=window.committed + count,
        root=torch.cat((window.root, verified.token), dim=1).gather(1, count[:, None]),
        token=torch.cat((token, guess, torch.zeros_like(known)), dim=1).gather(1, source),
        age=pad(window.age + 1, (0, new.shape[1])).gather(1, source),
    )


def record(
    run: Run, carry: Carry, verified: Verified, committed: Tensor, first: int, bare: Source
) -> Record:
    """The trace with a pass, which decides the columns ``committed`` [B, W] (bool), ``first`` at most of each image.
    bare: where a token comes from that is drawn without a guess."""
    position, token, accepted, p = (
        x[:, :first] for x in (verified.position, verified.token, verified.accepted, verified.p)
    )
    seen, device = verified.p.shape[1], position.device
    sources = numbers((Source.RESIDUAL.value,) * (seen - 1) + (bare.value,), device)[:first]  # where all are refused
    source = sources.expand(position.shape).masked_fill(accepted, Source.ACCEPTED)
    leak = verified.leak
    if verified.relaxed is not None:
        source, leak = source.masked_fill(verified.relaxed[:, :first], Source.RELAXED), leak[:, :first]
    if run.forcing:
        forced = carry.layout.forced_at(position) >= 0
        source = source.masked_fill(forced, Source.FORCED)
        accepted = accepted & ~forced
    depth = numbers((*range(1, seen), 0), device)[:first]
    committed = committed[:, :first]
    made = carry.record.tokens(
        position, committed, token, p, finalised_at=carry.turn, source=source, depth=depth, q=verified.q[:, :first],
        tv_leak=leak, ratio=verified.ratio[:, :first], refinements=carry.window.age[:, :first],
    )
    return made.round(
        accepted=(accepted & committed).sum(-1), committed=verified.count, width=verified.p.shape[1]
    )


def decide(run: Run, carry: Carry, logits: Tensor, bare: Source) -> Carry:
    """What follows from a pass's logits [R, W, V+]: tokens, their record, and the next window."""
    layout, window = carry.layout, carry.window
    forced = None
    if run.forcing:
        forced = layout.forced_at(window.committed[:, None] + counting(logits.shape[1], logits.device))
    verified = verify(run, carry, probabilities(logits, run.params, run.model.vocab, forced))
    first = int(verified.count.max()) if readable(verified.count) else verified.p.shape[1]
    following = slide(run, carry, verified, first)
    committed = verified.position < following.committed[:, None]
    kept = torch.where(committed, verified.position, layout.length)
    return replace(
        carry,
        window=following,
        tokens=carry.tokens.scatter(1, kept, verified.token),
        record=record(run, carry, verified, committed, first, bare),
        turn=carry.turn + 1,
    )


def step(run: Run, carry: Carry) -> Carry:
    """One pass: feed root and guesses, decide, keep the cache of what was accepted. Complete images stay as they are.
    """
    window = carry.window
    fed = torch.cat((window.root, window.token[:, :-1]), dim=1)
    position = window.committed[:, None] - 1 + counting(run.width, fed.device)
    out = run.model.step(run.state, fed, position)
    following = decide(run, carry, out.logits, Source.BONUS)
    run.model.commit(run.state, following.committed - window.committed)
    return following


def begin(run: Run, start: Start, layout: TokenLayout, stream: Stream, strength: Tensor | None) -> Carry:
    """What the first prediction decides: the first token that is not given, and the first window."""
    batch, device = len(stream.keys), run.model.device
    first = start.committed[:, None]
    nothing = torch.zeros_like(first)
    if run.memory.noise is not None:
        run.memory.noise.put(first, stream.gumbel(first, run.model.vocab_total))
    places = torch.arange(layout.length + 2 * run.width, device=device).expand(batch, -1)
    carry = Carry(
        window=Window(start.committed, nothing, nothing, nothing),
        tokens=start.tokens,
        record=Record.empty(layout.length, batch, device),
        turn=torch.zeros((1, 1), dtype=torch.int64, device=device),
        stream=stream, initial=stream.uniform(places, Purpose.INITIAL), layout=layout, strength=strength,
    )
    carry = decide(run, carry, start.out.logits[:, -1:], Source.PREFILL)
    return replace(carry, record=carry.record.given(start.committed))


@dataclass(frozen=True)
class SJD:
    """Speculative Jacobi decoding.

    window: tokens per pass W, the root included (2 .. S); None: see ``width``.
    reuse: one of REUSE; "coupled", "gumbel", "threshold_exact" and "resample" draw from exactly the model's law,
    "threshold_paper" (SJD++ as printed) does not. initial: one of INITIAL. threshold: SJD++'s tau (> 0).
    rule: how a guess is verified, its depth being its place in the window, from 1; refinement stays exact.
    """

    window: int | None = None
    reuse: str = "coupled"
    initial: str = "mixed"
    threshold: float = 0.5
    rule: AcceptanceRule = field(default_factory=Exact)

    def width(self, device: torch.device, length: int) -> int:
        """W for an image of so many tokens. None picks 32, on a CPU 16 (a pass costs more there the wider it is, and
        the second half of a window of 32 saves few), or all tokens if they are less."""
        return self.window or min(16 if device.type == "cpu" else 32, length)

    def check(self, length: int) -> None:
        """Raise ValueError naming the setting and its legal values."""
        if self.window is not None and not 2 <= self.window <= length:
            raise ValueError(f"window is {self.window}, but this image has {length} tokens: use 2 to {length}.")
        if self.reuse not in REUSE:
            raise ValueError(f"reuse is {self.reuse!r}; choose one of {', '.join(REUSE)}.")
        if self.initial not in INITIAL:
            raise ValueError(f"initial is {self.initial!r}; choose one of {', '.join(INITIAL)}.")
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}, but must be above 0 (SJD++ uses 0.5).")
        self.rule.check()
        if self.reuse == "gumbel" and not self.rule.lossless:
            raise ValueError(
                f"reuse='gumbel' keeps a guess when it equals the token to be drawn: there is no ratio that the rule "
                f"{self.rule.name!r} could relax. Use the exact rule, or reuse='coupled'."
            )

    def session_key(self, request: Request) -> Hashable:
        """Of which kind a run is; see session.py."""
        return kind(request, self, self.width(request.model.device, request.layout.length))

    def sample(self, request: Request) -> Decoded:
        """Draw ``request.batch`` images, each at its own pace. Raises ValueError on illegal parameters."""
        model, params, batch = request.model, request.params, request.batch
        layout, begun = request.layout.to(model.device), time.perf_counter()
        params.check(model.vocab)
        self.check(layout.length)
        method = replace(self, rule=self.rule.bind(model))
        strength = check_strength(request.strength, batch, layout.length, model.device)
        width = self.width(model.device, layout.length)
        forcing = layout.forces
        with session(model, self.session_key(request)) as kept:
            state = model.start(
                request.conditioning, request.negative, batch, layout, slack=width, guided=params.guided,
                into=kept.state,
            )
            memory = kept.draft_state or Memory.empty(
                self.reuse, batch, layout.stride, width, model.vocab_total, model.device
            )
            mapped(Tensor.zero_, memory)
            kept.adopt(state, memory)
            start = read_given(model, state, layout, batch, callback=request.callback)
            check_finite(start.out)
            run = Run(method, kept.params(params, model.device), width, forcing, model, state, memory)
            carry = begin(run, start, layout, Stream.of(request.seed, batch, model.device), strength)
            carry, laps = decode(request, kept, state, partial(step, run), carry, width, start.given, begun)
            settings = {
                "method": "sjd", "window": width, "reuse": self.reuse, "initial": self.initial,
                "rule": method.rule.describe(), "lossless": self.rule.lossless and self.reuse != "threshold_paper",
            }
            if self.reuse.startswith("threshold"):
                settings["threshold"] = self.threshold
            trace = carry.record.finish(
                layout, request.seed, settings | asdict(params), time.perf_counter() - begun, milliseconds=laps
            )
            return Decoded(carry.tokens[:, :-1].clone(), trace)


@dataclass(frozen=True)
class Jacobi:
    """Greedy Jacobi decoding: the arg-max picture, with the equality test. Of the request's parameters, cfg counts."""

    window: int | None = None
    initial: str = "repeat"

    def sample(self, request: Request) -> Decoded:
        """Draw the greedy image (the batch's images are equal)."""
        greedy = replace(request, params=SamplingParams(cfg=request.params.cfg, temperature=0))
        return SJD(window=self.window, reuse="gumbel", initial=self.initial).sample(greedy)
