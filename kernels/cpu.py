"""Linear layers on a CPU: oneDNN's product with a packed weight, in blocks of rows (see batch_invariant.py).

oneDNN reads a weight fastest in an order of its own. torch's product brings it into that order in every call, which
takes longer than multiplying the few rows of a pass. Here it is done once, and the packed weight takes the place of the
layer's: memory holds it once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn

from .batch_invariant import BLOCKS, invariant_rows, split

ROWS = 32  # that oneDNN chooses the order for; others are multiplied about as fast

log = logging.getLogger(__name__)

_blocks: dict[Hashable, int] = {}  # rows per block, by kind of product
_refused: set[Hashable] = set()  # shapes of which oneDNN has no packed product


def linear(layer: nn.Module, x: Tensor, own_weights: bool = False) -> Tensor:
    """layer(x) for x [..., inputs], by a packed weight where oneDNN has such a product.

    A row's result does not depend on the others, except in fp32 where it has none. own_weights: the layer is an
    nn.Linear whose parameters may be used instead of calling it, and packed.
    """
    if torch.compiler.is_compiling():
        return layer(x)
    if torch.is_grad_enabled():
        unpack(layer)
        return layer(x)
    outputs = len(layer.weight) if hasattr(layer, "weight") else type(layer)  # a model has one layer of such a class
    shape = x.dtype, x.shape[-1], outputs, getattr(layer, "bias", None) is None, torch.get_num_threads()
    if own_weights and packable(layer) and shape not in _refused:
        try:
            pack(layer)
            return in_blocks(partial(onednn, layer), x, ("packed", *shape))
        except (RuntimeError, AttributeError, TypeError) as error:  # torch promises neither operators nor arguments
            log.info("Products of %s are torch's own, as oneDNN has none with a packed weight: %s", shape, error)
            _refused.add(shape)
    unpack(layer)
    return layer(x) if x.dtype == torch.float32 else in_blocks(layer, x, shape)


def in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, kind: Hashable) -> Tensor:
    """A product of x [..., inputs] in blocks of rows. kind: products of one have blocks of one size, which is found by
    trying."""
    if kind not in _blocks:
        rows = torch.randn(BLOCKS[0], x.shape[-1], generator=torch.Generator().manual_seed(0))
        _blocks[kind] = invariant_rows(product, rows.to(x.dtype))
    found = split(product, x.reshape(-1, x.shape[-1]), _blocks[kind])
    return found.reshape(*x.shape[:-1], found.shape[-1])


def onednn(layer: nn.Linear, rows: Tensor) -> Tensor:
    """layer(rows) for rows [M, inputs] and a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(rows, layer.weight, layer.bias, "none", [], "")


def packable(layer: nn.Linear) -> bool:
    """May the weight of a layer be replaced? An optimiser may hold one that is trained."""
    return not layer.weight.requires_grad


def pack(layer: nn.Linear) -> None:
    """Pack the weight of a layer, unless it is. Every use of it but ``onednn`` raises an error from then on."""
    if not layer.weight.is_mkldnn:
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        layer.weight = nn.Parameter(packed, requires_grad=False)


def unpack(module: nn.Module) -> None:
    """Give the layers of a module their own weights again."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.is_mkldnn:
            with torch.inference_mode(False), torch.no_grad():
                layer.weight = nn.Parameter(layer.weight.to_dense(), requires_grad=False)
