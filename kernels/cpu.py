"""Linear layers on a CPU: in blocks of rows in 16-bit floats, by the fastest routine in fp32."""

from __future__ import annotations

from torch import Tensor, nn

from . import fp32, steady


def linear(layer: nn.Module, x: Tensor, at_hand: bool = False) -> Tensor:
    """layer(x) for x [..., inputs].

    at_hand: the layer is an nn.Linear whose parameters may be used instead of calling it.
    """
    if at_hand and fp32.applies(layer, x):
        return fp32.linear(layer, x)
    return steady.linear(layer, x, at_hand)
