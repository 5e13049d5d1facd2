"""The machine that reads pickles of tensors, without most of its instructions.

A pickle is a program of a small machine. Nothing in it is run here but the few instructions that PyTorch writes, each
number, name and table within the bounds of ``limits``: a name of any length, a number of a million digits or a table
whose keys are tuples in tuples would stop the process, or end it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import CODES, DIMENSIONS, LARGEST, FileError, bounded_int, legal_name, legal_sizes, shown

# The instructions that PyTorch writes, in Python (of protocols 2 to 5) and in C++.
_NAMES = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING "
    "EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 GLOBAL REDUCE NEWOBJ "
    "BUILD POP BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT FRAME MEMOIZE SHORT_BINUNICODE SHORT_BINBYTES BINBYTES "
    "STACK_GLOBAL EMPTY_SET ADDITEMS FROZENSET"
)
INSTRUCTIONS = frozenset(getattr(pickle, name)[0] for name in _NAMES.split())
DTYPES = {  # name of a class of storages -> dtype of its elements
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
_PythonUnpickler: Any = pickle._Unpickler  # whose methods typeshed does not list


class TensorUnpickler(_PythonUnpickler):
    """Reads a pickle of tensors. Readers derive from it, and say what its names and storages stand for.

    It is the unpickler in Python: the one in C allocates an array of any size for a five-byte index of its memory.
    own: the reader's types for what the pickle makes. The pickle may change these, lists and dicts, and nothing else:
    not what reads it.
    """

    own: tuple[type, ...] = ()

    def __init__(self, file: io.BytesIO, limit: int):
        """limit: the bytes that all storages together may have."""
        super().__init__(file, encoding="utf-8")
        self.dispatch = _Dispatch()
        self.bytes_left = limit
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle. Readers allow a few more; raises FileError for all others."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return Call(rebuild_tensor)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise FileError(f"it asks for {shown(f'{module}.{name}')}, which weights do not need and which is never run")

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor. Raises FileError if the file does not hold it."""
        kind, dtype, key, _, count, *view = pid
        legal = kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str) and type(count) is int
        if not legal:
            raise FileError("it refers to something that is not a storage")
        if legal_name(key) not in self.storages:
            if not 0 <= count * dtype.itemsize <= self.bytes_left:
                raise FileError("its storages are larger than the file")
            self.storages[key] = self.storage(key, dtype, count)
            self.bytes_left -= count * dtype.itemsize
        storage = self.storages[key]
        if storage.dtype != dtype or len(storage) < count:
            raise FileError(f"its storage {key} has {len(storage)} elements of {storage.dtype}, not {count} of {dtype}")
        if view and view[0] is not None:
            _, begin, length = view[0]
            return tensor_view(storage, begin, (length,), (1,))
        return storage

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """The ``count`` elements of a storage. Raises FileError if there are not so many."""
        raise NotImplementedError

    def may_change(self, target: Any, *kinds: type) -> None:
        """Raise FileError unless the target is of the ``kinds``, or of the reader's own."""
        if not isinstance(target, (*kinds, *self.own)):
            raise FileError("it tries to change what reads it")


class Call:
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _check_item(reader: TensorUnpickler) -> None:
    reader.may_change(reader.stack[-3], dict)
    check_keys(reader.stack[-2:-1])


def _check_items(reader: TensorUnpickler) -> None:
    reader.may_change(reader.metastack[-1][-1], dict)
    check_keys(reader.stack[::2])


_CHECKS: dict[int, Callable[[TensorUnpickler], None]] = {
    pickle.BUILD[0]: lambda reader: reader.may_change(reader.stack[-2]),
    pickle.APPEND[0]: lambda reader: reader.may_change(reader.stack[-2], list),
    pickle.APPENDS[0]: lambda reader: reader.may_change(reader.metastack[-1][-1], list),
    pickle.SETITEM[0]: _check_item,
    pickle.SETITEMS[0]: _check_items,
    pickle.ADDITEMS[0]: lambda reader: check_keys(reader.stack),
    pickle.FROZENSET[0]: lambda reader: check_keys(reader.stack),
}


def _checked(code: int) -> Callable[[TensorUnpickler], None]:
    """The unpickler's method for an instruction, after its check."""
    check, run = _CHECKS.get(code), _PythonUnpickler.dispatch[code]
    if check is None:
        return run

    def checked(reader: TensorUnpickler) -> None:
        check(reader)
        run(reader)

    return checked


_METHODS = {code: _checked(code) for code in INSTRUCTIONS}


class _Dispatch(dict[int, Callable[..., None]]):
    """The methods by instruction: INSTRUCTIONS only, and CODES of them in all. It does not hold the reader: that would
    keep a file's tensors in memory until a garbage collection."""

    limit = CODES

    def __init__(self) -> None:
        super().__init__(_METHODS)
        self.left = self.limit

    def __getitem__(self, code: int) -> Callable[..., None]:
        self.left -= 1
        if not self.left:
            raise FileError(f"its description has more than {self.limit} instructions")
        if code not in self:
            raise FileError(f"its description has the instruction {code}, which weights do not need")
        return super().__getitem__(code)


def check_keys(keys: Iterable[Any]) -> None:
    """Raise FileError for keys that a table finds only after any time: long tuples and tuples in tuples (the deepest
    end the process), and integers of which as many as one likes have the same hash."""
    for key in keys:
        parts = key if isinstance(key, (tuple, frozenset)) else (key,)
        if len(parts) > DIMENSIONS or not all(map(_is_plain, parts)):
            raise FileError("a table in it has keys that weights do not need")


def _is_plain(key: Any) -> bool:
    return not isinstance(key, (tuple, frozenset)) and not (isinstance(key, int) and abs(key) >= 2**60)


def check_view(elements: int, offset: Any, sizes: Any, steps: Any) -> None:
    """Raise FileError unless a tensor of these sizes and steps lies within a storage of so many elements."""
    start = bounded_int("the place of a tensor", offset, 0, LARGEST)
    sizes, steps = legal_sizes("one of its tensors", sizes), legal_sizes("one of its tensors", steps)
    if len(sizes) != len(steps):
        raise FileError("one of its tensors is invalid")
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if start + (1 + last if prod(sizes) else 0) > elements:
        raise FileError("one of its tensors is larger than its storage")


def tensor_view(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of a storage. Raises FileError if it exceeds the storage."""
    if not isinstance(storage, Tensor):
        raise FileError("one of its tensors is invalid")
    check_view(len(storage), offset, size, stride)
    begin = 0 if 0 in size else offset
    return storage.as_strided(size, stride, storage.storage_offset() + begin)  # its own: the file is one storage


def rebuild_tensor(
    storage: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    """A tensor as torch._utils._rebuild_tensor_v2 makes it. Raises FileError for one that is not what its storage
    holds, as ``metadata`` says."""
    if metadata:
        raise FileError("one of its tensors is conjugated or negated, which weights are not")
    return tensor_view(storage, offset, size, stride)


@contextmanager
def file_errors():
    """Convert any exception to a FileError, because a damaged pickle can raise any."""
    try:
        yield
    except FileError:
        raise
    except (OSError, zipfile.BadZipFile) as error:
        raise FileError(str(error)[:200]) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise FileError(f"its description of the tensors cannot be read ({reason})") from error
