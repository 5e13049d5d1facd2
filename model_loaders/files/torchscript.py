"""Reading the tensors of a TorchScript archive (.jit) without running it.

The archive is a zip file: ``data.pkl`` is a pickle of the module tree, ``data/<key>`` are the storages, ``code/`` is
the program, which is never opened. The unpickler allows modules, tensors and containers of plain values, and rejects
everything else.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_LISTS = ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")
_MOST_MODULES, _DEEPEST = 100_000, 100  # modules may be shared, so a small pickle could list any number


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name, as the state_dict of the loaded module would list them.

    Raises ValueError for a file that is damaged, or whose pickle contains anything but modules and tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            tree = _Unpickler(archive).load()
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"its description of the modules cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(tree, _Module):
        raise ValueError("it contains no module")
    tensors: dict[str, Tensor] = {}
    waiting, seen = [("", tree)], 0
    while waiting:
        prefix, module = waiting.pop()
        seen += 1
        if seen > _MOST_MODULES or prefix.count(".") > _DEEPEST:
            raise ValueError("its modules are nested without end")
        for name, value in module.attributes.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{name}"] = value
            elif isinstance(value, _Module):
                waiting.append((f"{prefix}{name}.", value))
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
            raise ValueError("a module has no table of attributes")
        self.attributes = state


class _Call:
    """A function that the pickle may call; unlike a Python function, the pickle cannot set attributes on it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it tries to change what reads it")


class _Unpickler(pickle._Unpickler):
    """Reads ``data.pkl`` of an archive.

    This is the pure Python unpickler: the C one allocates an array of any size for a five-byte memo index. Byte arrays
    are disabled for the same reason; weights do not need them.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        self._members = {name.partition("/")[2]: name for name in archive.namelist()}
        self._storages: dict[str, Tensor] = {}
        if self._read("byteorder", b"little") != b"little":
            raise ValueError("it has the other byte order")
        super().__init__(archive.open(self._info("data.pkl")))

    def _info(self, name: str) -> zipfile.ZipInfo:
        if name not in self._members:
            raise ValueError(f"it has no {name}: it is not a TorchScript archive, or damaged")
        info = self._archive.getinfo(self._members[name])
        if info.compress_type != zipfile.ZIP_STORED:  # PyTorch does not compress, so that sizes are reliable
            raise ValueError(f"its {name} is compressed, which PyTorch's archives are not")
        return info

    def _read(self, name: str, default: bytes) -> bytes:
        return self._archive.read(self._info(name)) if name in self._members else default

    def find_class(self, module: str, name: str) -> Any:
        """The object for a name in the pickle. Raises ValueError for all but the few that weights need."""
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Call(_rebuild_tensor)
        if module == "torch.jit._pickle" and name in _LISTS:
            return _Call(_plain)
        if (module, name) == ("collections", "OrderedDict"):
            return _Call(_no_hooks)
        raise ValueError(f"it refers to {module}.{name}, which weights do not need and which is never run")

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor. Raises ValueError if its length is not the stated one."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise ValueError("it refers to something that is not a storage")
        if key not in self._storages:
            content = self._archive.read(self._info(f"data/{key}"))
            if len(content) % dtype.itemsize:
                raise ValueError(f"its data/{key} has {len(content)} bytes, not a multiple of the size of {dtype}")
            self._storages[key] = (
                torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
        storage = self._storages[key]
        if storage.dtype != dtype or len(storage) != count:
            raise ValueError(f"its data/{key} has {len(storage)} elements of {storage.dtype}, not {count} of {dtype}")
        return storage


def _rebuild_tensor(
    storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool, hooks: Any,
    metadata: Any = None,
) -> Tensor:
    """A view of a storage. Raises ValueError if it exceeds the storage."""
    numbers = (offset, *size, *stride)
    sound = isinstance(storage, Tensor) and len(size) == len(stride) and not metadata
    if not sound or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("one of its tensors is invalid")
    count = math.prod(size)
    end = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True)) + 1 if count else offset
    if end > len(storage) or count > len(storage):
        raise ValueError("one of its tensors is larger than its storage")
    return storage.as_strided(size, stride, offset)


def _plain(value: Any, *types: Any) -> Any:
    """The value of a typed list."""
    return value


def _no_hooks(*content: Any) -> dict:
    """A tensor's hooks, which are dropped."""
    return {}
