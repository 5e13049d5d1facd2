"""Reading what torch.save wrote (.pt, .pth, .bin, .ckpt): only tensors in containers of plain values.

A pickle is a program that calls what it names. Here it gets our own function for each of the few that rebuild tensors,
and a stand-in without any effect for the values that training scripts save beside them (settings, callbacks, numbers
of NumPy); everything else is refused. So the answer depends neither on what is installed nor on torch's list of safe
globals, which belongs to the whole process and which other programs extend.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import PICKLE, SPREAD, FileError, shown
from .archives import members_of, pickle_in
from .unpickler import DTYPES, Call, TensorUnpickler, check_keys, file_errors, rebuild_tensor, tensor_view

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # start of files in PyTorch's format before zip files
# Values that are saved beside weights and are not needed: those of whole packages, and of single names.
_UNUSED_PACKAGES = (
    "numpy",
    "pytorch_lightning",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "omegaconf",
    "mmengine",
    "pathlib",
    "datetime",
)
_UNUSED_NAMES = {
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "typing": {"Any"},
    "_codecs": {"encode"},
    "collections": {"deque"},
    "torch": {"Size", "Tensor", "device"},
    "torch.nn.parameter": {"Parameter", "Buffer"},
    "builtins": {"bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"},
}
_UNUSED_NAMES["__builtin__"] = _UNUSED_NAMES["builtins"]
_STORAGES = DTYPES | {  # those that TorchScript does not have
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


def read_pickle(path: Path, mapped: bool, data: bool = True) -> Any:
    """The content of a file, without executing anything. mapped: memory-map the tensors of a zip file. data: read those
    of the older format, which cannot be mapped; else they are on the meta device.

    Raises FileError for a file that is damaged or contains more than plain weights.
    """
    with file_errors():
        return _read_zip(path, mapped) if _is_zip(path) else _read_old(path, data)


def _is_zip(path: Path) -> bool:
    """Whether this is a zip file, not the older format. Raises ValueError for zip files that PyTorch did not write."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == b"\x80" and _OLD in start:
        return False
    if not start.startswith(_ZIP):
        raise FileError("PyTorch did not write it")
    members = members_of(path)
    if "constants.pkl" in members:
        raise FileError("it is a TorchScript archive: give its name the ending .jit")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise FileError("it is compressed, which PyTorch's files are not")
    return True


class _Unused:
    """Stands for a value that is not needed, whatever it is made from."""

    def __init__(self, *content: Any, **named: Any):
        pass

    __new__ = staticmethod(lambda cls, *content, **named: object.__new__(cls))

    def ignore(self, *content: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = ignore


class _Table(dict):
    """An OrderedDict or the like, whose attributes (versions of modules) are not needed."""

    def __setstate__(self, state: Any) -> None:
        pass


def _rebuild_any_dtype(
    storage: Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> Tensor:
    return rebuild_tensor(storage.view(dtype), offset, size, stride, grad, hooks, metadata)


def _rebuild_subclass(function: Any, kind: Any, arguments: tuple, state: Any) -> Any:
    """A tensor of a class of its own, or with attributes, which are not needed."""
    if not isinstance(function, Call):
        raise FileError("one of its tensors is invalid")
    return function(*arguments)


def _rebuild_table(*content: Any) -> _Table:
    for pair in content[-1] if content and isinstance(content[-1], list) else ():
        check_keys(pair[:1] if isinstance(pair, (list, tuple)) else ())
    return _Table(content[-1]) if content and isinstance(content[-1], (list, dict)) else _Table()


_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor"): tensor_view,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_any_dtype,
    ("torch._utils", "_rebuild_parameter"): lambda data, *others: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *others: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_subclass,
    ("collections", "OrderedDict"): _rebuild_table,
    ("collections", "defaultdict"): _rebuild_table,
    ("collections", "Counter"): _rebuild_table,
}


class _PickleUnpickler(TensorUnpickler):
    """Reads a pickle of either format: also the values that are often beside weights, and are not needed."""

    own = (_Table, _Unused)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return Call(_FUNCTIONS[module, name])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module.partition(".")[0] in _UNUSED_PACKAGES or name in _UNUSED_NAMES.get(module, ()):
            return _Unused
        if module == "torch._utils" and name.startswith("_rebuild") and name != "_rebuild_tensor_v2":
            raise FileError(f"one of its tensors is not a plain tensor ({shown(name)})")
        return super().find_class(module, name)


def _read_zip(path: Path, mapped: bool) -> Any:
    """The content of a zip file, in which ``data.pkl`` is the pickle and ``data/<key>`` are the storages."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        return _ZipUnpickler(path, file, archive, mapped).load()


class _ZipUnpickler(_PickleUnpickler):
    def __init__(self, path: Path, file: io.BufferedReader, archive: zipfile.ZipFile, mapped: bool):
        size = path.stat().st_size
        self.file, self.members = file, members_of(path)
        super().__init__(pickle_in(archive, self.members), size)
        self.map = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if mapped else None

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        member = self.members.get(f"data/{key}")
        if member is None or member.file_size != count * dtype.itemsize:
            raise FileError(f"its part data/{key:.50} is missing, or has another size")
        self.file.seek(member.header_offset + 26)  # to the lengths of two strings that end a member's header
        name, extra = (int.from_bytes(self.file.read(2), "little") for _ in range(2))
        begin = member.header_offset + 30 + name + extra
        if self.map is not None and begin % dtype.itemsize == 0:
            part = self.map[begin : begin + member.file_size]
            if len(part) != member.file_size:
                raise FileError("it ends too soon")
            return part.view(dtype)
        self.file.seek(begin)
        return _filled(self.file, count, dtype)


def _read_old(path: Path, data: bool) -> Any:
    """The content of a file in the format before zip files: a number, a version, the system that wrote it, the content,
    the keys of its storages, all pickled; then the storages, each after its length."""
    with torch.device("cpu" if data else "meta"), path.open("rb") as file:
        pickles = io.BytesIO(file.read(PICKLE))
        _, _, system = (_OldUnpickler(pickles, 0).load() for _ in range(3))
        if isinstance(system, dict) and not system.get("little_endian", True):
            raise FileError("it has the other byte order")
        reader = _OldUnpickler(pickles, path.stat().st_size)
        content, keys = reader.load(), _OldUnpickler(pickles, 0).load()
        named = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if not named or sorted(keys) != sorted(reader.storages):
            raise FileError("it does not list its storages")
        file.seek(pickles.tell())
        for key in keys if data else ():
            storage = reader.storages[key]
            if int.from_bytes(file.read(8), "little") != len(storage):
                raise FileError("one of its storages has another length than stated")
            storage.copy_(_filled(file, len(storage), storage.dtype))
    return content


class _OldUnpickler(_PickleUnpickler):
    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        return torch.empty(count, dtype=dtype)  # filled when the pickle, which stands before the data, is read


def _filled(file: io.BufferedReader, count: int, dtype: torch.dtype) -> Tensor:
    """The next ``count`` numbers of a file. Raises ValueError if it ends before."""
    content = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    if file.readinto(content.numpy()) != len(content):
        raise FileError("it ends too soon")
    return content.view(dtype)


def refuse_unreal(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for tensors whose data is not in the file: expanded ones have more elements than it."""
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > SPREAD * path.stat().st_size:
        raise FileError("its tensors are larger than the file")
