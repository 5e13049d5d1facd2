"""Probability of the codes nearest to a draft (LANTERN; Jang et al., ICLR 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated


@Accelerated
def aggregate(p: Tensor, token: Tensor, budget: Tensor, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Probability c_J [...] (fp32) and number J [...] (int64) of the nearest codes that fit into a budget.

    With c_j = p of the j codes nearest to the token, J is the largest j <= count with c_j <= budget; 0 where the budget
    is 0. p [..., V+] (fp32), token [...] (int64), budget [...] (fp32); table [V, count or more] (int32): for every code
    the others, nearest first. Tokens >= V have no neighbours.
    """
    near = table[token.clamp(max=len(table) - 1), :count].long()
    cumulative = p.gather(-1, near).cumsum(-1)
    budget = budget * (token < len(table))
    within = (cumulative <= budget.unsqueeze(-1)) & (budget > 0).unsqueeze(-1)
    return torch.where(within, cumulative, 0).amax(-1), within.sum(-1)
