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

from ...common.limits import PICKLE, SPREAD, FileError
from .archives import BoundedUnpickler, Call, check_keys, check_view, members_of, pickle_in, stored

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # start of files in PyTorch's format before zip files
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
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
# Names of what is saved beside weights and is not needed: whole packages, and single names.
_BESIDE = (
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
_ALSO = {
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "typing": {"Any"},
    "_codecs": {"encode"},
    "collections": {"deque"},
    "torch": {"Size", "Tensor", "device"},
    "torch.nn.parameter": {"Parameter", "Buffer"},
    "builtins": {"bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"},
}
_ALSO["__builtin__"] = _ALSO["builtins"]


def read_pickle(path: Path, mapped: bool, data: bool = True) -> Any:
    """The content of a file, without executing anything. mapped: memory-map the tensors of a zip file. data: read those
    of the older format, which cannot be mapped; else they are on the meta device.

    Raises ValueError for a file that is damaged or contains more than plain weights.
    """
    try:
        return _ZipReader.content(path, mapped) if _is_zip(path) else _OldReader.content(path, data)
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(f"({str(error)[:200] or type(error).__name__})") from error


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
        raise FileError("It is a TorchScript archive: give its name the ending .jit.")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise FileError("it is compressed, which PyTorch's files are not")
    return True


class _Inert:
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


def _view(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of a storage. Raises ValueError if it exceeds the storage."""
    if not isinstance(storage, Tensor):
        raise FileError("one of its tensors is invalid")
    check_view(len(storage), offset, size, stride)
    begin = 0 if 0 in size else offset
    return storage.as_strided(size, stride, storage.storage_offset() + begin)  # its own: the file is one storage


def _any_dtype(
    storage: Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> Tensor:
    return _view(storage.view(dtype), offset, size, stride)


def _subclass(function: Any, kind: Any, arguments: tuple, state: Any) -> Any:
    """A tensor of a class of its own, or with attributes, which are not needed."""
    if not isinstance(function, Call):
        raise FileError("one of its tensors is invalid")
    return function(*arguments)


def _table(*content: Any) -> _Table:
    for pair in content[-1] if content and isinstance(content[-1], list) else ():
        check_keys(pair[:1] if isinstance(pair, (list, tuple)) else ())
    return _Table(content[-1]) if content and isinstance(content[-1], (list, dict)) else _Table()


_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor"): _view,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *given: _view(*given[:4]),
    ("torch._utils", "_rebuild_tensor_v3"): _any_dtype,
    ("torch._utils", "_rebuild_parameter"): lambda data, *others: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *others: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("collections", "OrderedDict"): _table,
    ("collections", "defaultdict"): _table,
    ("collections", "Counter"): _table,
}


class _Reader(BoundedUnpickler):
    """The machine of a pickle of either format."""

    own = (_Table, _Inert)

    def __init__(self, file: io.BytesIO, most: int):
        """most: bytes that all storages together may have."""
        super().__init__(file)
        self.left, self.storages = most, dict[str, Tensor]()

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle. Raises ValueError for all but those that weights need and those of
        values that are often beside them."""
        if (module, name) in _FUNCTIONS:
            return Call(_FUNCTIONS[module, name])
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _BESIDE or name in _ALSO.get(module, ()):
            return _Inert
        if module == "torch._utils" and name.startswith("_rebuild"):
            raise FileError(f"One of its tensors is not a plain tensor ({name}).")
        raise FileError(f"It asks for {module}.{name}.")

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor. Raises ValueError if the file does not hold it."""
        kind, dtype, key, _, count, *view = pid
        sound = kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str) and type(count) is int
        if not sound:
            raise FileError("it refers to something that is not a storage")
        if key not in self.storages:
            if not 0 <= count * dtype.itemsize <= self.left:
                raise FileError("its storages are larger than the file")
            self.storages[key] = self.storage(key, dtype, count)
            self.left -= count * dtype.itemsize
        storage = self.storages[key]
        if storage.dtype != dtype or len(storage) < count:
            raise FileError("it states two kinds of one storage")
        if view and view[0] is not None:
            _, begin, length = view[0]
            return _view(storage, begin, (length,), (1,))
        return storage

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """The ``count`` elements of a storage. Raises ValueError if there are not so many."""
        raise NotImplementedError


class _ZipReader(_Reader):
    """A zip file: ``data.pkl`` is the pickle, ``data/<key>`` are the storages."""

    @classmethod
    def content(cls, path: Path, mapped: bool) -> Any:
        """The content of a file; see read_pickle."""
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = members_of(path)
            if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                raise FileError("it has the other byte order")
            reader = cls(pickle_in(archive, stored(members, "data.pkl")), size)
            reader.file, reader.members = file, members
            reader.whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if mapped else None
            return reader.load()

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        member = self.members.get(f"data/{key}")
        if member is None or member.file_size != count * dtype.itemsize:
            raise FileError(f"its part data/{key:.50} is missing, or has another size")
        self.file.seek(member.header_offset + 26)
        name, extra = (int.from_bytes(self.file.read(2), "little") for _ in range(2))
        begin = member.header_offset + 30 + name + extra
        if self.whole is not None and begin % dtype.itemsize == 0:
            part = self.whole[begin : begin + member.file_size]
            if len(part) != member.file_size:
                raise FileError("it ends too soon")
            return part.view(dtype)
        self.file.seek(begin)
        return _filled(self.file, count, dtype)


class _OldReader(_Reader):
    """The format before zip files: a number, a version, the system that wrote it, the content, the keys of its
    storages, all pickled; then the storages, each after its length."""

    @classmethod
    def content(cls, path: Path, data: bool) -> Any:
        """The content of a file; see read_pickle."""
        size = path.stat().st_size
        with torch.device("cpu" if data else "meta"), path.open("rb") as file:
            pickles = io.BytesIO(file.read(PICKLE))
            _, _, system = (cls(pickles, 0).load() for _ in range(3))
            if isinstance(system, dict) and not system.get("little_endian", True):
                raise FileError("it has the other byte order")
            reader = cls(pickles, size)
            content, keys = reader.load(), cls(pickles, 0).load()
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

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        return torch.empty(count, dtype=dtype)


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
