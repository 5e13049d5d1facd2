"""Logits -> probabilities under a run's sampling parameters. The same code serves p and q."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels import logits as kernels
from .contract import SamplingParams, StepOut


@dataclass(frozen=True)
class DeviceParams(SamplingParams):
    """Sampling parameters of a captured step, whose values are ``numbers`` [7] (fp32, on the device: cfg, temperature,
    top_k, top_p, entropy), so that it can be replayed with others. The fields of these names only tell what is off."""

    numbers: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device, into: Tensor | None) -> DeviceParams:
        """``params`` with its numbers on the device, written to ``into`` if there is one."""
        # Greedy decoding uses no temperature for p, and temperature 1 for drafts.
        entropy = params.entropy or (0.0, 1.0, 1.0)
        numbers = torch.tensor([params.cfg, params.temperature or 1.0, params.top_k, params.top_p, *entropy])
        numbers = numbers.to(device) if into is None else into.copy_(numbers)
        on = 1 + params.guided, float(params.temperature > 0), int(params.top_k > 0), 1.0 if params.top_p == 1 else 0.5
        return cls(*on, params.order, params.entropy, numbers)


def check_finite(prefill: StepOut) -> None:
    """Raise ValueError if the first prediction is NaN or infinite: all tokens would be 0."""
    if not (prefill.logits < torch.inf).all():
        raise ValueError(
            f"The model computes NaN or infinite logits ({prefill.hidden.dtype}). Choose bf16 or fp32 as its dtype in "
            "the loader, as fp16 overflows at 65504."
        )


def sampling_probs(logits: Tensor, params: SamplingParams, vocab: int, forced: Tensor | None) -> Tensor:
    """Probabilities [B, T, V+] (fp32) from the logits [R, T, V+] of a forward pass, with these sampling parameters.

    forced [B, T] (int64): the id forced at each predicted position, else -1 (None: no position is forced). A forced
    position is a point mass. Elsewhere ids >= ``vocab`` (special tokens) have probability 0.
    """
    return kernels.probabilities(
        logits,
        forced,
        params.cfg,
        params.temperature,
        vocab,
        params.top_k,
        params.top_p,
        params.order,
        params.entropy,
        params.numbers if isinstance(params, DeviceParams) else None,
    )
