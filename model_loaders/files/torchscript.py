"""Reading the tensors of a TorchScript archive (.jit) without running it.

The archive is a zip file: ``data.pkl`` is a pickle of the module tree, ``data/<key>`` are the storages, ``code/`` is
the program, which is never opened. Modules, tensors and containers of plain values are read, everything else is
refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import LARGEST, MODULES, TENSORS, FileError, bounded_int, legal_name, legal_sizes, quote
from .archives import get_stored, members_of, pickle_in
from .pickles import DTYPES, check_pickle, file_errors

_LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name, as the state_dict of the loaded module would list them.

    Raises FileError for a file that is damaged, or whose pickle contains anything but modules and tensors.
    """
    with file_errors():
        members = members_of(path)
        with zipfile.ZipFile(path) as archive:
            pickled = pickle_in(archive, members)
            _, storages = check_pickle(pickled)
            if sum(storages.values()) > path.stat().st_size:
                raise FileError("its storages are larger than the file")
            pickled.seek(0)
            tree = _Unpickler(pickled, archive, members).load()
    if not isinstance(tree, _Module):
        raise FileError("it contains no module")
    tensors: dict[str, Tensor] = {}
    waiting, seen = [("", 0, tree)], 0
    while waiting:
        prefix, depth, module = waiting.pop()
        seen += 1 + len(module.attributes)
        if seen > TENSORS or depth > MODULES:  # modules may be shared: a small pickle could list any number
            raise FileError("its modules are nested without end")
        for name, value in module.attributes.items():
            if isinstance(value, Tensor):
                tensors[legal_name(f"{prefix}{name}")] = value
            elif isinstance(value, _Module):
                waiting.append((legal_name(f"{prefix}{name}") + ".", depth + 1, value))
    return tensors


class _Module:
    """A module of the archive: its attributes, without its code."""

    __slots__ = ("attributes",)

    attributes: dict[str, Any]

    def __new__(cls) -> _Module:
        module = super().__new__(cls)
        module.attributes = {}
        return module

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise FileError("a module has no table of attributes")
        self.attributes = state


class _Unpickler(pickle.Unpickler):
    """Reads ``data.pkl``, which ``check_pickle`` saw before. Data is copied into memory, and its checksum compared."""

    def __init__(self, pickled: Any, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]):
        super().__init__(pickled, encoding="utf-8")
        self.archive, self.members = archive, members
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.".startswith("__torch__."):
            return _Module
        if module == "torch.jit._pickle" and name in _LISTS:
            return lambda value, *_types: value  # the value of a typed list
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *_hooks: {}  # a tensor's hooks, which are dropped
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if f"{module}.{name}" in DTYPES:
            return DTYPES[f"{module}.{name}"]
        raise FileError(f"it asks for {quote(f'{module}.{name}')}, which weights do not need and which is never run")

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor. Raises FileError if the archive does not hold it."""
        _, dtype, key, _, count = pid
        if key not in self.storages:
            content = self.archive.read(get_stored(self.members, f"data/{key}"))
            if len(content) != count * dtype.itemsize:
                raise FileError(f"its data/{key} has {len(content)} bytes, not {count} elements of {dtype}")
            self.storages[key] = torch.frombuffer(bytearray(content or b"\0" * 16), dtype=dtype)[:count]
        if self.storages[key].dtype != dtype:
            raise FileError(f"its storage {key} has elements of {self.storages[key].dtype}, not of {dtype}")
        return self.storages[key]


def _view(storage: Any, offset: int, sizes: tuple[int, ...], steps: tuple[int, ...], *_others: Any) -> Tensor:
    """A view of a storage. Raises FileError if it exceeds the storage."""
    start = bounded_int("the place of a tensor", offset, 0, LARGEST)
    sizes, steps = legal_sizes("one of its tensors", sizes), legal_sizes("one of its tensors", steps)
    if not isinstance(storage, Tensor) or len(sizes) != len(steps):
        raise FileError("one of its tensors is invalid")
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if start + (1 + last if prod(sizes) else 0) > len(storage):
        raise FileError("one of its tensors is larger than its storage")
    return storage.as_strided(sizes, steps, start if prod(sizes) else 0)
