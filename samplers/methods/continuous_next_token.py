"""Plain sampling of vectors in a random order: MAR's own loop (arXiv:2406.11838, section 3.3), the baseline.

The number of unknown tokens falls along a cosine; with as many passes as tokens, each pass draws exactly one.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

import torch

from ..continuous_contract import Canvas, ContinuousDecoded, ContinuousRequest, noises, own_noise
from ..layout import TokenLayout
from ..rng import Stream
from ..trace import Source


def mask_schedule(iterations: int, length: int) -> list[int]:
    """Tokens drawn per pass: length * cos(pi/2 * (i + 1)/n) stay unknown, at least one is drawn, the last takes all."""
    counts, unknown = [], length
    for i in range(min(iterations, length)):
        wanted = math.floor(length * math.cos(math.pi / 2 * (i + 1) / min(iterations, length)))
        last = i == min(iterations, length) - 1
        remaining = 0 if last else max(1, min(unknown - 1, wanted))
        counts.append(unknown - remaining)
        unknown = remaining
    return counts


@dataclass(frozen=True)
class ContinuousNextToken:
    """Draw in ``iterations`` passes (None: the model's own number, or else one token, or one cell, a pass)."""

    iterations: int | None = None

    def sample(self, request: ContinuousRequest) -> ContinuousDecoded:
        """Draw ``request.batch`` images. Raises ValueError on illegal parameters."""
        model, params, batch = request.model, request.params, request.batch
        params.check()
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}, but must be 1 or more.")
        started = time.perf_counter()
        schedule = model.schedule(params)
        stream = Stream.of(request.seed, batch, model.device)
        canvas = Canvas(request, stream)
        record = canvas.record()
        guided = params.cfg != 1
        state = model.start(request.conditioning, request.negative, batch, request.grid, guided)
        passes, widest, highest = 0, 0, canvas.extent()[1]
        for counts in self._counts(canvas, model.group, params.iterations):
            most = max(counts)
            widest = max(widest, most)
            positions, exist = canvas.upcoming(0, most)
            count = torch.tensor(counts, device=canvas.device)
            drawn = exist & (torch.arange(most, device=canvas.device) < count[:, None])
            noise0, noise_t = noises(stream, positions, model.channels, schedule.steps)
            after = canvas.done + count
            cfg = model.guidance(params, canvas.done, after, canvas.length)
            law = model.predict(
                state, canvas.tokens, canvas.known(), positions[:, None], highest,
                cfg[:, None, None].expand(-1, 1, most), params.temperature, noise0[:, None], noise_t[:, :, None],
                schedule,
            )
            law = law.map(lambda t: t[:, 0])
            canvas.write(positions, law.token(*own_noise(stream, positions, model.channels)), drawn)
            source = Source.BONUS if passes else Source.PREFILL
            record.write(positions, drawn, finalised_at=passes, source=source)
            canvas.done = after
            record.round(accepted=0 * count, committed=count, width=most)
            passes, highest = passes + 1, min(highest + most, canvas.length)
            if request.callback:
                request.callback(canvas.progress(passes))
        alone = widest <= model.group
        settings = {"method": "continuous_next_token", **asdict(params), "lossless": alone,
                    "iterations": None if alone else passes}
        trace = record.finish(
            TokenLayout.plain(*request.grid), request.seed, settings, time.perf_counter() - started
        )
        return ContinuousDecoded(canvas.finished(), trace)

    def _counts(self, canvas: Canvas, group: int, own: int | None) -> list[list[int]]:
        """Tokens per pass and image. Images that keep more of their picture may be finished sooner."""
        iterations = self.iterations or own or canvas.length
        free = (canvas.length - canvas.done).tolist()
        rows = [[n * group for n in mask_schedule(min(iterations, left // group), left // group)] for left in free]
        passes = max(map(len, rows))
        return [[row[i] if i < len(row) else 0 for row in rows] for i in range(passes)]
