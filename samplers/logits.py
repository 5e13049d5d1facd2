"""Logits -> probabilities: guidance, forced tokens, temperature, top-k, top-p. The same code serves p and q."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling import point_mass
from .protocols import SamplingParams, StepOut


def check_finite(prefill: StepOut) -> None:
    """Raise ValueError if the prompt's own prediction is NaN or infinite: all that follows would be token 0."""
    if not (prefill.logits < torch.inf).all():
        raise ValueError(
            f"The model computes NaN or infinite logits ({prefill.hidden.dtype}). Choose bf16 or fp32 as its dtype in "
            "the loader: 16-bit floats of the other kind end at 65504."
        )


def guide(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance u + s (c - u): logits [2B, T, V+] (conditional rows first) -> [B, T, V+].

    With scale 1 there are no unconditional rows and the logits pass through.
    """
    if scale == 1:
        return logits
    conditional, unconditional = logits.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set logits below the k-th largest of each row to -inf (ties with it stay); k = 0 keeps all."""
    if k == 0:
        return logits
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of largest logits whose probability reaches p (nucleus); at least one stays."""
    if p == 1:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    drop = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, index, before > p)
    return logits.masked_fill(drop, -torch.inf)


def probabilities(logits: Tensor, params: SamplingParams, vocab: int, forced: Tensor | None) -> Tensor:
    """Probabilities [B, T, V+] (fp32) from a pass's logits [R, T, V+] under the sampling parameters.

    forced [B, T] (int64): the id forced at each predicted position or -1 (None: no position is forced); a forced
    position is a point mass, and elsewhere ids from ``vocab`` on (special tokens) cannot be drawn.
    """
    logits = guide(logits.float(), params.cfg)
    if vocab < logits.shape[-1]:
        logits = logits.index_fill(-1, torch.arange(vocab, logits.shape[-1], device=logits.device), -torch.inf)
    if params.temperature == 0:
        p = point_mass(logits.argmax(-1), logits.shape[-1])
    else:
        logits = logits / params.temperature
        filters = {"top_k": lambda z: keep_top_k(z, params.top_k), "top_p": lambda z: keep_top_p(z, params.top_p)}
        for name in params.order:
            logits = filters[name](logits)
        p = logits.softmax(-1)
    if forced is None:
        return p
    return torch.where((forced >= 0).unsqueeze(-1), point_mass(forced.clamp(min=0), p.shape[-1]), p)
