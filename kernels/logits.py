"""Logits -> probabilities: guidance, special ids, temperature, entropy temperature, filters, softmax, forced tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.dispatch import Accelerated
from .sampling import at, nobody, point_mass
from .sampling import entropy as entropy_of


@Accelerated
def probabilities(
    logits: Tensor,
    forced: Tensor | None,
    cfg: float,
    temperature: float,
    vocab: int,
    top_k: int,
    top_p: float,
    order: tuple[str, str],
    entropy: tuple[float, float, float] | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    """Probabilities [B, T, V+] (fp32) from logits [R, T, V+]; R = 2B with guidance (cfg other than 1), else B.

    In this order: guidance u + cfg (c - u); ids >= ``vocab`` are excluded; temperature (0: all mass on the first
    largest); the filters ``top_k`` (0: off) and ``top_p`` (1: off) in their ``order``, "top_k" and "top_p"; softmax.
    forced [B, T] (int64): an id in [0, V+) makes the position a point mass, -1 leaves it free; None: all are free.

    Top-k keeps a logit if fewer than k are larger, top-p if the larger ones have a total probability of at most top_p.
    So equal logits are kept or dropped together, and at least one is kept. The second filter counts only what the first
    one kept.

    entropy (a, b, c): the temperature of a row is multiplied by a exp(-H / b) + c, with H its entropy (nats) without a
    temperature, after the filters, which then come before the temperature. None: off.

    A row with a NaN, with +inf or with only -inf becomes all NaN, which the record of the tokens reports.

    numbers [7] (fp32): the values of cfg, temperature, top_k, top_p and entropy, read on the device, so that a captured
    step can be replayed with other values. The arguments of these names then only say what is off.
    """
    guided, greedy, heated, by_rank, by_mass = cfg != 1, temperature == 0, temperature != 1, top_k > 0, top_p < 1
    if numbers is not None:
        (cfg, temperature, top_k, top_p, *curve), heated = numbers.unbind(), True
        entropy = entropy and tuple(curve)
    z = logits[..., :vocab].float()
    if guided:
        z = guide(z, cfg)
    if greedy:
        best = z.argmax(-1)
        p = point_mass(best, vocab).mul_((1 + 0 * at(z, best)).unsqueeze(-1))
    else:
        if heated and entropy is None:
            z = z / temperature
        lowest = None
        if by_rank or by_mass:
            lowest = _lowest_kept(z, top_k if by_rank else None, top_p if by_mass else None, order)
        p = _softmax(z, z, lowest)
        if entropy is not None:
            first, decay, last = entropy
            heat = temperature * (first * torch.exp(-entropy_of(p) / decay) + last)
            p = _softmax(z / heat.unsqueeze(-1), z, lowest)
    p = F.pad(p, (0, logits.shape[-1] - vocab)) if vocab < logits.shape[-1] else p
    if forced is None:
        return p
    free = (forced < 0).unsqueeze(-1)
    if nobody(~free):
        return p
    return p.masked_fill_(~free, 0).scatter_add_(-1, forced.clamp(min=0).unsqueeze(-1), (~free).float())


def guide(logits: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance u + s (c - u): logits [2B, T, V+] (conditional rows first) -> [B, T, V+].

    With scale 1 there are no unconditional rows and the logits pass through.
    """
    if not isinstance(scale, Tensor) and scale == 1:
        return logits
    conditional, unconditional = logits.chunk(2)
    if isinstance(scale, Tensor):
        return torch.addcmul(unconditional, conditional - unconditional, scale)
    return torch.add(unconditional, conditional - unconditional, alpha=scale)


def _softmax(heated: Tensor, z: Tensor, lowest: Tensor | None) -> Tensor:
    """Softmax of rows [..., V] over the entries where z >= ``lowest`` [..., 1] (None: all)."""
    p = heated.softmax(-1)
    if lowest is None:
        return p
    # Multiplying by a float mask and renormalising is many times faster than filling with -inf.
    p = p.mul_(torch.ge(z, lowest, out=torch.empty_like(z)))
    return p.div_(p.sum(-1, keepdim=True))


def _lowest_kept(z: Tensor, top_k: Any, top_p: float | Tensor | None, order: tuple[str, str]) -> Tensor:
    """The smallest logit [..., 1] of each row z [..., V] that passes both filters, one of which may be None.

    top_k: an int, or a Tensor where steps are captured.
    """
    if top_p is None and top_k is not None and not isinstance(top_k, Tensor):
        return z.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
    ordered = z.sort(descending=True).values
    if top_k is None:
        kth = None
    elif isinstance(top_k, Tensor):
        kth = ordered.gather(-1, (top_k.long() - 1).expand(*z.shape[:-1], 1))
    else:  # also a number of numpy
        kth = ordered[..., top_k - 1 : top_k]
    if top_p is None:
        return kth
    weights = ordered.softmax(-1)
    if kth is not None and order[0] == "top_k":
        weights = weights * (ordered >= kth)
        weights = weights / weights.sum(-1, keepdim=True)
    larger = weights.cumsum(-1) - weights
    lowest = ordered.gather(-1, (larger <= top_p).sum(-1, keepdim=True).clamp(min=1) - 1)  # a row of NaN keeps none
    return lowest if kth is None else torch.maximum(lowest, kth)
