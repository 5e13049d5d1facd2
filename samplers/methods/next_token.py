"""Plain autoregressive sampling, one token per pass: the reference law and the baseline of every comparison."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.sampling import perturbed_argmax, readable
from ..contract import ARModel, Method, Request, Result, SamplingParams, StepOut
from ..engine.loop import decode
from ..engine.memory import run_bytes
from ..engine.prefill import Start, read_prefix
from ..engine.session import open_session, session_key
from ..layout import TokenLayout
from ..probabilities import check_finite, probabilities
from ..rng import Stream
from ..trace import Record, Source


@dataclass(frozen=True)
class Carry:
    """committed [B]: tokens decided so far; token [B, 1]: the last of them; turn [1, 1]: passes so far (all int64);
    what the run was asked."""

    committed: Tensor
    token: Tensor
    turn: Tensor
    stream: Stream
    layout: TokenLayout
    draft: ClassVar[None] = None  # no guesses


class Noise:
    """The positions' Gumbel vectors. On the CPU several are made at once, where one is too short to be worth the calls.
    """

    ENOUGH = 16384  # numbers in a call

    def __init__(self) -> None:
        self.first, self.rows = -1, torch.zeros(0)

    def __call__(self, stream: Stream, position: Tensor, total: int) -> Tensor:
        """Noise [B, 1, total] at positions [B, 1]."""
        ahead = self.ENOUGH // (total * len(position))
        if ahead < 2 or not readable(position) or (position != position[0]).any():
            return stream.gumbel(position, total)
        place = int(position[0]) % ahead
        if int(position[0]) - place != self.first:
            self.first = int(position[0]) - place
            self.rows = stream.gumbel(self.first + torch.arange(ahead).expand(len(position), -1), total)
        return self.rows[:, place : place + 1]


@dataclass(frozen=True)
class NextToken(Method):
    """x_n ~ p(. | x_<n), drawn as argmax(log p + g) with one fixed Gumbel vector g per image and position.

    Drawing it this way makes the picture a function of the seed alone, which same-seed Jacobi decoding reproduces.
    """

    name = "next_token"
    lossless = True

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)

    def width(self, request: Request) -> int:
        return 1

    def describe(self, request: Request) -> dict[str, Any]:
        return {"method": self.name, "lossless": self.lossless}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return "next token"

    def session_key(self, request: Request) -> Hashable:
        return session_key(request, self.name)

    def run_bytes(self, request: Request) -> int:
        return run_bytes(request, 1)

    def sample(self, request: Request) -> Result:
        """S passes (the prompt's included), less the tokens given at the beginning."""
        self.check(request)
        model, params, batch = request.model, request.params, request.batch
        layout, begun = request.layout.to(model.device), time.perf_counter()
        forcing = layout.forces
        with open_session(model, self.session_key(request)) as session:
            state = model.start(
                request.conditioning, request.negative, batch, layout, slack=1, guided=params.guided, into=session.state
            )
            session.adopt(state)
            session.record = session.record or Record.empty(layout.length, batch, model.device, round_fields=())
            record = session.record
            start = read_prefix(model, state, layout, batch, callback=request.callback)
            check_finite(start.out)
            run = Run(model, session.params(params, model.device), forcing, state, record, Noise())
            carry = begin(run, start, layout, Stream.of(request.seed, batch, model.device))
            decode(request, session, state, partial(step, run), carry, 1, start.prefix_length, begun)
            settings = self.describe(request) | asdict(params)
            trace = record.finish(layout, request.seed, settings, time.perf_counter() - begun)
            return Result(record.image.clone(), trace)


@dataclass(frozen=True)
class Run:
    """What all steps of a run have in common. forcing: does the layout force any token."""

    model: ARModel
    params: SamplingParams
    forcing: bool
    state: Any
    record: Record
    noise: Noise


def begin(run: Run, start: Start, layout: TokenLayout, stream: Stream) -> Carry:
    """The first token that is not given, from the prediction at the start."""
    run.record.begin(start.tokens, start.committed)
    first = start.committed[:, None]
    carry = Carry(start.committed, torch.zeros_like(first), torch.zeros_like(first[:1]), stream, layout)
    return draw(run, start.out, carry, start.committed < layout.length, Source.PREFILL)


def step(run: Run, carry: Carry) -> Carry:
    """One pass: feed the last token, draw the next. Nothing changes behind the end of the image."""
    more = carry.committed < carry.layout.length
    out = run.model.step(run.state, carry.token, carry.committed[:, None] - 1)
    run.model.commit(run.state, more)
    return draw(run, out, carry, more, Source.BONUS)


def draw(run: Run, out: StepOut, carry: Carry, more: Tensor, source: Source) -> Carry:
    """The next token from the prediction ``out`` [R, 1, V+], of every image that lacks ``more`` [B] (bool)."""
    position = carry.committed[:, None]
    forced = carry.layout.forced_at(position) if run.forcing else None
    p = probabilities(out.logits[:, -1:], run.params, run.model.vocab, forced)
    token = perturbed_argmax(p, run.noise(carry.stream, position, p.shape[-1]))
    if forced is not None:
        source = torch.where(forced >= 0, Source.FORCED, source)
    run.record.write(position, more[:, None], token, p, finalised_at=carry.turn, source=source)
    return replace(carry, committed=carry.committed + more, token=token, turn=carry.turn + 1)
