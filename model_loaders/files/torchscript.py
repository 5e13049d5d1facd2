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

from ...common.limits import MODULES, TENSORS, FileError, legal_name
from .archives import BoundedUnpickler, Call, check_view, members_of, pickle_in, stored

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name, as the state_dict of the loaded module would list them.

    Raises ValueError for a file that is damaged, or whose pickle contains anything but modules and tensors.
    """
    try:
        members = members_of(path)
        with zipfile.ZipFile(path) as archive:
            tree = _Unpickler(archive, members).load()
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise FileError(str(error)) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(f"its description of the modules cannot be read ({type(error).__name__}: {error})") from error
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


class _Unpickler(BoundedUnpickler):
    """Reads ``data.pkl`` of an archive."""

    own = (_Module,)

    def __init__(self, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]):
        self._archive, self._members = archive, members
        self._storages: dict[str, Tensor] = {}
        if "byteorder" in members and self._read("byteorder") != b"little":
            raise FileError("it has the other byte order")
        super().__init__(pickle_in(archive, stored(members, "data.pkl")))

    def _read(self, name: str) -> bytes:
        return self._archive.read(stored(self._members, name))

    def find_class(self, module: str, name: str) -> Any:
        """The object for a name in the pickle. Raises ValueError for all but the few that weights need."""
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return Call(_rebuild_tensor)
        if module == "torch.jit._pickle" and name in _LISTS:
            return Call(_plain)
        if (module, name) == ("collections", "OrderedDict"):
            return Call(_no_hooks)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor. Raises ValueError if its length is not the stated one."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not (type(key), type(count)) == (str, int):
            raise FileError("it refers to something that is not a storage")
        if key not in self._storages:
            content = self._read(f"data/{legal_name(key)}")
            if len(content) % dtype.itemsize:
                raise FileError(f"its data/{key} has {len(content)} bytes, not a multiple of the size of {dtype}")
            self._storages[key] = (
                torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
        storage = self._storages[key]
        if storage.dtype != dtype or len(storage) != count:
            raise FileError(f"its data/{key} has {len(storage)} elements of {storage.dtype}, not {count} of {dtype}")
        return storage


def _rebuild_tensor(
    storage: Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> Tensor:
    """A view of a storage. Raises ValueError if it exceeds the storage."""
    if not isinstance(storage, Tensor) or metadata:
        raise FileError("one of its tensors is invalid")
    if check_view(len(storage), offset, size, stride) > len(storage):
        raise FileError("one of its tensors is larger than its storage")
    return storage.as_strided(size, stride, offset)


def _plain(value: Any, *types: Any) -> Any:
    """The value of a typed list."""
    return value


def _no_hooks(*content: Any) -> dict:
    """A tensor's hooks, which are dropped."""
    return {}
