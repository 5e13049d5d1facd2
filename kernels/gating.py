"""The gate of a SwiGLU network (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device.dispatch import Accelerated


@Accelerated
def gated(x: Tensor) -> Tensor:
    """silu(gate) * value for x [..., 2F], the gate first -> [..., F]."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
