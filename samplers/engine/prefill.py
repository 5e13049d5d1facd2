"""Tokens that are given from the start, such as the top of a picture to be continued, are read with the prompt.

Sampling begins behind them: with the prediction, and so the law, that it would have had after drawing just these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import choose, take
from ..contract import ARModel, Callback, Drafter, Progress, StepOut
from ..layout import TokenLayout

CHUNK = 256  # given tokens read in a pass, whose logits all stand in memory


@dataclass(frozen=True)
class Start:
    """Where sampling begins: ``given`` [B] tokens (int64, on the CPU) of each image stand, ``out`` [R, 1, ...] predicts
    the next.

    tokens [B, S + 1] (int64): the given ones, then zeros.
    """

    given: Tensor
    tokens: Tensor
    out: StepOut

    @property
    def committed(self) -> Tensor:
        """Decided tokens [B] (int64) on the device."""
        return self.given.to(self.tokens.device)


def given_tokens(layout: TokenLayout) -> Tensor:
    """How many tokens are forced at the beginning [1 or B] (int64, on the CPU); the very last is left to the sampler.

    Reads the device.
    """
    return (layout.forced >= 0).long().cumprod(1).sum(1).clamp(max=layout.length - 1).cpu()


def read_given(
    model: ARModel, state: Any, layout: TokenLayout, batch: int, drafter: Drafter | None = None,
    draft_state: Any = None, callback: Callback | None = None,
) -> Start:
    """Feed a fresh state (and its drafter's) the tokens given at the beginning of ``batch`` images, in few passes.

    An image with fewer of them waits for the others, so that it is drawn as it would be alone. callback: told of every
    such pass (none is counted), so that it can interrupt.
    """
    given, out = given_tokens(layout).expand(batch), state.prefill
    device, most = layout.forced.device, int(given.max())
    left = given.to(device)[:, None]
    meant = torch.arange(layout.length, device=device) < left
    tokens = torch.nn.functional.pad(torch.where(meant, layout.forced, 0), (0, 1))
    fed = torch.zeros_like(left)
    for begin in range(0, most, CHUNK):
        index = torch.arange(min(CHUNK, most - begin), device=device)
        positions = fed + index
        part, count = tokens.gather(1, positions), (left - fed).clamp(max=len(index))
        model.set_attention_length(state, begin + len(index))
        after = model.step(state, part, positions)
        model.commit(state, count[:, 0])
        if drafter is not None:
            before = torch.cat((out.hidden, after.hidden[:, :-1]), dim=1)
            drafter.set_attention_length(draft_state, begin + len(index))
            drafter.observe(draft_state, part, positions, before, count[:, 0])
        last, more = (count - 1).clamp(min=0), count[:, 0] > 0
        out = StepOut(*(choose(more, take(new, last), old) for new, old in (
            (after.logits, out.logits[:, -1:]), (after.hidden, out.hidden[:, -1:]))))
        fed = fed + count
        if callback:
            callback(Progress(tokens[:, :-1], fed[:, 0].cpu(), layout.length, 0))
    return Start(given, tokens, out)
