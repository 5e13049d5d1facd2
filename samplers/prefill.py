"""Tokens that are given from the start, such as the top of a picture to be continued, are read with the prompt.

Sampling begins behind them: with the prediction, and so the law, that it would have had after drawing just these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .protocols import ARModel, Drafter, StepOut, TokenLayout

CHUNK = 256  # given tokens read in a pass, whose logits all stand in memory


@dataclass(frozen=True)
class Start:
    """Where sampling begins: ``count`` tokens of every image are given, and ``out`` [R, 1, ...] predicts the next.

    tokens [B, S + 1] (int64): the given ones, then zeros.
    """

    count: int
    tokens: Tensor
    out: StepOut

    @property
    def committed(self) -> Tensor:
        """Decided tokens [B] (int64)."""
        return torch.full_like(self.tokens[:, 0], self.count)


def given_tokens(layout: TokenLayout) -> int:
    """How many tokens are forced at the beginning of all images of the batch; the very last one is left to the sampler.

    Reads the device.
    """
    leading = (layout.forced >= 0).long().cumprod(1).sum(1)
    return min(int(leading.min()), layout.length - 1)


def read_given(
    model: ARModel, state: Any, layout: TokenLayout, batch: int, drafter: Drafter | None = None,
    draft_state: Any = None,
) -> Start:
    """Feed a fresh state (and its drafter's) the tokens given at the beginning of ``batch`` images, in few passes."""
    count, out = given_tokens(layout), state.prefill
    tokens = torch.zeros((batch, layout.length + 1), dtype=torch.int64, device=layout.forced.device)
    tokens[:, :count] = layout.forced[:, :count]
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        part, positions = tokens[:, begin:end], torch.arange(begin, end, device=tokens.device).expand(batch, -1)
        every = torch.full((batch,), end - begin, device=tokens.device)
        model.reach(state, end)
        after = model.step(state, part, positions)
        model.commit(state, every)
        if drafter is not None:
            before = torch.cat((out.hidden, after.hidden[:, :-1]), dim=1)
            drafter.reach(draft_state, end)
            drafter.observe(draft_state, part, positions, before, every)
        out = StepOut(after.logits[:, -1:], after.hidden[:, -1:])
    return Start(count, tokens, out)
