"""A method in two functions: plain Jacobi decoding with sampling (SJD++, arXiv:2512.07503, table 6).

The pack has it as SJD(reuse="equality"). Here it is a method of its own, to read when adding one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from comfyui_specar.kernels.sampling import categorical
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.engine.run import DiscreteMethod
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rng import Purpose
from comfyui_specar.samplers.trace import Source
from torch import Tensor

from ..support.captured_runs import assert_same_run, captured
from ..support.enumerated import LAYOUTS, MODELS, assert_exact, draw
from ..support.toy import request


@dataclass(frozen=True)
class Guesses:
    """committed [B]: tokens decided; token [B, W]: the last of them, then guesses; passes [1, 1]."""

    committed: Tensor
    token: Tensor
    passes: Tensor
    extent: ClassVar[None] = None

    @property
    def draft(self):
        return self.token[:, 1:]


@dataclass(frozen=True)
class PlainJacobi(DiscreteMethod):
    """Every pass samples all tokens of the window again, and a guess is accepted if it is the token sampled.

    Exact: what is decided is a sample of p_k, drawn after all that p_k is conditioned on was decided.
    """

    window: int = 4
    name: ClassVar[str] = "plain_jacobi"
    lossless: ClassVar[bool] = True

    def begin(self, run, committed, out):
        first = committed[:, None]
        token = first.new_zeros((len(first), self.window))
        p = run.probs(out.logits[:, -1:], first - 1).expand(-1, self.window, -1)  # all guesses by the first prediction
        return self.decide(run, Guesses(committed, token, torch.zeros_like(first[:1])), p, Source.PREFILL, 1)

    def step(self, run, now, extent=()):
        position = now.committed[:, None] + torch.arange(self.window) - 1
        after = self.decide(run, now, run.predict(now.token, position), Source.BONUS, self.window)
        run.keep(after.committed - now.committed)
        return after

    def decide(self, run, now, p, source, most):
        column = torch.arange(self.window)
        position = now.committed[:, None] + column
        sampled = categorical(p, run.inputs.stream.uniform(position, Purpose.TARGET, now.passes))
        guess = torch.cat((now.token[:, 1:], now.token[:, :1]), dim=1)
        accepted = (sampled == guess) & (column < most - 1)  # the last column has no guess
        count = run.count_decided(accepted, now.committed)
        run.record.write(position, column < count[:, None], sampled, p, source=source, finalised_at=now.passes)
        last = torch.cat((now.token[:, :1], sampled), dim=1)  # the window moves past the last token decided
        token = last.gather(1, (count[:, None] + column).clamp(max=self.window))
        return Guesses(now.committed + count, token, now.passes + 1)

    def check(self, request):
        request.params.check(request.model.vocab)

    def width(self, request):
        return self.window

    def describe(self, request):
        return {"method": self.name, "window": self.window, "lossless": self.lossless}

    @staticmethod
    def in_words(settings):
        return f"plain Jacobi, window {settings['window']}"


@pytest.mark.parametrize("name", ["row", "line_ends", "kept"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(cfg=2.0, top_k=2)], ids=["plain", "filtered"])
def test_it_samples_from_the_distribution(name, params):
    result = draw(PlainJacobi(), name, params, batch=16_000)
    assert_exact(result.tokens, name, params)
    plainly = draw(NextToken(), name, params).trace.totals["target_passes"]
    assert sum(result.trace.totals["passes_per_image"]) / 16_000 < plainly


def test_it_is_captured_as_it_is():
    asked = request(MODELS["line_ends"], LAYOUTS["line_ends"][0], batch=2)
    wanted = PlainJacobi().sample(asked)
    with captured() as graphs:
        assert_same_run([PlainJacobi().sample(asked) for _ in range(3)][-1], wanted)
    assert any(len(made._graphs) for made in graphs)
