"""Reading the tensors of a TorchScript archive (.jit) without running it.

The archive is a zip file: ``data.pkl`` is a pickle of the module tree, ``data/<key>`` are the storages, ``code/`` is
the program, which is never opened. The unpickler allows modules, tensors and containers of plain values, and rejects
everything else.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import MODULES, TENSORS, FileError, legal_name
from .archives import members_of, pickle_in, stored
from .unpickler import Call, TensorUnpickler, file_errors

_LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name, as the state_dict of the loaded module would list them.

    Raises FileError for a file that is damaged, or whose pickle contains anything but modules and tensors.
    """
    with file_errors():
        members = members_of(path)
        with zipfile.ZipFile(path) as archive:
            tree = _TorchScriptUnpickler(archive, members, path.stat().st_size).load()
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


class _TorchScriptUnpickler(TensorUnpickler):
    """Reads ``data.pkl`` of an archive. All data that it takes is copied into memory, and its checksum compared."""

    own = (_Module,)

    def __init__(self, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], size: int):
        super().__init__(pickle_in(archive, members), size)
        self.archive, self.members = archive, members

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if module == "torch.jit._pickle" and name in _LISTS:
            return Call(lambda value, *_types: value)  # the value of a typed list
        if (module, name) == ("collections", "OrderedDict"):
            return Call(lambda *_hooks: {})  # a tensor's hooks, which are dropped
        return super().find_class(module, name)

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        content = self.archive.read(stored(self.members, f"data/{key}"))
        if len(content) != count * dtype.itemsize:
            raise FileError(f"its data/{key} has {len(content)} bytes, not {count} elements of {dtype}")
        return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
