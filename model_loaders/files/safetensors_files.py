"""Reading .safetensors files without a memory map: names and shapes only, or all data.

A file is eight bytes (the length of the header), the header in JSON (dtype, shape and offsets of every tensor) and the
data. Invalid headers are rejected before memory is allocated for the data, here and before the
format's own library maps a file (see ``check``).
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ...limits.limits import (
    HEADER,
    LARGEST,
    QUANTISED,
    TENSORS,
    FileError,
    bounded_int,
    legal_name,
    legal_sizes,
    parse_json,
)

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
if hasattr(torch, "float8_e8m0fnu"):  # since PyTorch 2.7: scales of quantised files
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file and its number of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int


def outline(path: Path, descriptions: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file on the meta device (their shapes and dtypes), and its metadata. Those whose names end in
    one of ``descriptions``, of QUANTISED bytes at most, are read. Raises as ``read`` does."""
    tensors = {}
    with path.open("rb") as file:
        entries, metadata = _header(file, path.stat().st_size)
        place = file.tell()
        for entry in entries:
            if descriptions and entry.name.endswith(descriptions) and entry.size <= QUANTISED:
                file.seek(place)
                tensors[entry.name] = _content(file, entry)
            else:
                tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            place += entry.size
    return tensors, metadata


def check(path: Path) -> None:
    """Raise as ``read`` does, without reading the data."""
    with path.open("rb") as file:
        _header(file, path.stat().st_size)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, read into memory, and its metadata.

    Raises ValueError for an invalid file, OSError for one that cannot be read, RuntimeError if memory
    is short.
    """
    tensors = {}
    with path.open("rb") as file:
        entries, metadata = _header(file, path.stat().st_size)
        for entry in entries:
            tensors[entry.name] = _content(file, entry)
    return tensors, metadata


def _content(file: BufferedReader, entry: _Entry) -> Tensor:
    """The next tensor of a file. Raises FileError if it ends before."""
    content = torch.empty(entry.size, dtype=torch.uint8)
    if file.readinto(content.numpy()) != entry.size:
        raise FileError(f"it ends within {entry.name}")
    return content.view(entry.dtype).view(entry.shape)


def _header(file: BinaryIO, size: int) -> tuple[list[_Entry], dict[str, str]]:
    """The tensors in the order of their data, which must fill a file of ``size`` bytes without gaps, and the metadata.
    Afterwards, the file position is at the start of the data."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, HEADER):
        raise FileError(f"its header has an invalid length of {length} bytes")
    header = parse_json(file.read(length))
    if not isinstance(header, dict) or len(header) > TENSORS:
        raise FileError(f"its header is not a JSON object of at most {TENSORS} tensors")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError("its metadata is not a JSON object of strings")
    placed = sorted((_entry(name, value) for name, value in header.items()), key=lambda found: found[0])
    end = 0
    for (begin, _), entry in placed:
        if begin != end:
            raise FileError(f"{entry.name} begins at byte {begin} instead of {end}")
        end += entry.size
    if end != size - 8 - length:
        raise FileError(f"its tensors have {end} bytes, but {size - 8 - length} follow the header")
    return [entry for _, entry in placed], metadata


def _entry(name: str, value: Any) -> tuple[tuple[int, int], _Entry]:
    """((begin, end) in bytes, entry) of a tensor in the header. Raises ValueError for an invalid one."""
    legal_name(name)
    dtype, shape, place = (
        value.get(key) if isinstance(value, dict) else None for key in ("dtype", "shape", "data_offsets")
    )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FileError(f"{name} has the dtype {dtype!r:.50}")
    if not isinstance(place, list) or len(place) != 2:
        raise FileError(f"{name} is at the place {place!r:.50}")
    shape = legal_sizes(name, shape)
    place = [bounded_int(f"the place of {name}", number, 0, LARGEST) for number in place]
    size = prod(shape) * _DTYPES[dtype].itemsize
    if place[1] - place[0] != size:
        raise FileError(f"{name} has {place[1] - place[0]} bytes instead of {size}")
    return (place[0], place[1]), _Entry(name, _DTYPES[dtype], shape, size)
