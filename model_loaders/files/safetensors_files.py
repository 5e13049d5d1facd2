"""Reading .safetensors files without a memory map, which not all drives support: names and shapes only, or all data.

A file is eight bytes (the length of the header), the header in JSON (dtype, shape and offsets of every tensor) and the
data. Where it is mapped, the format's own library reads it, after ``header_of``.
"""

from __future__ import annotations

from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import HEADER, QUANTISED, TENSORS, FileError, legal_name, legal_sizes, parse_json

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


def header_of(file: BufferedReader, size: int) -> bytes:
    """The header of a file of ``size`` bytes, whose position is then at the data. Raises FileError for one of more than
    HEADER bytes or TENSORS tensors."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, HEADER):
        raise FileError(f"its header has an invalid length of {length} bytes")
    header = file.read(length)
    if (count := header.count(b'"data_offsets"')) > TENSORS:
        raise FileError(f"its header lists {count} tensors; {TENSORS} is the limit")
    return header


def read(path: Path, descriptions: tuple[str, ...] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, read into memory, and its metadata. descriptions: of the tensors, only those whose names
    end so, of QUANTISED bytes at most, are read; the others are on the meta device.

    Raises FileError for an invalid file, OSError for one that cannot be read, RuntimeError if memory is short.
    """
    tensors, end, size = {}, 0, path.stat().st_size
    with path.open("rb") as file:
        header = parse_json(header_of(file, size))
        data = file.tell()
        if not isinstance(header, dict):
            raise FileError("its header is not a JSON object")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise FileError("its metadata is not a JSON object of strings")
        entries = [(*_entry(name, entry), name) for name, entry in header.items()]
        for place, dtype, shape, name in sorted(entries, key=lambda entry: entry[0]):
            count = prod(shape) * dtype.itemsize
            if place != [end, end + count] or data + end + count > size:
                raise FileError(f"{name} has {count} bytes from byte {end} on, not those of its place {place!r:.50}")
            if descriptions is None or (name.endswith(descriptions) and count <= QUANTISED):
                file.seek(data + end)
                content = torch.empty(count, dtype=torch.uint8)
                if file.readinto(content.numpy()) != count:
                    raise FileError(f"it ends within {name}")
                tensors[name] = content.view(dtype).view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
            end += count
    if data + end != size:
        raise FileError(f"its tensors have {end} bytes, but {size - data} follow the header")
    return tensors, metadata


def _entry(name: str, entry: Any) -> tuple[list[int], torch.dtype, tuple[int, ...]]:
    """Place in the data, dtype and shape of a tensor. Raises FileError for what no tensor has."""
    legal_name(name)
    place, dtype, shape = (
        entry.get(key) if isinstance(entry, dict) else None for key in ("data_offsets", "dtype", "shape")
    )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FileError(f"{name} has the dtype {dtype!r:.50}")
    if not isinstance(place, list) or [*map(type, place)] != [int, int]:
        raise FileError(f"{name} is at the place {place!r:.50}")
    return place, _DTYPES[dtype], legal_sizes(name, shape)
