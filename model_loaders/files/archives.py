"""What PyTorch's files may hold: the members of an archive, and the instructions of a pickle, before anything is made.

A pickle is a program of a small machine. Nothing in it is run here but the few instructions that PyTorch writes, each
number, name and table within the bounds of ``limits``: a name of any length, a number of a million digits or a table
whose keys are tuples in tuples would stop the process, or end it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...common.limits import CODES, DIMENSIONS, DIRECTORY, LARGEST, PICKLE, FileError, bounded_int, legal_sizes

_CODES = frozenset(
    b"".join(
        (  # that PyTorch writes, in Python (of protocols 2 to 5) and in C++
            pickle.PROTO,
            pickle.STOP,
            pickle.MARK,
            pickle.NONE,
            pickle.NEWTRUE,
            pickle.NEWFALSE,
            pickle.BININT,
            pickle.BININT1,
            pickle.BININT2,
            pickle.LONG1,
            pickle.BINFLOAT,
            pickle.BINUNICODE,
            pickle.SHORT_BINSTRING,
            pickle.EMPTY_LIST,
            pickle.APPEND,
            pickle.APPENDS,
            pickle.EMPTY_DICT,
            pickle.SETITEM,
            pickle.SETITEMS,
            pickle.EMPTY_TUPLE,
            pickle.TUPLE,
            pickle.TUPLE1,
            pickle.TUPLE2,
            pickle.TUPLE3,
            pickle.GLOBAL,
            pickle.REDUCE,
            pickle.NEWOBJ,
            pickle.BUILD,
            pickle.POP,
            pickle.BINPERSID,
            pickle.BINGET,
            pickle.LONG_BINGET,
            pickle.BINPUT,
            pickle.LONG_BINPUT,
            pickle.FRAME,
            pickle.MEMOIZE,
            pickle.SHORT_BINUNICODE,
            pickle.SHORT_BINBYTES,
            pickle.BINBYTES,
            pickle.STACK_GLOBAL,
            pickle.EMPTY_SET,
            pickle.ADDITEMS,
            pickle.FROZENSET,
        )
    )
)
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
    own: the reader's types for what the pickle makes. It may change these, lists and dicts, and nothing else: not what
    reads it.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _CODES}
    own: tuple[type, ...] = ()

    def __init__(self, file: io.BytesIO):
        super().__init__(file, encoding="utf-8")
        self.dispatch = _Counted(type(self).dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle. Readers allow a few; raises FileError for all others."""
        raise FileError(f"it refers to {module}.{name}, which weights do not need and which is never run")

    def may_change(self, target: Any, *kinds: type) -> None:
        """Raise FileError unless this is of the ``kinds``, or of the reader's own."""
        if not isinstance(target, (*kinds, *self.own)):
            raise FileError("it tries to change what reads it")

    def load_build(self) -> None:
        self.may_change(self.stack[-2])
        super().load_build()

    def load_append(self) -> None:
        self.may_change(self.stack[-2], list)
        super().load_append()

    def load_appends(self) -> None:
        self.may_change(self.metastack[-1][-1], list)
        super().load_appends()

    def load_setitem(self) -> None:
        self.may_change(self.stack[-3], dict)
        check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self.may_change(self.metastack[-1][-1], dict)
        check_keys(self.stack[::2])
        super().load_setitems()

    def load_additems(self) -> None:
        check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        check_keys(self.stack)
        super().load_frozenset()

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.APPEND[0]], dispatch[pickle.APPENDS[0]] = load_append, load_appends
    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = load_setitem, load_setitems
    dispatch[pickle.ADDITEMS[0]], dispatch[pickle.FROZENSET[0]] = load_additems, load_frozenset


class Call:
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


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


def check_keys(keys: Iterable[Any]) -> None:
    """Raise ValueError for keys that a table finds only after any time: long tuples and tuples in tuples (the deepest
    end the process), and integers of which as many as one likes have the same hash."""
    for key in keys:
        parts = key if isinstance(key, (tuple, frozenset)) else (key,)
        if len(parts) > DIMENSIONS or not all(map(_is_plain, parts)):
            raise FileError("a table in it has keys that weights do not need")


def _is_plain(key: Any) -> bool:
    return not isinstance(key, (tuple, frozenset)) and not (isinstance(key, int) and abs(key) >= 2**60)


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
