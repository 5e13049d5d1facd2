"""The part of fuzz.py that is about bytes, things that are no files, JSON, and the headers of safetensors.

Every change is made in place. One that a file of this kind cannot have raises ``UnfitError``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

ENORMOUS = 1 << 26  # bytes of a file that is not changed again
CANARY = "executed"  # a file that only content that is run would write, beside the changed one
SETTINGS = (  # that files of ours may have
    "heads grid defaults scale margin levels pixels_per_token first_step target head_steps caption_slots llm_heads "
    "codes words prompt rows"
).split()
DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "I32", "F32", "F64", "I64", "U64", "C64", "Q")


class UnfitError(Exception):
    """This file cannot be changed in this way."""


def small_files(folder: Path) -> list[Path]:
    """The files below a folder, but for those that were made enormous."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < ENORMOUS)


# Bytes


def truncate(file: Path, rng: random.Random) -> None:
    size = file.stat().st_size
    left = rng.choice([0, 1, 2, 7, 8, 9, 100, size // 2, max(size - 1, 0), rng.randrange(size + 1)])
    os.truncate(file, min(size, left))


def flip_bits(file: Path, rng: random.Random) -> None:
    """Anywhere, or in the first or last bytes, where headers and directories stand."""
    content = bytearray(file.read_bytes())
    if not content:
        raise UnfitError
    size = len(content)
    first, last = rng.choice([(0, size), (0, min(64, size)), (max(0, size - 200), size)])
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def overwrite(file: Path, rng: random.Random) -> None:
    """A block of zeros, ones, noise or of another place; or one put in, or taken out."""
    content = file.read_bytes()
    start, size = rng.randrange(len(content) + 1), rng.choice([1, 8, 64, 4096])
    other = rng.randrange(len(content) + 1)
    block = rng.choice([b"\0" * size, b"\xff" * size, rng.randbytes(size), content[other : other + size], b""])
    end = start + rng.choice([0, size])
    file.write_bytes(content[:start] + block + content[end:])


def become_enormous(file: Path, rng: random.Random) -> None:
    """A sparse file: gigabytes of zeros after the content, or instead of it."""
    if rng.random() < 0.5:
        file.write_bytes(b"")
    os.truncate(file, 3 << 30)


def become_noise(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.choice([rng.randbytes(rng.randrange(5000)), b"{" * 5000, b"PK\3\4" * 50, b"\x80\x02." * 9]))


def swap(file: Path, rng: random.Random) -> None:
    """The content of another file of the folder; it may be of another kind."""
    others = [other for other in small_files(file.parent) if other != file]
    if not others:
        raise UnfitError
    file.write_bytes(rng.choice(others).read_bytes())


# What is no file


def become_no_file(file: Path, rng: random.Random) -> None:
    """A folder, a pipe, a device, a link to one, to itself, to nothing, or to a file of the system; or gone."""
    file.unlink()
    kind = rng.choice(["folder", "pipe", "/dev/zero", "/dev/null", "/etc/passwd", "/nowhere", file.name, ".", "gone"])
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind != "gone":
        file.symlink_to(kind)


# JSON


ABSURD: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 5, 7, 1000, 10**12, -(10**12), 10**30, 0.5, -2.5, 1e308]
ABSURD += [float("nan"), float("inf"), "", "abc", "9" * 50, "x" * 100_000, "\0", "\ud800", "名前"]
ABSURD += ["../../etc/passwd", "/etc/passwd", ".", "..", "a/b", [], {}, [[]], [None], [1, 2, 3], [0] * 50_000]
ABSURD += [[10**9, 10**9], {"a": {"b": []}}, {"": 0}, ["default"], {"rope_type": ["x"]}]


def absurd(rng: random.Random) -> Any:
    """A value that no file of settings should hold there."""
    return copy.deepcopy(rng.choice(ABSURD))


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything in a JSON value; of long lists and tables only a part."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys)[:60]:
        found.append((value, key))
        places(value[key], found)
    return found


def edited(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to three changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = places(value, [])
        if not found or rng.random() < 0.02:
            return absurd(rng)
        container, key = rng.choice(found)
        change = rng.randrange(8)
        if change < 4:
            container[key] = absurd(rng)
        elif change == 4:
            del container[key]
        elif change == 5:
            container[key] = [container[key]]
        elif change == 6 and isinstance(container, dict):
            container[rng.choice(["extra", str(key) + "x", "grid", "heads", "", "../x"])] = container.pop(key)
        else:
            other, place = rng.choice(found)
            container[key] = json.loads(json.dumps(other[place])) if place in other or isinstance(other, list) else 0
    return value


def edit_json(file: Path, rng: random.Random) -> None:
    file.write_text(json.dumps(edited(read_json(file), rng)), encoding="utf-8")


def spell_json(file: Path, rng: random.Random) -> None:
    """The same, in an encoding or of a form that JSON does not have."""
    text = json.dumps(read_json(file))
    deep = 100_000
    bare = [b"null", b"[]", b'"text"', b"{}", b"1e999", b"[" * deep, b"[" * deep + b"]" * deep]
    encoded = [text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), text.encode() + b"\xff\xfe"]
    changed = [text * 2, '{"a":' * deep + "1" + "}" * deep, text.replace(":", ": NaN, "), text[:-1]]
    changed += [text.replace("1", "1" * 6000, 1), text.replace("{", '{"a": 1, "a": 2, ', 1), " " * 10**6 + text]
    file.write_bytes(rng.choice([*bare, *encoded, *(each.encode() for each in changed)]))


def lead_elsewhere(file: Path, rng: random.Random) -> None:
    """An index that names other files than the shards beside it, or itself."""
    index = read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise UnfitError
    targets = ["../../../../etc/passwd", "/etc/passwd", "..", ".", "", file.name, "config.json", "x" * 300, "a\0b"]
    targets += ["sub/../" + next(iter(shards.values())), "C:\\x", "\ud800", 5, None, ["a"], "/dev/zero"]
    target = rng.choice([*targets, "nothing-00001-of-00002.safetensors"])
    for name in rng.choice([list(shards)[:1], list(shards)]):
        shards[name] = target
    file.write_text(json.dumps(index), encoding="utf-8")


def read_json(file: Path) -> Any:
    if file.suffix != ".json":
        raise UnfitError
    return json.loads(file.read_text(encoding="utf-8"))


# safetensors


def split_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """(header, numbers)."""
    if file.suffix != ".safetensors":
        raise UnfitError
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join_safetensors(file: Path, header: bytes, numbers: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + numbers)


def edit_header(file: Path, rng: random.Random) -> None:
    """Shapes, types and places that lie; tensors that are missing, strange, or there twice."""
    header, numbers = split_safetensors(file)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        raise UnfitError
    name = rng.choice(names)
    entry, change = header[name], rng.randrange(9)
    if change == 0:
        entry["dtype"] = rng.choice(DTYPES)
    elif change == 1:
        shape = entry["shape"]
        shapes = [[10**9], [-1], [2**62, 4], [], [0], [0, 10**12], [1] * 1000, [2**63], ["1"], None, [1.5]]
        entry["shape"] = rng.choice([*shapes, shape[::-1], [1, *shape], [*shape, 1]])
    elif change == 2:
        end = len(numbers)
        offsets = [[0, 0], [0, 2**63], [-1, 4], [4, 0], [0, end], [0], None, [end, 2 * end]]
        entry["data_offsets"] = rng.choice([*offsets, header[rng.choice(names)]["data_offsets"]])
    elif change == 3:
        header[strange_name(name, rng)] = header.pop(name)
    elif change == 4:
        header[strange_name(name, rng)] = {"dtype": "F32", "shape": [0], "data_offsets": [len(numbers)] * 2}
    elif change == 5:
        del header[name]
    elif change == 6:
        header = edited(header, rng)
    elif change == 7:
        for each in names:
            header[each]["dtype"] = rng.choice(DTYPES)
    text = json.dumps(header).encode()
    if change == 8:
        twice = text[:-1] + b',"' + name.encode() + b'":' + json.dumps(entry).encode() + b"}"
        others = [text.decode().encode("utf-16"), text + b"\xff", text.replace(b"4", b"NaN", 1)]
        text = rng.choice([twice, b"[" * 10**5, b'{"a":' * 10**5, *others])
    join_safetensors(file, text, numbers)


def strange_name(name: str, rng: random.Random) -> str:
    """A tensor's name with other numbers or words."""
    number = rng.choice(["999999999", "-1", "1e9", "٣", "9" * 5000, "", "00"])
    digits = [part for part in name.split(".") if part.isdecimal()]
    renumbered = name.replace(f".{digits[0]}.", f".{number}.") if digits else number
    names = [renumbered, renumbered, name + ".x", "x" + name, "../../etc/passwd", "x" * 10**5, "", "\0"]
    return rng.choice([*names, name.replace("weight", "weight_scale"), "model." + name, f"layers.{number}.x"])


def lie_about_the_header(file: Path, rng: random.Random) -> None:
    split_safetensors(file)
    content = file.read_bytes()
    size = rng.choice([0, 1, 2**63, 2**64 - 1, len(content), len(content) - 8, 100 << 20, rng.randrange(2**32)])
    file.write_bytes(struct.pack("<Q", size) + content[8:])


def edit_metadata(file: Path, rng: random.Random) -> None:
    """The settings of our own files."""
    header, numbers = split_safetensors(file)
    own = json.loads(header.get("__metadata__", {}).get("specar", "{}"))
    if rng.random() < 0.5:  # one that this file may lack
        own[rng.choice(SETTINGS)] = absurd(rng)
    else:
        own = edited(own, rng)
    if rng.random() < 0.3:
        own = own if isinstance(own, dict) else {}
        settings = "cfg temperature top_k top_p order steps kind iterations cfg_schedule x".split()
        own["defaults"] = {rng.choice(settings): absurd(rng)}
    text = json.dumps(own)
    header["__metadata__"] = {"specar": rng.choice([text] * 8 + ["[" * 10**5, text[:-1], "NaN", "1" * 6000])}
    join_safetensors(file, json.dumps(header).encode(), numbers)
