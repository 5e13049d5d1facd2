"""Matrices of bitsandbytes: NF4 and FP4 in 4 bits, and LLM.int8().

Documented by bitsandbytes-foundation/bitsandbytes: the tensors in bitsandbytes/functional.py (QuantState.as_dict), what
they mean in bitsandbytes/backends/default/ops.py (dequantize_4bit, dequantize_blockwise), and for int8 in
bitsandbytes/nn/modules.py (Linear8bitLt). A matrix [N, K] ``<name>`` (``<layer>.weight``) in 4 bits has

* ``<name>``: two codes per byte in the order of the matrix, the first in the upper half; uint8 or, with the same bytes,
  a floating dtype;
* ``<name>.quant_map`` [16]: the numbers that the codes stand for;
* ``<name>.absmax``: a scale for each ``blocksize`` numbers in the order of the matrix; fp32, or (nested) a byte that
  stands for a number of ``<name>.nested_quant_map`` [256], times ``<name>.nested_absmax`` of its
  ``nested_blocksize`` scales, plus ``nested_offset``;
* ``<name>.quant_state.bitsandbytes__nf4`` (or fp4): shape, sizes of blocks and offset, JSON as bytes.

One in 8 bits has its numbers in int8, ``<layer>.SCB`` [N] (127 times the scale of every row) and
``<layer>.weight_format`` (0: in the order of the matrix). It can be kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...limits.limits import FileError, bounded_int, legal_sizes, quote
from .quantised import DESCRIPTIONS, RELEASED, Format, LazyMatrix, description, look_up, mismatch, part_of
from .scaled import scale_matrix

_STATES = DESCRIPTIONS[1:]
_SCALES = ".SCB"
_NEEDED = {
    ".weight_format": _SCALES[1:],
    ".absmax": "quant_state",
}  # part of a matrix -> that without which it means nothing
_LARGEST_BLOCK = 4096


def with_bitsandbytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, in which those of every matrix of bitsandbytes are one LazyMatrix.

    Raises FileError for tensors that are missing or of another kind, and for other orders of int8.
    """
    found = dict(tensors)
    for name in tensors:
        if state := next((each for each in _STATES if name.endswith(each)), None):
            matrix = name.removesuffix(state)
            found[matrix] = _four_bits(matrix, state, tensors)
            for part in (
                state,
                *(f".{nested}{part}" for nested in ("", "nested_") for part in ("absmax", "quant_map")),
            ):
                found.pop(f"{matrix}{part}", None)
        elif name.endswith(_SCALES):
            layer = name.removesuffix(_SCALES)
            found[f"{layer}.weight"] = _eight_bits(layer, tensors)
            for part in ("SCB", "weight_format"):
                found.pop(f"{layer}.{part}", None)
    for part, needed in _NEEDED.items():
        if alone := next((name for name in found if name.endswith(part)), None):
            raise FileError(
                f"it was quantised by bitsandbytes, but {alone.removesuffix(part)} lacks its {needed}, which "
                f"old versions and some programs do not save. {RELEASED}, or save it with bitsandbytes 0.45 or newer."
            )
    return found


def _four_bits(name: str, state: str, tensors: Mapping[str, Tensor]) -> LazyMatrix:
    layer, _, part = name.rpartition(".")
    packed, about = part_of(layer, part, tensors), description(tensors[name + state], name + state)
    absmax, table = (part_of(name, each, tensors) for each in ("absmax", "quant_map"))
    nested = f"{name}.nested_absmax" in tensors
    try:
        shape = legal_sizes(name, about.get("shape"))
        if len(shape) != 2:
            raise FileError(f"{name} has {len(shape)} dimensions, not two")
        block = bounded_int("blocksize", about.get("blocksize"), 1, _LARGEST_BLOCK)
        step = bounded_int("nested_blocksize", about.get("nested_blocksize"), 1, _LARGEST_BLOCK) if nested else 1
        offset = about.get("nested_offset") if nested else 0.0
        if type(offset) is not float or not abs(offset) < torch.finfo(torch.float32).max:
            raise FileError(f"nested_offset is {quote(offset)}, not a finite number")
    except FileError as error:
        raise FileError(f"{name}{state} cannot be read: {error}. Download it again.") from error
    rows, columns = shape
    numbers = rows * columns
    if not numbers or packed.numel() * packed.element_size() != -(-numbers // 2):
        raise mismatch(layer, part, packed)
    blocks = -(-numbers // block)
    if absmax.numel() != blocks or absmax.dtype != (torch.uint8 if nested else torch.float32):
        raise mismatch(name, "absmax", absmax)
    if table.numel() != 16 or not table.is_floating_point():
        raise mismatch(name, "quant_map", table)
    outer, levels = None, None
    if nested:
        outer, levels = (part_of(name, each, tensors) for each in ("nested_absmax", "nested_quant_map"))
        if outer.numel() != -(-blocks // step) or not outer.is_floating_point():
            raise mismatch(name, "nested_absmax", outer)
        if levels.numel() != 256 or not levels.is_floating_point():
            raise mismatch(name, "nested_quant_map", levels)
    by_row = columns % block == 0 and columns % 2 == 0
    parts = packed.flatten().view(torch.uint8), absmax.flatten()
    parts = tuple(each.view(rows if by_row else 1, -1) for each in parts)
    about_all = {"table": table, "block": block, "outer": outer, "levels": levels, "step": step, "offset": offset}
    widen = partial(_widened, **about_all, shape=None if by_row else shape)
    row = torch.arange(len(parts[0]), device=packed.device)
    return LazyMatrix((*parts, row), Format(columns, widen, by_row), rows)


def _widened(
    packed: Tensor,
    absmax: Tensor,
    row: Tensor,
    *,
    table: Tensor,
    block: int,
    outer: Tensor | None,
    levels: Tensor | None,
    step: int,
    offset: float,
    shape: tuple[int, ...] | None,
) -> Tensor:
    """The matrix, fp32. packed: uint8 [n, bytes]; absmax [n, blocks]; row [n]: their places in the matrix. shape: of
    the matrix, if they are all of it as one row (n = 1): then blocks go over the ends of its rows."""
    if outer is not None and levels is not None:
        blocks = absmax.shape[1]
        place = (row[:, None] * blocks + torch.arange(blocks, device=row.device)) // step
        absmax = levels.float().flatten()[absmax.int()] * outer.float().flatten()[place] + offset
    values = look_up(table, packed)
    values = F.pad(values, (0, absmax.shape[1] * block - values.shape[1]))
    values = (values.unflatten(1, (-1, block)) * absmax[..., None]).flatten(1)
    return values if shape is None else values[0, : shape[0] * shape[1]].view(shape)


def _eight_bits(layer: str, tensors: Mapping[str, Tensor]) -> LazyMatrix:
    numbers, scales = (part_of(layer, part, tensors) for part in ("weight", "SCB"))
    order = tensors.get(f"{layer}.weight_format")
    if order is not None and not order.is_meta and order.flatten().tolist() != [0]:
        raise FileError(
            f"{layer}.weight is stored by bitsandbytes in the order of certain GPUs, which is not "
            f"supported. {RELEASED}, or save it with bitsandbytes 0.45 or newer."
        )
    if numbers.ndim != 2 or not numbers.numel() or numbers.dtype != torch.int8:
        raise mismatch(layer, "weight", numbers)
    if scales.numel() != len(numbers) or not scales.is_floating_point():
        raise mismatch(layer, "SCB", scales)
    return scale_matrix(numbers, scales.float() / 127)
