"""Matrices that ComfyUI's tools store as numbers times scales.

A layer is marked by a tensor ``<layer>.comfy_quant`` (JSON as bytes) or in the file's metadata
(``_quantization_metadata``: ``{"layers": {"<layer>": {"format": ...}}}``). Three formats of comfy/quant_ops.py are
read, each with its ``weight``:

* float8_e4m3fn: numbers in that dtype, ``weight_scale`` for all or for every row;
* int8_tensorwise: int8, ``weight_scale`` for all or for every row;
* nvfp4: two e2m1 numbers per byte, the first in the upper half; ``weight_scale`` in e4m3 for every 16 along a row, in
  cuBLAS's order of tiles; ``weight_scale_2`` for all.

``input_scale`` is for products of rounded activations, which are not computed here, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...common.limits import QUANTISED, FileError, legal_name, parse_json
from .errors import CheckpointError

MARK = ".comfy_quant"
METADATA = "_quantization_metadata"
_BLOCK = 16  # numbers of nvfp4 that share a scale
_TILE = 128, 4  # rows and columns of scales in a tile of cuBLAS
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SPLITS = torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default
_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8_tensorwise": torch.int8, "nvfp4": torch.uint8}


class ScaledMatrix(Tensor):
    """A matrix [N, K] of a quantised file. It acts as the fp32 tensor that it stands for, which is computed for every
    operation again, but parts of its rows are matrices of its kind.

    numbers: fp8 or int8 [N, K], or uint8 [N, K / 2]: pairs in e2m1. scale (fp32): [N, 1], or [N, K / 16] of e2m1.
    """

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> ScaledMatrix:
        rows, columns = numbers.shape
        shape = rows, columns * (2 if numbers.dtype == torch.uint8 else 1)
        matrix = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=numbers.device)
        matrix.numbers, matrix.scale = numbers, scale
        return matrix

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        matrix, *rest = args
        if operation == torch.ops.aten.slice.Tensor and rest[0] == 0:
            return cls(*(operation(part, *rest) for part in (matrix.numbers, matrix.scale)))
        if operation in _SPLITS and rest[1:] in ([], [0]):
            parts = (part.split(rest[0]) for part in (matrix.numbers, matrix.scale))
            return [cls(*both) for both in zip(*parts, strict=True)]
        given, named = tree_map(lambda each: each.widened() if isinstance(each, cls) else each, (args, kwargs or {}))
        return operation(*given, **named)

    def to(self, *given: Any, **named: Any) -> Tensor:
        return self.widened().to(*given, **named)  # torch returns a tensor itself if it already has the dtype

    def float(self) -> Tensor:
        return self.widened()

    def widened(self) -> Tensor:
        """The matrix in fp32."""
        if self.numbers.dtype != torch.uint8:
            return self.numbers.float() * self.scale
        values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=self.device)
        pairs = torch.stack((self.numbers >> 4, self.numbers & 15), dim=-1).flatten(1)
        return (values[pairs.int()].unflatten(1, (-1, _BLOCK)) * self.scale[..., None]).flatten(1)


def marks(metadata: Mapping[str, str], path: Path) -> dict[str, Tensor]:
    """The layers that a file's metadata mark, as the tensors that mark them in other files."""
    if METADATA not in metadata:
        return {}
    layers = _object(metadata[METADATA], METADATA, path).get("layers")
    if not isinstance(layers, dict):
        raise CheckpointError(f"{path.name} has invalid metadata {METADATA}: it names no layers. Download it again.")
    written = {layer: json.dumps(about).encode() for layer, about in layers.items()}
    return {
        f"{legal_name(layer)}{MARK}": torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        for layer, mark in written.items()
    }


def with_scales(tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The tensors of a file, in which the weight, scales and mark of every marked layer are one ScaledMatrix.

    Raises CheckpointError for other formats, and for weights and scales that are missing or of another kind.
    """
    found = dict(tensors)
    for mark in [name for name in tensors if name.endswith(MARK)]:
        layer = mark.removesuffix(MARK)
        scaled = _scaled(layer, tensors, path)
        for part in ("comfy_quant", "weight_scale", "weight_scale_2", "input_scale"):
            found.pop(f"{layer}.{part}", None)
        found[f"{layer}.weight"] = scaled
    return found


def _scaled(layer: str, tensors: Mapping[str, Tensor], path: Path) -> ScaledMatrix:
    numbers, scale = (_part(layer, part, tensors, path) for part in ("weight", "weight_scale"))
    kind = next((kind for kind, dtype in _DTYPES.items() if dtype == numbers.dtype), str(numbers.dtype))
    mark = tensors[f"{layer}{MARK}"]
    if not mark.is_meta:  # of a file of which only names and shapes are read
        about = _object(mark, f"{layer}{MARK}", path)
        options = about | (about["params"] if isinstance(about.get("params"), dict) else {})
        kind = about.get("format")
        if kind not in _DTYPES or options.get("convrot") or f"{layer}.pre_quant_scale" in tensors:
            rotated = " with rotated weights" if options.get("convrot") else ""
            raise CheckpointError(
                f"{path.name}: {layer} is quantised in the format {kind!r:.50}{rotated}, which is not supported. Use "
                f"the weights as they were released, or one of the formats {', '.join(_DTYPES)}."
            )
    if numbers.ndim != 2 or not numbers.numel() or numbers.dtype != _DTYPES.get(kind):
        raise _mismatch(layer, "weight", numbers, path)
    if kind == "nvfp4":
        return ScaledMatrix(numbers, _block_scales(layer, numbers, scale, tensors, path))
    if not scale.is_floating_point() or scale.numel() not in (1, len(numbers)):
        raise _mismatch(layer, "weight_scale", scale, path)
    return ScaledMatrix(numbers, scale.float().reshape(-1, 1).expand(len(numbers), 1))


def _block_scales(layer: str, numbers: Tensor, blocks: Tensor, tensors: Mapping[str, Tensor], path: Path) -> Tensor:
    """Scales [N, K / 16] of nvfp4 from those in tiles.

    A tile of 128 x 4 is stored as [32, 4, 4]: row r of it at [r % 32, r // 32].
    """
    rows, columns = len(numbers), numbers.shape[1] * 2 // _BLOCK
    down, across = (-(-size // tile) for size, tile in zip((rows, columns), _TILE, strict=True))
    if blocks.element_size() != 1 or blocks.numel() != down * across * _TILE[0] * _TILE[1] or numbers.shape[1] % 8:
        raise _mismatch(layer, "weight_scale", blocks, path)
    whole = _part(layer, "weight_scale_2", tensors, path)
    if whole.numel() != 1 or not whole.is_floating_point():
        raise _mismatch(layer, "weight_scale_2", whole, path)
    tiles = blocks.view(torch.float8_e4m3fn).float().reshape(down, across, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(down * _TILE[0], across * _TILE[1])
    return plain[:rows, :columns] * whole.float().reshape(())


def _part(layer: str, part: str, tensors: Mapping[str, Tensor], path: Path) -> Tensor:
    if f"{layer}.{part}" not in tensors:
        raise CheckpointError(f"{path.name} marks {layer} as quantised, but lacks {layer}.{part}. Download it again.")
    return tensors[f"{layer}.{part}"]


def _mismatch(layer: str, part: str, tensor: Tensor, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: {layer}.{part} has the shape {[*tensor.shape]} and dtype {tensor.dtype}, which its quantisation "
        "format does not allow. Download it again."
    )


def _object(content: str | Tensor, name: str, path: Path) -> dict[str, Any]:
    """The JSON object in a string, or in the bytes of a tensor. Raises CheckpointError if there is none."""
    try:
        if isinstance(content, str):
            text: str | bytes = content
        elif content.dtype == torch.uint8 and content.numel() <= QUANTISED:
            text = bytes(content.flatten().tolist())
        else:
            raise FileError("it is no short string of bytes")
        found = parse_json(text)
        if not isinstance(found, dict):
            raise FileError("it is no object")
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {name} cannot be read: {error}. Download it again.") from error
    return found
