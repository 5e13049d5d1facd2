"""Linear layers on a CPU: in blocks of rows in 16-bit floats, by the fastest routine in fp32."""

from __future__ import annotations

from torch import Tensor, nn

from . import batch_invariant, fp32


def linear(layer: nn.Module, x: Tensor, own_weights: bool = False) -> Tensor:
    """layer(x) for x [..., inputs].

    own_weights: the layer is an nn.Linear whose parameters may be used instead of calling it.
    """
    if own_weights and fp32.applies(layer, x):
        return fp32.linear(layer, x)
    return batch_invariant.linear(layer, x, own_weights)
