"""Settling: guesses of a Jacobi window that hardly change any more are accepted without a test.

A pass of Jacobi decoding commits no guess past the first rejection, although there may be some for which the target
predicts nearly the same in every pass. With settling, the next pass accepts the guesses past the committed tokens, one
after the other, as long as their distribution has changed by less than ``settle``: the total variation of q_k and p_k.

What this adds to the drift is known. A token sampled from q is accepted for certain, which is an acceptance rule with
f = 1 (rules/acceptance.py), so the drift bound grows by the total variation of q and the p of the pass that accepts it.
What settles depends on distributions alone, not on the guesses, which so remain samples from their q.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..constants import counting
from ..engine.run import Run
from .window import Tested, Window


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation [...] of distributions p and q [..., V+]."""
    return (1 - torch.minimum(p, q).sum(-1)).clamp(min=0)


def count_settled(tv_change: Tensor, limit: Tensor, exists: Tensor, count: Tensor) -> Tensor:
    """How many guesses [B] (int64) past the ``count`` [B] committed ones settle.

    tv_change [B, W]: the total variation of each guess's distribution in this pass and the last. A guess settles if
    that is below ``limit`` [B, W], a guess ``exists`` [B, W] (bool), and all guesses before it are committed or settle.
    """
    committed = counting(exists.shape[1], exists.device) < count[:, None]
    return (committed | (exists & (tv_change < limit))).long().cumprod(1).sum(1) - count


def accept_settled(run: Run, window: Window, tested: Tested, p: Tensor, position: Tensor) -> Tested:
    """The findings of a pass with the settled guesses accepted, whatever their test says."""
    assert window.settled_count is not None and tested.u is not None
    distance = total_variation(p, run.draft_state.draft_probs.at(position))
    settled = counting(distance.shape[1], distance.device) < window.settled_count[:, None]
    relaxed, drift_bound = settled & (tested.u >= tested.ratio), distance * settled
    if tested.relaxed is not None:
        relaxed = torch.where(settled, relaxed, tested.relaxed)
        drift_bound = torch.where(settled, drift_bound, tested.drift_bound)
    return replace(
        tested,
        token=torch.where(settled, window.guess, tested.token),
        accepted=tested.accepted | settled,
        relaxed=relaxed,
        drift_bound=drift_bound,
        tv_change=distance,
    )
