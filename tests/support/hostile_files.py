"""Small files that state absurd numbers: what each would cost a reader that believes it is in its name.

A function writes the file into a folder and returns it; ``HOSTILE`` lists them by name.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

BILLION = 2**62
_PICKLED = b"\x80\x02"


def safetensors(header: bytes | dict, folder: Path, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "hostile.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def one_tensor(shape: Iterable[int], end: int = 4, name: str = "x") -> dict:
    return {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, end]}}


def settings(text: bytes, folder: Path) -> Path:
    """A config.json, beside a file of weights that is sound."""
    (folder / "config.json").write_bytes(text)
    return folder / "config.json"


def index(shards: int, folder: Path) -> Path:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {f"x{i}": f"{i}.safetensors" for i in range(shards)}}), "utf-8")
    return file


# Pickles by hand


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integer(value: int) -> bytes:
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


def group(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + group(*arguments) + b"R"


def storage(elements: bytes = b"K\x04", key: str = "0", kind: str = "FloatStorage") -> bytes:
    return group(text("storage"), name("torch", kind), text(key), text("cpu"), elements) + b"Q"


def tensor(size: bytes, stride: bytes, content: bytes | None = None, offset: bytes = b"K\x00") -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    return call(name("torch._utils", "_rebuild_tensor_v2"), content or storage(), offset, size, stride, b"\x89", hooks)


SMALL = tensor(group(b"K\x02", b"K\x02"), group(b"K\x02", b"K\x01"))
DOUBLING = b"]q\0K\x01a" + b"".join(b"0]q%c(h%ch%ce" % (i + 1, i, i) for i in range(100))  # a list of 2^100 numbers
PAIRS = b"K\x01" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100))  # the same as tuples
DEEP = b"K\x01" + b"\x85" * 150_000
CONTENTS = {  # what stands in the place of a tensor
    "a tensor of 100,000 dimensions": tensor(group(integer(BILLION) * 100_000), group(b"K\x01" * 100_000)),
    "sizes of 2000 bits": tensor(group(integer(2**2000) * 8), group(b"K\x01" * 8)),
    "sizes whose product is too large": tensor(
        group(integer(BILLION), integer(BILLION), b"K\x00"), group(b"K\x01" * 3)
    ),
    "steps far beyond the file": tensor(group(b"K\x02"), group(integer(BILLION))),
    "a place far beyond the file": tensor(group(b"K\x02"), group(b"K\x01"), offset=integer(BILLION)),
    "a storage of 2^62 numbers": tensor(group(b"K\x02"), group(b"K\x01"), storage(integer(BILLION))),
    "a storage of 2^100 lists": tensor(group(b"K\x02"), group(b"K\x01"), storage(DOUBLING)),
    "a kind of storage of 2^100 lists": group(DOUBLING, b"NNNN") + b"Q",
    "a tensor of a list of lists": tensor(DOUBLING, DOUBLING),
    "a key whose hash takes forever": b"}" + PAIRS + b"K\x01s",
    "a key that is too deep to hash": b"}" + DEEP + b"K\x01s",
    "a long key, many times": group(b"K\x01" * 80_000) + b"q\0" + b"0}" + b"h\0Ns" * 30_000,
    "keys with one hash": b"}" + b"".join(integer(i * (2**61 - 1)) + b"Ns" for i in range(1, 60_000)),
    "keys whose hashes take forever": b"}(" + PAIRS + b"K\x01u",
    "pairs whose hashes take forever": call(name("collections", "OrderedDict"), b"]" + PAIRS + b"K\x01\x86a"),
    "a set whose hash takes forever": call(name("builtins", "set"), b"]" + PAIRS + b"a"),
    "a count whose hash takes forever": call(name("collections", "Counter"), b"]" + PAIRS + b"a"),
    "a state whose hash takes forever": call(name("collections", "OrderedDict")) + b"]" + PAIRS + b"K\x01\x86ab",
    "bytes of gigabytes": call(name("builtins", "bytearray"), integer(2**33)),
    "an empty tensor of gigabytes": call(name("torch", "FloatTensor"), integer(2**33)),
    "a function that is a list of lists": DOUBLING + b")R",
    "a class that is a list of lists": DOUBLING + b")\x81",
    "a function of a function": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("builtins", "bytearray"),
        name("torch", "Tensor"),
        group(integer(2**33)),
        b"}",
    ),
    "a codec that squares": call(name("_codecs", "encode"), text("\u0130" * 200_000), text("punycode")),
    "a number of megabytes": b"\x8b" + struct.pack("<i", 3 << 20) + b"\x7f" * (3 << 20),
    "a number in a million digits": b"L" + b"9" * 1_000_000 + b"L\n",
    "a million lists": b"]" * 1_000_000,
    "four million instructions": b"N0" * 2_000_000,
    "a far memory": b"}r\xff\xff\xff\x7f",
    "a name of a megabyte": name("torch." + "x" * 2**20, "y"),
    "a name without an end": b"c" + b"x" * 2**20,
    "a text without an end": b"X\xff\xff\xff\x7f",
}


def archive(
    content: bytes, folder: Path, ending: str = ".pt", compression: int = zipfile.ZIP_STORED, **members: bytes
) -> Path:
    file = folder / f"hostile{ending}"
    with zipfile.ZipFile(file, "w", compression) as opened:
        for member, data in (
            {"data.pkl": content, "version": b"3\n", "data/0": struct.pack("<4f", 1, 2, 3, 4)} | members
        ).items():
            opened.writestr(f"archive/{member}", data)
    return file


def packed(value: bytes, folder: Path) -> Path:
    return archive(_PICKLED + b"}" + text("x") + value + b"s.", folder)


def old(value: bytes, folder: Path, keys: bytes = b"]" + text("0") + b"a") -> Path:
    """The format before zip files."""
    magic = _PICKLED + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    content = _PICKLED + b"}" + text("x") + value.replace(text("cpu") + b"K\x04t", text("cpu") + b"K\x04Nt") + b"s."
    file = folder / "hostile.pt"
    file.write_bytes(
        magic
        + _PICKLED
        + b"M\xe9\x03."
        + _PICKLED
        + b"}."
        + content
        + _PICKLED
        + keys
        + b"."
        + struct.pack("<q4f", 4, 1, 2, 3, 4)
    )
    return file


def torchscript(value: bytes, folder: Path) -> Path:
    return archive(_PICKLED + module(x=value) + b".", folder, ".jit")


def module(**attributes: bytes) -> bytes:
    table = b"".join(text(key) + value for key, value in attributes.items())
    return name("__torch__.some", "Net") + b")\x81}(" + table + b"ub"


def named_far(folder: Path) -> Path:
    """A name of 100 kB, of which modules in modules make ever longer ones."""
    inner = module(x=SMALL)
    for _ in range(20):
        inner = name("__torch__", "Net") + b")\x81}(" + text("n" * 100_000) + inner + b"ub"
    return archive(_PICKLED + inner + b".", folder, ".jit")


def crowded(folder: Path) -> Path:
    """A module of 1000 numbers that is there 100,000 times."""
    inner = name("__torch__", "Net") + b")\x81q\0}(" + b"".join(text(f"n{i}") + b"N" for i in range(1000)) + b"ub"
    outer = b"".join(text(f"m{i}") + b"h\0" for i in range(100_000))
    return archive(_PICKLED + inner + b"0" + name("__torch__", "Net") + b")\x81}(" + outer + b"ub.", folder, ".jit")


def many_members(ending: str, folder: Path) -> Path:
    """A list of 300,000 members, each half a kilobyte in memory."""
    file = archive(_PICKLED + b"}.", folder, ending)
    content = file.read_bytes()
    begin = content.index(b"PK\1\2")
    entry = content[begin : content.index(b"PK\1\2", begin + 4)]
    entries = entry * 300_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(entries), begin, 0)
    file.write_bytes(content[:begin] + entries + end)
    return file


def overlapping(folder: Path) -> Path:
    """1000 members, each of which is the same megabyte."""
    file = archive(_PICKLED + b"}.", folder, ".jit", big=b"\0" * 2**20)
    content = file.read_bytes()
    begin = content.index(b"PK\1\2")
    last = content[content.rindex(b"PK\1\2") : content.rindex(b"PK\5\6")]
    entries = content[begin : content.rindex(b"PK\1\2")] + b"".join(
        last.replace(b"archive/big", b"archive/%03d" % i) for i in range(1000)
    )
    file.write_bytes(
        content[:begin] + entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1003, 1003, len(entries), begin, 0)
    )
    return file


def two_directories(folder: Path) -> Path:
    """Two lists of members: zipfile's is the one before the end, torch's the one that the end names."""
    folder.joinpath("inner").mkdir()
    bad = packed(CONTENTS["a key that is too deep to hash"], folder / "inner").read_bytes()
    file = archive(_PICKLED + b"}" + text("x") + SMALL + b"s.", folder)
    good = file.read_bytes()
    begin = good.index(b"PK\1\2")
    end = bad.rindex(b"PK\5\6")
    shown = good[begin : good.rindex(b"PK\5\6")]
    place = bad.index(b"PK\1\2")
    file.write_bytes(
        bad[:end] + good[:begin] + shown + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(shown), place, 0)
    )
    return file


def ranks(content: bytes, folder: Path) -> Path:
    (folder / "hostile.tiktoken").write_bytes(content)
    return folder / "hostile.tiktoken"


def table(content: bytes, ending: str, folder: Path) -> Path:
    (folder / f"hostile{ending}").write_bytes(content)
    return folder / f"hostile{ending}"


_JSON = {
    "a number of 100,000 digits": b'{"grid": ' + b"9" * 100_000 + b"}",
    "a number of 1000 digits": b'{"grid": ' + b"9" * 1000 + b"}",
    "lists in lists": b'{"grid": ' + b"[" * 900 + b"]" * 900 + b"}",
    "lists without an end": b'{"grid": ' + b"[" * 10_000_000,
    "five million lists": b'{"grid": [' + b"[]," * 5_000_000 + b"0]}",
    "a million tables": b'{"grid": [' + b'{"":0},' * 1_500_000 + b"0]}",
}
HOSTILE: dict[str, Callable[[Path], Path]] = {
    "safetensors: 100,000 dimensions": partial(safetensors, one_tensor([BILLION] * 100_000)),
    "safetensors: sizes whose product is too large": partial(safetensors, one_tensor([0, BILLION, BILLION], 0)),
    "safetensors: a size of 2^100": partial(safetensors, one_tensor([2**100])),
    "safetensors: a name of 100 kB": partial(safetensors, one_tensor([1], name="n" * 100_000), data=b"\0" * 4),
    "safetensors: 200,000 tensors": partial(
        safetensors, {f"{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
    ),
    "safetensors: settings in 5 million lists": partial(
        safetensors, {"__metadata__": {"specar": "[" + "[]," * 5_000_000 + "0]"}, **one_tensor([1])}, data=b"\0" * 4
    ),
    **{f"safetensors: {what}": partial(safetensors, text) for what, text in _JSON.items()},
    **{f"config.json: {what}": partial(settings, text) for what, text in _JSON.items()},
    "index: 100,000 shards": partial(index, 100_000),
    **{f"pickle: {what}": partial(packed, value) for what, value in CONTENTS.items()},
    **{f"old pickle: {what}": partial(old, value) for what, value in CONTENTS.items()},
    "old pickle: keys whose hashes take forever": partial(old, SMALL, keys=b"]" + PAIRS + b"a"),
    **{f"TorchScript: {what}": partial(torchscript, value) for what, value in CONTENTS.items()},
    "TorchScript: names in names": named_far,
    "TorchScript: a module in all places": crowded,
    "TorchScript: a list of members without an end": partial(many_members, ".jit"),
    "TorchScript: parts that overlap": overlapping,
    "pickle: a list of members without an end": partial(many_members, ".pt"),
    "pickle: two lists of members": two_directories,
    "ranks: millions of empty lines": partial(ranks, b"\n" * (30 << 20)),
    "ranks: millions of words": partial(ranks, b"a " * (3 << 20)),
    "ranks: a number of a million digits": partial(ranks, b"YQ== " + b"9" * 1_000_000),
    "jobs: a million columns": partial(table, b"a," * 1_000_000 + b"\n1", ".csv"),
    "jobs: a million rows": partial(table, b"prompt\n" + b"a\n" * 1_000_000, ".csv"),
    "jobs: a million wrong rows": partial(table, b"prompt\n" + b"a,b\n" * 1_000_000, ".csv"),
    "jobs: a file that is too large": partial(table, b"prompt\n" + b" " * (33 << 20), ".csv"),
    "jobs: a million values": partial(
        table, ("{" + ",".join(f'"{i}":0' for i in range(1_000_000)) + "}").encode(), ".jsonl"
    ),
    "jobs: a million wrong lines": partial(table, b"x\n" * 1_000_000, ".jsonl"),
    "jobs: a number of 100,000 digits": partial(table, b'{"seed": ' + b"9" * 100_000 + b"}", ".jsonl"),
    "jobs: lists without an end": partial(table, b'{"seed": ' + b"[" * 1_000_000, ".jsonl"),
}
