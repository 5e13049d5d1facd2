"""Matrices that ComfyUI's tools store as numbers times scales.

A layer is marked by a tensor ``<layer>.comfy_quant`` (JSON as bytes) or in the file's metadata
(``_quantization_metadata``: ``{"layers": {"<layer>": {"format": ...}}}``). Formats of QUANT_ALGOS in ComfyUI's
comfy/quant_ops.py, with the names of tensors of comfy/ops.py (0.33.0); what they mean is documented by the layouts of
Comfy-Org/comfy-kitchen, in comfy_kitchen/tensor and comfy_kitchen/backends/eager. Each has its ``weight``:

* float8_e4m3fn: numbers in that dtype, ``weight_scale`` for all or for every row;
* int8_tensorwise: int8, ``weight_scale`` for all or for every row; with "convrot", the rows are rotated (see convrot);
* mxfp8: float8_e4m3fn; ``weight_scale`` as powers of two (e8m0) for every 32 along a row, in cuBLAS's order of tiles;
* nvfp4: two e2m1 numbers per byte, the first in the upper half; ``weight_scale`` in e4m3 for every 16 along a row, in
  cuBLAS's order of tiles; ``weight_scale_2`` for all.

convrot_w4a4 and asym_w4a8_int8 are refused: no model of these families was published in them.

Rows and columns of mxfp8 and nvfp4 are padded with zeros to multiples of 32 and 16. How many there are is known from
the bias, or from the model (see quantised.first).

float8_e4m3fn and int8_tensorwise without rotation can be kept as they are. ``input_scale`` is for products of rounded
activations, which are not computed here, and is left out.

Files of before that have a tensor ``scaled_fp8`` and, for every layer in float8_e4m3fn, ``scale_weight`` and
``scale_input`` (convert_old_quants in comfy/utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ...limits.limits import TENSORS, FileError, legal_name
from ...models.networks.quantised import to_bits
from .convrot import rotate_groups, rotation_of
from .quantised import RELEASED, Format, LazyMatrix, description, first, look_up, mismatch, part_of

MARK = ".comfy_quant"
METADATA = "_quantization_metadata"
_OLD = "scaled_fp8"
_BLOCK = {"nvfp4": 16, "mxfp8": 32}  # numbers that share a scale, of which rows and columns are multiples
_TILE = 128, 4  # rows and columns of scales in a tile of cuBLAS
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8_tensorwise": torch.int8,
    "mxfp8": torch.float8_e4m3fn,
    "nvfp4": torch.uint8,
}
_PARTS = ("comfy_quant", "weight_scale", "weight_scale_2", "input_scale")


def marks(metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The layers that a file's metadata mark, as the tensors that mark them in other files."""
    if METADATA not in metadata:
        return {}
    layers = description(metadata[METADATA], METADATA).get("layers")
    if not isinstance(layers, dict) or len(layers) > TENSORS:
        raise FileError(
            f"it has invalid metadata {METADATA}: it names no layers, or over {TENSORS}. Download it again."
        )
    written = {layer: json.dumps(about).encode() for layer, about in layers.items()}
    return {
        f"{legal_name(layer)}{MARK}": torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        for layer, mark in written.items()
    }


def with_scales(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a file, in which weight, scales and mark of every marked layer are one LazyMatrix.

    Raises FileError for other formats, and for weights and scales that are missing or of another kind.
    """
    tensors = _marked(tensors)
    found = dict(tensors)
    for mark in [name for name in tensors if name.endswith(MARK)]:
        layer = mark.removesuffix(MARK)
        matrix = _matrix(layer, tensors)
        for part in _PARTS:
            found.pop(f"{layer}.{part}", None)
        found[f"{layer}.weight"] = matrix
    return found


def _marked(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of a file that marks its layers in the old way, as it would be in the new one. Others unchanged."""
    split = [(name, *name.rpartition(".")[::2]) for name in tensors]
    if not any(part == _OLD for _, _, part in split):
        return tensors
    found, mark = {}, json.dumps({"format": "float8_e4m3fn"}).encode()
    for name, layer, part in split:
        if part == "scale_weight":
            found[f"{layer}.weight_scale"] = tensors[name]
            found[f"{layer}{MARK}"] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        elif part not in (_OLD, "scale_input"):
            found[name] = tensors[name]
    return found


def scale_matrix(numbers: Tensor, scale: Tensor) -> LazyMatrix:
    """Numbers [N, K] (int8 or fp8) times a scale for all, or for every row. Both stay what they are if kept."""
    by_row = scale.float().reshape(-1, 1).expand(len(numbers), 1)
    kind = Format(numbers.shape[1], _times, storage=numbers.dtype, kept=lambda rows, each: (to_bits(rows), each[:, 0]))
    return LazyMatrix((numbers, by_row), kind)


def _matrix(layer: str, tensors: Mapping[str, Tensor]) -> LazyMatrix:
    numbers, about = part_of(layer, "weight", tensors), description(tensors[f"{layer}{MARK}"], layer + MARK)
    options = (about["params"] if isinstance(about.get("params"), dict) else {}) | about
    kind = about.get("format")
    if kind not in _DTYPES or f"{layer}.pre_quant_scale" in tensors:
        scaled_before = " with scaled inputs (pre_quant_scale)" if kind in _DTYPES else ""
        raise FileError(
            f"{layer} is quantised in the format {kind!r:.50}{scaled_before}, which is not supported. "
            f"{RELEASED}, or one of the formats {', '.join(_DTYPES)}."
        )
    if numbers.ndim != 2 or not numbers.numel() or numbers.dtype != _DTYPES[kind]:
        raise mismatch(layer, "weight", numbers)
    scale = part_of(layer, "weight_scale", tensors)
    if kind in _BLOCK:
        columns = numbers.shape[1] * (2 if kind == "nvfp4" else 1)
        block, rows = _BLOCK[kind], tensors.get(f"{layer}.bias", numbers[:, 0]).numel()
        blocks = _tiled(layer, scale, len(numbers), columns, block)
        if kind == "mxfp8":
            powers = (blocks.int() << 23).view(torch.float32)
            return first(LazyMatrix((numbers, powers), Format(columns, _in_blocks, padded=block)), rows, columns)
        whole = part_of(layer, "weight_scale_2", tensors)
        if whole.numel() != 1 or not whole.is_floating_point():
            raise mismatch(layer, "weight_scale_2", whole)
        scales = blocks.view(torch.float8_e4m3fn).float() * whole.float().reshape(())
        return first(LazyMatrix((numbers, scales), Format(columns, _e2m1, padded=block)), rows, columns)
    if not scale.is_floating_point() or scale.numel() not in (1, len(numbers)):
        raise mismatch(layer, "weight_scale", scale)
    plain = scale_matrix(numbers, scale)
    if kind == "int8_tensorwise" and options.get("convrot"):
        columns = numbers.shape[1]
        return LazyMatrix(
            plain.parts, Format(columns, partial(_turned, group=rotation_of(layer + MARK, options, columns)))
        )
    return plain


def _times(numbers: Tensor, scale: Tensor) -> Tensor:
    return numbers.float() * scale


def _turned(numbers: Tensor, scale: Tensor, group: int) -> Tensor:
    return rotate_groups(numbers.float() * scale, group)


def _e2m1(numbers: Tensor, scale: Tensor) -> Tensor:
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=numbers.device)
    return _in_blocks(look_up(values, numbers), scale)


def _in_blocks(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


def _tiled(layer: str, blocks: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """Scales of ``block`` numbers each, as bytes [N, K / block], from those in tiles.

    A tile of 128 x 4 is stored as [32, 4, 4]: row r of it at [r % 32, r // 32].
    """
    down, across = -(-rows // _TILE[0]), -(-columns // (block * _TILE[1]))
    if blocks.element_size() != 1 or blocks.numel() != down * across * _TILE[0] * _TILE[1] or columns % block:
        raise mismatch(layer, "weight_scale", blocks)
    tiles = "(down across row group column) -> (down group row) (across column)"
    plain = rearrange(blocks.view(torch.uint8).flatten(), tiles, across=across, row=32, group=4, column=4)
    return plain[:rows, : columns // block].contiguous()
