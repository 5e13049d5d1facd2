"""Next-token prediction of vectors in a random order: MAR's own loop (arXiv:2406.11838, section 3.3), the baseline.

The number of unknown tokens falls along a cosine; with as many forward passes as tokens, each samples exactly one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ..continuous_contract import Canvas, ContinuousRequest, noise_bytes, noises, own_noise
from ..contract import Method, Result
from ..engine.session import Session, continuous_session_key, use_session
from ..layout import TokenLayout
from ..rng import Stream
from ..settings import check_settings, setting
from ..trace import Source


def mask_schedule(iterations: int, length: int) -> list[int]:
    """Tokens sampled per forward pass, at least one: after pass i of n, length * cos(pi/2 * (i + 1)/n) stay unknown."""
    counts, unknown = [], length
    for i in range(min(iterations, length)):
        wanted = math.floor(length * math.cos(math.pi / 2 * (i + 1) / min(iterations, length)))
        last = i == min(iterations, length) - 1
        remaining = 0 if last else max(1, min(unknown - 1, wanted))
        counts.append(unknown - remaining)
        unknown = remaining
    return counts


@dataclass(frozen=True)
class ContinuousNextToken(Method):
    """Sample in ``iterations`` forward passes. Default: the model's own number, else one token (or cell) per pass."""

    iterations: int | None = setting(None, 1)
    name: ClassVar[str] = "continuous_next_token"
    continuous: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        """True for one token (or cell) per pass: tokens of one pass do not see each other. See also ``describe``."""
        return self.iterations is None

    def check(self, request: ContinuousRequest) -> None:
        request.params.check()
        check_settings(self)

    def width(self, request: ContinuousRequest) -> int:
        return max(map(max, self.counts(request)))

    def describe(self, request: ContinuousRequest) -> dict[str, Any]:
        alone = self.width(request) <= request.model.group
        iterations = None if alone else len(self.counts(request))
        return {"method": self.name} | asdict(request.params) | {"lossless": alone, "iterations": iterations}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        passes = settings["iterations"]
        return f"continuous, {passes} iterations" if passes else "continuous, one token a pass"

    def run_bytes(self, request: ContinuousRequest) -> int:
        width = self.width(request)
        rows = request.batch * (1 + request.guided)
        return noise_bytes(request, width) + request.model.run_bytes(rows, request.length, width)

    def session_key(self, request: ContinuousRequest) -> Hashable:
        return continuous_session_key(request, self.name)

    def sample(self, request: ContinuousRequest) -> Result:
        self.check(request)
        with use_session(self, request) as session:
            return self._sample(request, session)

    def _sample(self, request: ContinuousRequest, session: Session) -> Result:
        model, params, batch = request.model, request.params, request.batch
        started = time.perf_counter()
        schedule = model.schedule(params)
        stream = Stream.of(request.seed, batch, model.device)
        canvas = Canvas(request, stream)
        record = canvas.record()
        prompts = request.conditioning, request.negative, batch, request.grid, request.guided
        state = model.start(*prompts, session.active_graphs)
        passes, highest = 0, canvas.extent()[1]
        for counts in self.counts(request):
            width = max(counts)
            positions, exist = canvas.upcoming(width)
            count = torch.tensor(counts, device=canvas.device)
            sampled = exist & (torch.arange(width, device=canvas.device) < count[:, None])
            noise0, noise_t = noises(stream, positions, model.channels, schedule.steps)
            after = canvas.done + count
            cfg = model.guidance(params, canvas.done, after, canvas.length)
            distribution = model.predict(
                state,
                canvas.tokens,
                canvas.known_mask(),
                positions[:, None],
                highest,
                cfg[:, None, None].expand(-1, 1, width),
                params.temperature,
                noise0[:, None],
                noise_t[:, :, None],
                schedule,
            )
            distribution = distribution.map(lambda t: t[:, 0])
            canvas.write(positions, distribution.token(*own_noise(stream, positions, model.channels)), sampled)
            source = Source.BONUS if passes else Source.PREFILL
            record.write(positions, sampled, finalised_at=passes, source=source)
            canvas.done = after
            record.round(accepted=0 * count, committed=count, width=width)
            passes, highest = passes + 1, min(highest + width, canvas.length)
            if request.callback:
                request.callback(canvas.progress(passes))
        trace = record.finish(
            TokenLayout.plain(*request.grid), request.seed, self.describe(request), time.perf_counter() - started
        )
        return Result(canvas.final_tokens(), trace)

    def counts(self, request: ContinuousRequest) -> list[list[int]]:
        """Tokens per pass and image. Images with more kept tokens may finish earlier."""
        group, length = request.model.group, request.length
        iterations = self.iterations or request.params.iterations or length
        kept = torch.zeros(1, 1) if request.kept is None else request.kept
        free = (length - kept.sum(1).long().expand(request.batch)).tolist()
        rows = [[n * group for n in mask_schedule(min(iterations, left // group), left // group)] for left in free]
        passes = max(map(len, rows))
        return [[row[i] if i < len(row) else 0 for row in rows] for i in range(passes)]
