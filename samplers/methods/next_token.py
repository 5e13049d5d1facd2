"""Next-token prediction, one token per forward pass: the reference distribution and the baseline of comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.sampling import may_read, perturbed_argmax
from ..contract import Extent, Request, StepOut
from ..engine.run import DiscreteMethod, Run
from ..rng import Stream
from ..trace import Source


@dataclass(frozen=True)
class Last:
    """committed [B]: tokens decided so far; token [B, 1]: the last of them; passes [1, 1]: forward passes so far (all
    int64)."""

    committed: Tensor
    token: Tensor
    passes: Tensor
    draft: ClassVar[None] = None
    extent: ClassVar[None] = None


class Noise:
    """The fixed Gumbel noise of every position. On the CPU the noise of several positions is made in one call."""

    ENOUGH = 16384  # numbers per call that make up for its overhead

    def __init__(self) -> None:
        self.first, self.rows = -1, torch.zeros(0)  # rows: the noise of positions first, first + 1, ...

    def __call__(self, stream: Stream, position: Tensor, total: int) -> Tensor:
        """Noise [B, 1, total] at positions [B, 1]."""
        ahead = self.ENOUGH // (total * len(position))
        if ahead < 2 or not may_read(position) or (position != position[0]).any():
            return stream.gumbel(position, total)
        place = int(position[0]) % ahead
        if int(position[0]) - place != self.first:
            self.first = int(position[0]) - place
            self.rows = stream.gumbel(self.first + torch.arange(ahead).expand(len(position), -1), total)
        return self.rows[:, place : place + 1]


@dataclass(frozen=True)
class NextToken(DiscreteMethod):
    """x_n ~ p(. | x_<n), sampled as argmax(log p + g) with one fixed Gumbel vector g per image and position.

    This makes the image a function of the seed alone: Jacobi decoding with reuse="gumbel" generates the same image.
    """

    name: ClassVar[str] = "next_token"
    lossless: ClassVar[bool] = True
    same_image: ClassVar[bool] = True

    def begin(self, run: Run, committed: Tensor, out: StepOut) -> Last:
        first = committed[:, None]
        last = Last(committed, torch.zeros_like(first), torch.zeros_like(first[:1]))
        p = run.probs(out.logits[:, -1:], first - 1)
        return self.sample_next(run, last, p, committed < run.inputs.end, Source.PREFILL)

    def step(self, run: Run, last: Last, extent: Extent = Extent()) -> Last:
        more = last.committed < run.inputs.end
        p = run.predict(last.token, last.committed[:, None] - 1)
        run.keep(more)
        return self.sample_next(run, last, p, more, Source.BONUS)

    def sample_next(self, run: Run, last: Last, p: Tensor, more: Tensor, source: Source) -> Last:
        """Sample the next token from p [B, 1, V+], in the images that need ``more`` [B] (bool)."""
        position = last.committed[:, None]
        token = perturbed_argmax(p, run.draft_state(run.inputs.stream, position, p.shape[-1]))
        run.record.write(position, more[:, None], token, p, source=source, finalised_at=last.passes)
        return Last(last.committed + more, token, last.passes + 1)

    def draft_state(self, request: Request, into: Noise | None) -> Noise:
        noise = into or Noise()
        noise.first = -1  # those of an earlier run are of another seed
        return noise

    def check(self, request: Request) -> None:
        request.params.check(request.model.vocab)

    def width(self, request: Request) -> int:
        return 1

    def describe(self, request: Request) -> dict[str, Any]:
        return {"method": self.name, "lossless": self.lossless}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return "next token"
