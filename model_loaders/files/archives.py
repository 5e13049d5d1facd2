"""What PyTorch's files may hold: the members of an archive, and the instructions of a pickle, before anything is made.

A pickle is a program of a small machine. Nothing in it is run here but the few instructions that PyTorch writes, each
number, name and table within the bounds of ``limits``: a name of any length, a number of a million digits or a table
whose keys are tuples in tuples would stop the process, or end it, within torch's own reader as well.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...limits import CODES, DIRECTORY, LARGEST, PICKLE, FileError, bounded_int, legal_name, legal_sizes

_CODES = frozenset(b"".join((  # that PyTorch writes, in Python and in C++
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.EMPTY_LIST,
    pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_TUPLE, pickle.TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
    pickle.POP, pickle.BINPERSID, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT,
)))  # fmt: skip
_DIRECTORY_SIZE, _DIRECTORY_BEGIN = 5, 6  # places in what zipfile finds at the end of an archive


def members_of(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The members of a zip file by their names without the first folder.

    Raises ValueError for a list of members that is too long, ambiguous or not where it should be, and for stored
    members that are larger than the file together. Compressed ones (the code of a TorchScript archive) are listed, but
    are not in this sum: see ``stored``.
    """
    with path.open("rb") as file:
        end = zipfile._EndRecData(file)  # zipfile makes an object of half a kilobyte for every member
        if not end:
            raise FileError("it is no zip file, or its end is missing")
        if end[_DIRECTORY_SIZE] > DIRECTORY:
            raise FileError(f"its list of members has {end[_DIRECTORY_SIZE]} bytes; {DIRECTORY} is the limit")
        with zipfile.ZipFile(file) as archive:
            members, begin = archive.infolist(), archive.start_dir
    if begin != end[_DIRECTORY_BEGIN]:  # zipfile would look elsewhere than torch's reader
        raise FileError("its list of members is not where its end says")
    found = {member.filename.partition("/")[2]: member for member in members}
    if len({name.lower() for name in found}) < len(members):  # as torch's reader compares them
        raise FileError("two of its parts have the same name")
    held = sum(member.file_size for member in members if member.compress_type == zipfile.ZIP_STORED)
    if held > path.stat().st_size:
        raise FileError("its parts are larger than the file")
    return found


def stored(members: Mapping[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    """A member. Raises ValueError if it is missing, or compressed, which PyTorch's data is not: a few bytes could stand
    for more than fits in memory."""
    if name not in members:
        raise FileError(f"it has no {name}: it is not an archive of PyTorch, or damaged")
    if members[name].compress_type != zipfile.ZIP_STORED:
        raise FileError(f"its {name} is compressed, which PyTorch's archives are not")
    return members[name]


def pickle_in(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> io.BytesIO:
    """The pickle in a member. Raises ValueError for one that is too long."""
    if member.file_size > PICKLE:
        raise FileError(f"its {member.filename} has {member.file_size} bytes; {PICKLE} is the limit")
    return io.BytesIO(archive.read(member))


class BoundedUnpickler(pickle._Unpickler):
    """The machine without most of its instructions. Readers derive from it, and say what names and storages stand for.

    This is the pure Python unpickler: the C one allocates an array of any size for a five-byte index of its memory.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _CODES}

    def __init__(self, file: io.BytesIO):
        super().__init__(file, encoding="bytes")
        self.dispatch = _Counted(type(self).dispatch)

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        super().load_setitems()

    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = load_setitem, load_setitems


class _Counted(dict):
    """Instructions, of which CODES may be asked for."""

    left = CODES

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        if not self.left:
            raise FileError(f"its description has more than {CODES} instructions")
        if code not in self:
            raise FileError(f"its description has the instruction {code}, which weights do not need")
        return super().__getitem__(code)


def _check_keys(keys: Any) -> None:
    """Raise ValueError for keys that contain others: their hashes take any time, and the deepest end the process."""
    if any(isinstance(key, (tuple, frozenset)) for key in keys):
        raise FileError("a table in it has keys that weights do not need")


def rehearse(file: io.BytesIO, size: int) -> Any:
    """Read a pickle as torch's reader will, with nothing in the place of everything that it will make.

    size: bytes of the file, which all storages together do not exceed. Raises ValueError, or any other exception, for
    a pickle that torch's reader must not see.
    """
    return _Rehearsal(file, size).load()


def rehearse_old(file: io.BytesIO, size: int) -> None:
    """The same for a file of the format before zip files: the format's number, its version, the system that wrote it,
    the content, and the keys of its storages."""
    for number in ("format", "version"):
        bounded_int(f"its {number}", rehearse(file, size), 0, 2**80)  # torch's message quotes it
    for _ in range(2):
        rehearse(file, size)
    keys = rehearse(file, size)
    if not isinstance(keys, list):
        raise FileError("it does not list its storages")
    _check_keys(keys)


class _Nothing:
    """What stands for a function, a class, or what they return. name: of the former, else empty."""

    __slots__ = ("elements", "name")

    def __init__(self, name: str = "", elements: int = -1):
        self.name, self.elements = name, elements  # of a storage

    def append(self, item: Any) -> None:
        raise FileError("something is appended to what is no list")

    extend = append

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Rehearsal(BoundedUnpickler):
    dispatch = dict(BoundedUnpickler.dispatch)

    def __init__(self, file: io.BytesIO, size: int):
        super().__init__(file)
        self._left, self._storages = size, dict[Any, int]()

    def find_class(self, module: str, name: str) -> _Nothing:
        legal_name(module)
        return _Nothing(legal_name(name))

    def persistent_load(self, pid: Any) -> _Nothing:
        """A storage: (b"storage" or "storage", type, key, place, elements, and in the old format a view of it)."""
        if not isinstance(pid, tuple) or not 5 <= len(pid) <= 6 or pid[0] not in ("storage", b"storage"):
            raise FileError("it refers to something that is not a storage")
        if not isinstance(pid[2], (str, bytes, int)) or not isinstance(pid[3], (str, bytes)):
            raise FileError("it refers to a storage without a name or place")
        view = pid[5] if len(pid) == 6 else None  # (key, offset, elements)
        if view is not None:
            if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], (str, bytes, int)):
                raise FileError("it refers to a part of a storage that is none")
            for number in view[1:]:
                bounded_int("a number of its storages", number, 0, LARGEST)
        if pid[2] not in self._storages:
            self._storages[pid[2]] = bounded_int("the length of a storage", pid[4], 0, self._left)
            self._left -= pid[4]
        return _Nothing(elements=pid[4] if pid[4] == self._storages[pid[2]] else 0)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_called(function, arguments))

    def load_build(self) -> None:
        _check_pairs((self.stack.pop(),))

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build


def _called(function: Any, arguments: Any) -> Any:
    """Nothing. Raises ValueError for arguments with which one of the functions that torch allows takes any time or
    memory."""
    if not isinstance(function, _Nothing) or not function.name or not isinstance(arguments, tuple):
        raise FileError("it calls something that is no function")
    name = function.name
    if name == "_rebuild_from_type_v2":  # calls its first argument with the second
        _called(*(*arguments, None, None)[:3:2])
    elif name.startswith("_rebuild"):
        for sizes in arguments:
            if isinstance(sizes, tuple) and sizes and isinstance(sizes[0], int):
                legal_sizes("one of its tensors", sizes)
        if arguments and isinstance(arguments[0], _Nothing) and arguments[0].elements >= 0:
            check_view(arguments[0].elements, *(*arguments, None, None, None)[1:4])
    elif name == "encode" and (len(arguments) != 2 or arguments[1] not in ("latin1", b"latin1")):
        raise FileError("it encodes text in a way that PyTorch does not")
    elif name in ("Counter", "OrderedDict", "set"):
        _check_pairs(arguments)
        if name == "set":
            _check_keys(arguments[0] if arguments and isinstance(arguments[0], (list, tuple)) else ())
    elif re.search(r"(Tensor|Storage|bytearray)$", name) and any(isinstance(each, (int, tuple)) for each in arguments):
        raise FileError(f"it asks for an empty {name}")
    return {} if name in ("Counter", "OrderedDict") else _Nothing()


def _check_pairs(values: Any) -> None:
    """Raise ValueError for what a table may be made of, if its keys are not plain."""
    for value in values:
        for pair in value if isinstance(value, (list, tuple)) else ():
            _check_keys(pair[:1] if isinstance(pair, (list, tuple)) else ())


def check_view(elements: int, offset: Any, sizes: Any, steps: Any) -> int:
    """Number of elements of a tensor within a storage of so many. Raises ValueError if it is not within."""
    start = bounded_int("the place of a tensor", offset, 0, LARGEST)
    sizes, steps = legal_sizes("one of its tensors", sizes), legal_sizes("one of its tensors", steps)
    if len(sizes) != len(steps):
        raise FileError("one of its tensors is invalid")
    count = 1
    for size in sizes:
        count *= size
    end = start + (1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if count else 0)
    if end > elements:
        raise FileError("one of its tensors is larger than its storage")
    return count
