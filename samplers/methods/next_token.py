"""Next-token prediction, one token per forward pass: the reference distribution and the baseline of comparisons."""

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
class NextTokenState:
    """The DecodeState of next-token prediction.

    committed [B]: tokens decided so far; token [B, 1]: the last of them; step_index [1, 1]: forward passes so far (all
    int64).
    """

    committed: Tensor
    token: Tensor
    step_index: Tensor
    stream: Stream
    layout: TokenLayout
    draft: ClassVar[None] = None  # it feeds no guesses


class Noise:
    """The fixed Gumbel noise of every position. On the CPU the noise of several positions is made in one call."""

    ENOUGH = 16384  # numbers per call that make up for its overhead

    def __init__(self) -> None:
        self.first, self.rows = -1, torch.zeros(0)  # rows: the noise of positions first, first + 1, ...

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
    """x_n ~ p(. | x_<n), sampled as argmax(log p + g) with one fixed Gumbel vector g per image and position.

    This makes the image a function of the seed alone: Jacobi decoding with reuse="gumbel" generates the same image.
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
        """One forward pass per token past the prefix; the prompt's pass predicts the first of them."""
        self.check(request)
        model, params, batch = request.model, request.params, request.batch
        layout, start_time = request.layout.to(model.device), time.perf_counter()
        forcing = layout.forces
        with open_session(self, request) as session:
            model_state = model.start(
                request.conditioning, request.negative, batch, layout, slack=1, guided=params.guided, into=session.state
            )
            session.adopt(model_state)
            session.record = session.record or Record.empty(layout.length, batch, model.device, round_fields=())
            record = session.record
            start = read_prefix(model, model_state, layout, batch, callback=request.callback)
            check_finite(start.out)
            run = NextTokenRun(model, session.params(params, model.device), forcing, model_state, record, Noise())
            state = begin(run, start, layout, Stream.of(request.seed, batch, model.device))
            decode(request, session, model_state, partial(step, run), state, 1, start.prefix_length, start_time)
            settings = self.describe(request) | asdict(params)
            trace = record.finish(layout, request.seed, settings, time.perf_counter() - start_time)
            return Result(record.image.clone(), trace)


@dataclass(frozen=True)
class NextTokenRun:
    """What all steps of a run share. forcing: does the layout force any token."""

    model: ARModel
    params: SamplingParams
    forcing: bool
    model_state: Any
    record: Record
    noise: Noise


def begin(run: NextTokenRun, start: Start, layout: TokenLayout, stream: Stream) -> NextTokenState:
    """The state after the first prediction, which decides the first token past the prefix."""
    run.record.begin(start.tokens, start.committed)
    first = start.committed[:, None]
    state = NextTokenState(start.committed, torch.zeros_like(first), torch.zeros_like(first[:1]), stream, layout)
    return sample_next(run, start.out, state, start.committed < layout.length, Source.PREFILL)


def step(run: NextTokenRun, state: NextTokenState) -> NextTokenState:
    """One forward pass: feed the last token, sample the next. Complete images stay as they are."""
    more = state.committed < state.layout.length
    out = run.model.step(run.model_state, state.token, state.committed[:, None] - 1)
    run.model.commit(run.model_state, more)
    return sample_next(run, out, state, more, Source.BONUS)


def sample_next(run: NextTokenRun, out: StepOut, state: NextTokenState, more: Tensor, source: Source) -> NextTokenState:
    """Sample the next token from the prediction ``out`` [R, 1, V+], in the images that need ``more`` [B] (bool)."""
    position = state.committed[:, None]
    forced = state.layout.forced_at(position) if run.forcing else None
    p = probabilities(out.logits[:, -1:], run.params, run.model.vocab, forced)
    token = perturbed_argmax(p, run.noise(state.stream, position, p.shape[-1]))
    if forced is not None:
        source = torch.where(forced >= 0, Source.FORCED, source)
    run.record.write(position, more[:, None], token, p, finalised_at=state.step_index, source=source)
    return replace(state, committed=state.committed + more, token=token, step_index=state.step_index + 1)
