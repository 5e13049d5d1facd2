"""Linear layers on a CPU: oneDNN's product with a packed weight, in blocks of rows (see device/batch_invariant.py).

oneDNN reads a weight fastest in an order of its own. torch's product brings it into that order in every call, which
takes longer than multiplying the few rows of a pass. Here it is done once, and the packed weight takes the place of the
layer's: memory holds it once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .batch_invariant import BLOCKS, invariant_rows, split

ROWS = 32  # that oneDNN chooses the order for; others are multiplied about as fast
MANY = 2**15  # outputs; four rows have 131,072 products
NAN = {dtype: torch.tensor(torch.nan, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

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
            return in_blocks(onednn, layer, x, ("packed", *shape))
        except (RuntimeError, AttributeError, TypeError) as error:  # torch promises neither operators nor arguments
            log.info("Products of %s are torch's own, as oneDNN has none with a packed weight: %s", shape, error)
            _refused.add(shape)
    unpack(layer)
    return layer(x) if x.dtype == torch.float32 else in_blocks(call_layer, layer, x, shape)


def in_blocks(product: Callable[[Any, Tensor], Tensor], layer: nn.Module, x: Tensor, kind: Hashable) -> Tensor:
    """product(layer, rows) of x [..., inputs] in blocks of rows. kind: those of one have blocks of one size, which is
    found by trying."""
    if kind not in _blocks:
        other, rows = trial(layer, x.shape[-1], x.dtype)
        if product is onednn:
            pack(other)
        _blocks[kind] = invariant_rows(partial(product, other), rows)
    found = split(partial(product, layer), x.reshape(-1, x.shape[-1]), _blocks[kind])
    return found.reshape(*x.shape[:-1], found.shape[-1])


def trial(layer: nn.Module, inputs: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """A layer of the same shape, and rows [BLOCKS[0], inputs] whose products with it tell the order of their sums.

    The second half of such a row is minus the first, and that of the matrix repeats the first, in an order that both
    share. Of these sums only their rounding is left, while rounding to bf16 hides another order in all but one of some
    30,000 sums. Where a product has enough of them for that, or where a layer is of another class, it is tried itself.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = len(layer.weight) if isinstance(layer, nn.Linear) else MANY
    if outputs >= MANY:
        return layer, torch.randn(BLOCKS[0], inputs, generator=generator).to(dtype)
    order = torch.randperm(inputs, generator=generator)
    half = (inputs + 1) // 2
    rows, matrix = (torch.randn(n, half, generator=generator).to(dtype) for n in (BLOCKS[0], outputs))
    other = nn.Linear(inputs, outputs, layer.bias is not None, device="meta")
    other.weight = nn.Parameter(torch.cat((matrix, matrix), dim=1)[:, order], requires_grad=False)
    if layer.bias is not None:
        other.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False)
    return other, torch.cat((rows, -rows), dim=1)[:, order]


def call_layer(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """layer(rows)."""
    return layer(rows)


def onednn(layer: nn.Linear, rows: Tensor) -> Tensor:
    """layer(rows) for rows [M, inputs] and a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(rows, layer.packed[1], layer.bias, "none", [], "")


def packable(layer: nn.Linear) -> bool:
    """May the weight of a layer be replaced? An optimiser may hold one that is trained."""
    return not layer.weight.requires_grad


def is_packed(layer: nn.Linear) -> bool:
    """Is the weight of a layer packed, and no other one in its place since?"""
    return getattr(layer, "packed", (None,))[0] is layer.weight


def pack(layer: nn.Linear) -> None:
    """Pack the weight of a layer, unless it is.

    A packed weight has no storage, for which programs ask parameters (ComfyUI 0.18 to 0.22 those of every model that it
    loads). So it is none, and the parameter remains, of its shape and dtype: one NaN, which a use of it would show.
    """
    if is_packed(layer):
        return
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        weight = nn.Parameter(NAN[packed.dtype].expand(packed.shape), requires_grad=False)
    layer.packed, layer.weight = (weight, packed), weight


def unpack(module: nn.Module) -> None:
    """Give the layers of a module their own weights again."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and is_packed(layer):
            with torch.inference_mode(False), torch.no_grad():
                layer.weight = nn.Parameter(layer.packed[1].to_dense(), requires_grad=False)
            del layer.packed
