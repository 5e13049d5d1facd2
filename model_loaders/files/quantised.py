"""Matrices that a file holds in few bits, and what their readers share.

The readers know the layouts: scaled (ComfyUI's own formats), bitsandbytes, gptq (GPTQ and AutoRound). Each replaces the
tensors of a layer by one LazyMatrix. Nothing is widened before it is used, and then some rows at a time.

What rounding a matrix of normally distributed numbers to each format does, to the nearest level: the root mean square
of the error by that of the numbers, measured by tests/unit/test_quantised_files.py (bf16: 0.17 %):

* int8_tensorwise: 1.1 % (a scale for all), 0.8 % (for every row), 0.8 % rotated; with a column of numbers that are 40
  times the others, 5.7 % by row and 0.76 % rotated, which is what ConvRot is for;
* nvfp4: 9.5 %; mxfp8: 2.6 %;
* bitsandbytes: nf4 9.2 %, fp4 12 %, int8 0.8 %;
* GPTQ and AutoRound, groups of 128: 4 bits 11 %, 8 bits 0.65 %.

Reading adds nothing to that (2e-7 where a rotation is undone in fp32), and being kept in 4 bits 0.2 % (0.5 % if
zero points differ), because steps and minima become bf16. What is widened and then rounded to int8 gains the 0.8 % of
that (root of the sum of squares); rounded again to 4 bits, nf4 becomes 13 %, GPTQ 15 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...limits.limits import QUANTISED, FileError, parse_json

DESCRIPTIONS = (".comfy_quant", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")  # JSON as bytes
RELEASED = "Use the weights as they were released"
_AGAIN = f"{RELEASED}, or save it again with the program that quantised it."

_SPLITS = torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default
_TOGETHER = 2**20  # numbers widened at once: it makes several copies


@dataclass(frozen=True)
class Format:
    """What the tensors of a quantised matrix mean.

    columns: K. widen: from the tensors of n rows to these rows, fp32 [n, K]. by_row: the tensors have a row for each of
    the matrix (else they belong to all of it). padded: rows and columns were filled up with zeros to multiples of it
    (see ``first``). storage: a dtype of NARROW in which the matrix may be kept as it is, with ``kept``: from the
    tensors of the matrix to weight and scale of a NarrowLinear (see kernels/linear.py).
    """

    columns: int
    widen: Callable[..., Tensor]
    by_row: bool = True
    padded: int = 1
    storage: torch.dtype | None = None
    kept: Callable[..., tuple[Tensor, Tensor]] | None = None


class LazyMatrix(Tensor):
    """A matrix [N, K] of a quantised file, or one with a LoRA. It acts as the fp32 tensor that it stands for, which is
    computed for every operation again, but parts of its rows are matrices of its kind.

    parts: tensors of the file, of ``format``. rows: N, if it is not the length of each of them.
    """

    parts: tuple[Tensor, ...]
    format: Format

    @staticmethod
    def __new__(cls, parts: tuple[Tensor, ...], format: Format, rows: int | None = None) -> LazyMatrix:
        shape = len(parts[0]) if rows is None else rows, format.columns
        matrix = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=parts[0].device)
        matrix.parts, matrix.format = parts, format
        return matrix

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        matrix, *rest = args
        if isinstance(matrix, cls) and matrix.format.by_row:
            if operation == torch.ops.aten.slice.Tensor and rest[0] == 0:
                return cls(tuple(operation(part, *rest) for part in matrix.parts), matrix.format)
            if operation in _SPLITS and rest[1:] in ([], [0]):
                split = (part.split(rest[0]) for part in matrix.parts)
                return [cls(parts, matrix.format) for parts in zip(*split, strict=True)]
        given, named = tree_map(lambda each: each.widened() if isinstance(each, cls) else each, (args, kwargs or {}))
        return operation(*given, **named)

    def to(self, *given: Any, **named: Any) -> Tensor:
        if len(given) == 1 and isinstance(given[0], torch.dtype) and not named:
            return self.widened(given[0])
        return self.widened().to(*given, **named)  # torch returns a tensor itself if it already has the dtype

    def float(self) -> Tensor:
        return self.widened()

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K], computed in fp32 and rounded to ``dtype``."""
        if not self.format.by_row:
            return self.format.widen(*self.parts).to(dtype)
        found = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, _TOGETHER // self.format.columns)
        for target, *parts in zip(found.split(rows), *(part.split(rows) for part in self.parts), strict=True):
            target.copy_(self.format.widen(*parts))
        return found

    def kept(self) -> tuple[Tensor, Tensor]:
        """Weight and scale of a NarrowLinear in the storage of its format."""
        assert self.format.kept is not None, "only where a format has a storage"
        return self.format.kept(*self.parts)


def first(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of a matrix whose format padded it with others, of zeros. Any other one as it is."""
    if not isinstance(matrix, LazyMatrix):
        return matrix
    more = len(matrix) - rows, matrix.shape[1] - columns
    padded = any(more) and all(0 <= each < matrix.format.padded for each in more)
    rest = ([matrix[rows:]] if more[0] else []) + ([matrix[:, columns:]] if more[1] else []) if padded else []
    if not rest or (not matrix.is_meta and any(part.any() for part in rest)):
        return matrix
    return matrix[:rows, :columns] if more[1] else matrix[:rows]


def look_up(table: Tensor, packed: Tensor) -> Tensor:
    """The numbers (fp32) of a ``table`` [16] that [n, m] bytes stand for, the upper half of each first: [n, 2 m]."""
    every = torch.arange(256, device=packed.device)
    both = table.float().flatten()[torch.stack((every >> 4, every & 15), dim=-1)]  # pairs are read half as often
    return both.index_select(0, packed.reshape(-1).view(torch.uint8).int()).view(len(packed), -1)


def part_of(layer: str, part: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a quantised layer. Raises FileError if it is missing."""
    if f"{layer}.{part}" not in tensors:
        raise FileError(f"{layer} is quantised, but lacks {layer}.{part}. {_AGAIN}")
    return tensors[f"{layer}.{part}"]


def mismatch(layer: str, part: str, tensor: Tensor) -> FileError:
    """The error for a tensor of another shape or dtype than its layer's format has."""
    return FileError(
        f"{layer}.{part} has the shape {[*tensor.shape]} and dtype {tensor.dtype}, which its quantisation "
        f"format does not allow. {_AGAIN}"
    )


def description(content: str | Tensor, name: str) -> dict[str, Any]:
    """The JSON object in a string, or in the bytes of a tensor. Raises FileError if there is none."""
    try:
        if isinstance(content, str):
            text: str | bytes = content
        elif content.dtype != torch.uint8 or content.numel() > QUANTISED:
            raise FileError("it is no short string of bytes")
        elif content.is_meta:
            raise FileError("files of PyTorch's oldest format do not tell it in time. Save it as .safetensors")
        else:
            text = bytes(content.flatten().tolist())
        found = parse_json(text)
        if not isinstance(found, dict):
            raise FileError("it is no object")
    except ValueError as error:
        raise FileError(f"{name} cannot be read: {error}. Download it again.") from error
    return found
