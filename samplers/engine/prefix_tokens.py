"""Prefix tokens: the forced tokens at the start of an image, such as the top of one to be continued.

They are read with the prompt, in a few forward passes. Sampling starts after them, from the prediction (and so the
distribution) that the model has after sampling exactly these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import images_where, take
from ..contract import ARModel, Callback, Drafter, Progress, StepOut
from ..layout import TokenLayout

CHUNK = 256  # prefix tokens per forward pass: the logits of all of them are in memory at once


@dataclass(frozen=True)
class Start:
    """Where sampling starts: after prefix_length [B] (int64, on the CPU) tokens; ``out`` [R, 1, ...] predicts the next.

    tokens [B, S + 1] (int64): the prefix, then zeros.
    """

    prefix_length: Tensor
    tokens: Tensor
    out: StepOut

    @property
    def committed(self) -> Tensor:
        """prefix_length [B] (int64) on the device."""
        return self.prefix_length.to(self.tokens.device)


def prefix_length(layout: TokenLayout) -> Tensor:
    """Number of forced tokens at the start of the image [1 or B] (int64, on the CPU), at most S - 1.

    The last token is always left to the sampler. Reads the device.
    """
    return (layout.forced >= 0).long().cumprod(1).sum(1).clamp(max=layout.length - 1).cpu()


def read_prefix(
    model: ARModel,
    state: Any,
    layout: TokenLayout,
    batch: int,
    drafter: Drafter | None = None,
    draft_state: Any = None,
    callback: Callback | None = None,
) -> Start:
    """Feed the prefix tokens of ``batch`` images to a fresh state, and to the drafter's.

    An image with a shorter prefix waits for the others, so that it is the same as if it were generated alone.
    callback: called after every forward pass (with passes 0, they are not counted), so that it can interrupt.
    """
    length, out = prefix_length(layout).expand(batch), state.prefill
    device, longest = layout.forced.device, int(length.max())
    end = length.to(device)[:, None]
    in_prefix = torch.arange(layout.length, device=device) < end
    tokens = torch.nn.functional.pad(torch.where(in_prefix, layout.forced, 0), (0, 1))
    fed = torch.zeros_like(end)
    for begin in range(0, longest, CHUNK):
        index = torch.arange(min(CHUNK, longest - begin), device=device)
        positions = fed + index
        chunk, count = tokens.gather(1, positions), (end - fed).clamp(max=len(index))
        model.set_attention_length(state, begin + len(index))
        after = model.step(state, chunk, positions)
        model.commit(state, count[:, 0])
        if drafter is not None:
            before = torch.cat((out.hidden, after.hidden[:, :-1]), dim=1)
            drafter.set_attention_length(draft_state, begin + len(index))
            drafter.observe(draft_state, chunk, positions, before, count[:, 0])
        last, more = (count - 1).clamp(min=0), count[:, 0] > 0
        out = StepOut(
            *(
                images_where(more, take(new, last), old)
                for new, old in ((after.logits, out.logits[:, -1:]), (after.hidden, out.hidden[:, -1:]))
            )
        )
        fed = fed + count
        if callback:
            callback(Progress(tokens[:, :-1], fed[:, 0].cpu(), layout.length, 0))
    return Start(length, tokens, out)
