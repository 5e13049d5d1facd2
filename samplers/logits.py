"""Logits -> probabilities under a run's sampling parameters. The same code serves p and q."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import logits as kernels
from .protocols import SamplingParams, StepOut


def check_finite(prefill: StepOut) -> None:
    """Raise ValueError if the prompt's own prediction is NaN or infinite: all that follows would be token 0."""
    if not (prefill.logits < torch.inf).all():
        raise ValueError(
            f"The model computes NaN or infinite logits ({prefill.hidden.dtype}). Choose bf16 or fp32 as its dtype in "
            "the loader: 16-bit floats of the other kind end at 65504."
        )


def probabilities(logits: Tensor, params: SamplingParams, vocab: int, forced: Tensor | None) -> Tensor:
    """Probabilities [B, T, V+] (fp32) from a pass's logits [R, T, V+] under the sampling parameters.

    forced [B, T] (int64): the id forced at each predicted position or -1 (None: no position is forced); a forced
    position is a point mass, and elsewhere ids from ``vocab`` on (special tokens) cannot be drawn.
    """
    return kernels.probabilities(
        logits, forced, params.cfg, params.temperature, vocab, params.top_k, params.top_p, params.order
    )
