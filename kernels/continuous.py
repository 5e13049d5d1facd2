"""Gaussians of draft and target: their log ratio, and samples from the residual distribution.

Shapes: C numbers per token. A distribution is mean and log_std [..., C] and path [...] (see
samplers.distributions.Normal).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated

Gaussian = tuple[Tensor, Tensor, Tensor]  # mean, log_std, path


@Accelerated
def log_ratio(x: Tensor, p: Gaussian, q: Gaussian, kappa: float, sign: float) -> Tensor:
    """log of Sigma^sign p(x)/q(x) [...] at x [..., C], with the standard deviations in both exponents times ``kappa``.

    log Sigma = path_q - path_p, clamped to +-50 (eqs. 8 and 9 of "Continuous speculative decoding").
    """
    (p_mean, p_log_std, p_path), (q_mean, q_log_std, q_path) = p, q
    to_p, to_q = (
        (x - mean).square() / (2 * kappa**2) * (-2 * log_std).exp()
        for mean, log_std in ((p_mean, p_log_std), (q_mean, q_log_std))
    )
    return (to_q - to_p + q_log_std - p_log_std).sum(-1) + sign * (q_path - p_path).clamp(-50, 50)


@Accelerated
def redraw(normal: Tensor, accept: Tensor, p: Gaussian, q: Gaussian, sign: float) -> tuple[Tensor, Tensor]:
    """A sample [..., C] from norm([Sigma^sign p - q]+) by acceptance-rejection, and its number of proposals (int64).

    normal [n, ..., C], accept [n, ...]: standard normal and uniform numbers of n proposals from p. The number [...] is
    that of first_accepted.
    """
    mean, log_std, _ = p
    proposals = mean + log_std.exp() * normal
    return first_accepted(proposals, log_ratio(proposals, p, q, 1.0, sign), accept)


def first_accepted(proposals: Tensor, ratio: Tensor, accept: Tensor) -> tuple[Tensor, Tensor]:
    """The first of n proposals [n, ..., C] with accept < 1 - exp(-ratio) [n, ...], and its number from 1 [...].

    If none passes, the result is the last proposal and the number -n. A ratio of NaN means that the draft had no valid
    distribution: the first proposal passes.
    """
    taken = ~(accept >= -torch.expm1(-ratio))
    found, tries = taken.any(0), len(proposals)
    first = torch.where(found, taken.byte().argmax(0), tries - 1)
    y = proposals.gather(0, first[None, ..., None].expand(1, *proposals.shape[1:]))[0]
    return y, torch.where(found, first + 1, -tries)
