"""Reading what torch.save wrote (.pt, .pth, .bin, .ckpt): only tensors in containers of plain values.

A pickle is a program that calls what it names. It is looked through before it is read (see ``check_pickle``), and read
by ``torch.load(weights_only=True)``, which calls the few functions that rebuild tensors. What training scripts save
beside them (settings, callbacks, numbers of NumPy) becomes objects that do nothing.
"""

from __future__ import annotations

import builtins
import io
import pickle
import re
import sys
import tarfile
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # names of Python 2, which torch.save writes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickletools import genops, markobject
from typing import Any

import torch
from torch import Tensor, serialization

from ...limits.limits import (
    CODES,
    LARGEST,
    PARTS,
    PICKLE,
    SPREAD,
    FileError,
    bounded_int,
    legal_name,
    legal_sizes,
    quote,
)
from .archives import members_of, pickle_in

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # start of files in PyTorch's format before zip files
# The instructions that PyTorch writes.
_INSTRUCTIONS = frozenset(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 GLOBAL REDUCE NEWOBJ "
    "BUILD POP BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT".split()
)
DTYPES = {  # name of a class of storages -> dtype of its elements
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}
_CALLED = re.compile(r"torch\.(_utils\._rebuild_|_tensor\._rebuild_|jit\._pickle\.|(Size|device)$)|(?!torch\.)")
_WANTED = re.compile(  # what PyTorch makes of a file's names itself
    r"torch\.(u?int\d+|b?float\d\w*|complex\d+|bool|Size|device|Tensor)"
    r"|torch\._utils\._rebuild_(tensor(_v2|_v3)?|parameter(_with_state)?)|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.nn\.parameter\.Parameter|collections\.(OrderedDict|Counter)|builtins\.(set|complex)|_codecs\.encode"
)
# Of Python's own modules, those whose values scripts save. Others are asked for by files that attack.
_HARMLESS = {"argparse", "collections", "datetime", "decimal", "enum", "pathlib", "random", "types", "typing", "uuid"}
_UNREAD = ("collections.deque", "collections.defaultdict")  # PyTorch fills no other containers than lists and dicts


def read_pickle(path: Path, mapped: bool, data: bool = True) -> Any:
    """The content of a file, without executing anything. mapped: memory-map the tensors of a zip file. data: read those
    of the older format, which cannot be mapped; else they are on the meta device.

    Raises FileError for a file that is damaged or contains more than plain weights.
    """
    if not hasattr(serialization, "safe_globals"):
        raise FileError("reading it safely needs PyTorch 2.5 or newer. Update PyTorch")
    with file_errors():
        zipped = _is_zip(path)
        names = _check_zip(path) if zipped else _check_old(path)
        left = not (data or zipped)
        with _only(_stand_ins(names)), serialization.skip_data() if left else nullcontext():
            return torch.load(path, map_location="meta" if left else "cpu", weights_only=True, mmap=mapped and zipped)


def _is_zip(path: Path) -> bool:
    """Whether this is a zip file, not the older format. Raises FileError for files that PyTorch did not write."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == b"\x80" and _OLD in start and not tarfile.is_tarfile(path):  # whose reader unpacks
        return False
    if not start.startswith(_ZIP):
        raise FileError("PyTorch did not write it")
    return True


def _check_zip(path: Path) -> set[str]:
    """The names in a zip file, in which ``data.pkl`` is the pickle and ``data/<key>`` are the storages."""
    members = members_of(path)
    if "constants.pkl" in members:
        raise FileError("it is a TorchScript archive: give its name the ending .jit")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise FileError("it is compressed, which PyTorch's files are not")
    with zipfile.ZipFile(path) as archive:
        names, storages = check_pickle(pickle_in(archive, members))
    for key, size in storages.items():
        if f"data/{key}" not in members or members[f"data/{key}"].file_size != size:
            raise FileError(f"its part data/{key} is missing, or has another size than {size} bytes")
    return names


def _check_old(path: Path) -> set[str]:
    """The names in a file of the format before zip files: a number, a version, the system that wrote it, the content,
    the keys of its storages, all pickled; then the storages, each after its length."""
    with path.open("rb") as file:
        pickles = io.BytesIO(file.read(PICKLE))
    names: set[str] = set()
    for _ in range(5):
        found, storages = check_pickle(pickles)
        names |= found
        if sum(storages.values()) > path.stat().st_size:
            raise FileError("its storages are larger than the file")
    return names


class _Name(str):
    """A name in a pickle (module.attribute)."""


class _Made(str):
    """What the function of a name returned."""


class _Tuple(tuple):
    """size: the values in it, and in the tuples in it."""

    size: int


def check_pickle(file: io.BytesIO) -> tuple[set[str], dict[str, int]]:
    """The names in a pickle, and the bytes of its storages by their keys, as its instructions state them. Afterwards,
    the file's position is at the end of the pickle.

    Nothing is made. Raises FileError for what weights do not need: other instructions, or more than CODES; tuples of
    more than PARTS values, or integers of more than 64 bits, as keys of which a table could take any time or end the
    process; and for calls and changes of anything but what a name stands for.
    """
    names: set[str] = set()
    storages: dict[str, int] = {}
    stack: list[Any] = []  # strings, numbers, and the types above; None for everything else
    marks: list[int] = []
    memory: dict[Any, Any] = {}
    for number, (code, argument, _) in enumerate(genops(file)):
        if number == CODES:
            raise FileError(f"its description has more than {CODES} instructions")
        kind, before = code.name, [*code.stack_before]
        if kind not in _INSTRUCTIONS or (
            isinstance(argument, int) and abs(argument) >= 2**64 and argument != serialization.MAGIC_NUMBER
        ):
            raise FileError(f"its description has the instruction {kind} {quote(argument)}, which weights do not need")
        if kind == "MARK":
            marks.append(len(stack))
        elif "PUT" in kind:
            memory[argument] = stack[-1]
            if not isinstance(argument, int) or argument > CODES:
                raise FileError("its description remembers more than weights need")
        else:
            begin = marks.pop() if markobject in before else len(stack)
            begin -= before.index(markobject) if markobject in before else len(before)
            if begin < 0 or (marks and begin < marks[-1]):
                raise FileError("its description takes what is not there")
            taken, stack[begin:] = stack[begin:], []
            stack += [memory[argument] if "GET" in kind else _value(kind, argument, taken)] * len(code.stack_after)
            if kind == "GLOBAL":
                names.add(stack[-1])
            elif kind == "BINPERSID":
                key, size = _storage(taken[0])
                if storages.setdefault(key, size) != size:
                    raise FileError(f"its storage {key} has two sizes")
    return names, storages


def _value(kind: str, argument: Any, taken: list[Any]) -> Any:
    """What an instruction leaves of what it took from the stack."""
    if kind == "GLOBAL":
        return _named(*argument.split(" "))
    if "TUPLE" in kind:
        made = _Tuple(taken)
        made.size = 1 + sum(each.size if isinstance(each, _Tuple) else 1 for each in taken)
        if made.size > PARTS:
            raise FileError(f"a tuple in it has more than {PARTS} values")
        return made
    if kind in ("REDUCE", "NEWOBJ"):
        function, given = taken
        if not isinstance(function, _Name) or not _CALLED.match(function):
            raise FileError(f"it calls {quote(function)}, which weights do not need and which is never run")
        if function == "_codecs.encode" and given[1:] not in (("latin1",), ("latin-1",)):  # others take any time
            raise FileError("it encodes other texts than bytes")
        return _Made(function)
    if kind == "BUILD" and (not isinstance(taken[0], _Made) or taken[0].startswith("torch.")):
        raise FileError("it tries to change what reads it")
    return taken[0] if kind.startswith(("BUILD", "SETITEM", "APPEND")) else argument


def _named(module: str, name: str) -> _Name:
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return _Name(legal_name(f"{module}.{name}"))


def _storage(pid: Any) -> tuple[str, int]:
    """Key and bytes of a storage. Raises FileError for a reference to something else."""
    kind, name, key, _, count, *_ = pid if isinstance(pid, _Tuple) and len(pid) > 4 else [None] * 5
    if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str):
        raise FileError("it refers to something that is not a storage")
    if name not in DTYPES:
        raise FileError(f"it has numbers of the kind {quote(name)}")
    return legal_name(key), bounded_int("the size of a storage", count, 0, LARGEST) * DTYPES[name].itemsize


class _Unused:
    """Stands for a value that is not needed, whatever it is made from."""

    def __init__(self, *content: Any, **named: Any):
        pass

    __new__ = staticmethod(lambda cls, *content, **named: object.__new__(cls))

    def __setstate__(self, state: Any) -> None:
        pass


def _stand_ins(names: Iterable[str]) -> list[Any]:
    """What stands for the names that PyTorch does not know. Raises FileError for those that weights do not need."""
    found = []
    for full in sorted(names):
        module, _, name = full.rpartition(".")
        package = module.partition(".")[0]
        if full in DTYPES or _WANTED.fullmatch(full):
            continue
        if full in _UNREAD:
            raise FileError(
                f"it holds a {name}, which PyTorch reads only where it may run code. Save the weights alone"
            )
        if module == "torch._utils" and name.startswith("_rebuild"):
            raise FileError(f"one of its tensors is not a plain tensor ({name})")
        a_type = package == "builtins" and isinstance(getattr(builtins, name, None), type) and name != "bytearray"
        if package == "torch" or (package in sys.stdlib_module_names - _HARMLESS and not a_type):
            raise FileError(f"it asks for {quote(full)}, which weights do not need and which is never run")
        found.append(type(name, (_Unused,), {"__module__": module}))
    return found


@contextmanager
def _only(stand_ins: list[Any]) -> Iterator[None]:
    """Of names that PyTorch does not know, it reads these alone: other programs in this process declare some, ComfyUI
    some of numpy's, which would then need further ones."""
    declared = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        with serialization.safe_globals(stand_ins):
            yield
    finally:
        serialization.add_safe_globals(declared)


def refuse_unreal(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise FileError for tensors whose data is not in the file: expanded ones have more elements than it."""
    for name, tensor in tensors.items():
        legal_sizes(name, tensor.shape)
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > SPREAD * path.stat().st_size:
        raise FileError("its tensors are larger than the file")


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
        # Of PyTorch's words, those that say what it does not read, without the advice to run what is in the file.
        said = str(error).partition("WeightsUnpickler error: ")[2] if isinstance(error, pickle.UnpicklingError) else ""
        reason = f"{type(error).__name__}: {(said or str(error)).strip().partition(chr(10))[0][:200]}"
        raise FileError(f"its description of the tensors cannot be read ({reason})") from error
