"""Ways in which files go wrong, by accident and on purpose: each changes one file of a folder in place.

``MUTATIONS`` maps the name of a change to what it does: (file, random numbers) -> None. A change that a file of this
kind cannot have raises ``Unfit``. tests/unit/fuzz_seeds.py holds the sound files, and what is asked of a loader.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CANARY = "executed"  # a file that only content that is run would write, beside the changed one
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "I32", "F32", "F64", "I64", "U64", "C64", "Q")


class Unfit(Exception):
    """This file cannot be changed in this way."""


# Bytes


def truncate(file: Path, rng: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, rng.choice([0, 1, 2, 7, 8, 9, 100, size // 2, max(size - 1, 0), rng.randrange(size + 1)]) % (size + 1))


def flip_bits(file: Path, rng: random.Random) -> None:
    """Anywhere, or in the first or last bytes, where headers and directories stand."""
    content = bytearray(file.read_bytes())
    if not content:
        raise Unfit
    first, last = rng.choice([(0, len(content)), (0, min(64, len(content))), (max(0, len(content) - 200), len(content))])
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
    """A sparse file: gigabytes of zeros behind the content, or instead of it."""
    if rng.random() < 0.5:
        file.write_bytes(b"")
    os.truncate(file, 3 << 30)


def become_noise(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.choice([rng.randbytes(rng.randrange(5000)), b"{" * 5000, b"PK\3\4" * 50, b"\x80\x02." * 9]))


def swap(file: Path, rng: random.Random) -> None:
    """The content of another file of the folder; it may be of another kind."""
    others = [other for other in sorted(file.parent.rglob("*")) if other.is_file() and other != file]
    if not others:
        raise Unfit
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


def absurd(rng: random.Random) -> Any:
    """A value that no file of settings should hold there."""
    return rng.choice([
        None, True, False, 0, -1, 1, 2, 3, 5, 7, 1000, 10**12, -(10**12), 10**30, 0.5, -2.5, 1e308, float("nan"),
        float("inf"), "", "abc", "9" * 50, "x" * 100_000, "\0", "\ud800", "名前", "../../etc/passwd", "/etc/passwd", ".",
        "..", "a/b", [], {}, [[]], [None], [1, 2, 3], [0] * 50_000, [10**9, 10**9], {"a": {"b": []}}, {"": 0},
        ["default"], {"rope_type": ["x"]},
    ])  # fmt: skip


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
    file.write_bytes(rng.choice([
        text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), text.encode() + b"\xff\xfe", text.encode() * 2,
        b"[" * deep, b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep, text.replace(":", ": NaN, ").encode(),
        text.replace("1", "1" * 6000, 1).encode(), b"null", b"[]", b'"text"', b"{}", b"1e999", text[:-1].encode(),
        text.replace("{", '{"a": 1, "a": 2, ', 1).encode(), b" " * 10**6 + text.encode(),
    ]))  # fmt: skip


def lead_elsewhere(file: Path, rng: random.Random) -> None:
    """An index that names other files than the shards beside it, or itself."""
    index = read_json(file)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise Unfit
    target = rng.choice([
        "../../../../etc/passwd", "/etc/passwd", "..", ".", "", file.name, "config.json", "x" * 300, "a\0b", "/dev/zero",
        "sub/../" + next(iter(shards.values())), "C:\\x", "\ud800", 5, None, ["a"], "nothing-00001-of-00002.safetensors",
    ])  # fmt: skip
    for name in rng.choice([list(shards)[:1], list(shards)]):
        shards[name] = target
    file.write_text(json.dumps(index), encoding="utf-8")


def read_json(file: Path) -> Any:
    if file.suffix != ".json":
        raise Unfit
    return json.loads(file.read_text(encoding="utf-8"))


# safetensors


def split_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """(header, numbers)."""
    if file.suffix != ".safetensors":
        raise Unfit
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
        raise Unfit
    name = rng.choice(names)
    entry, change = header[name], rng.randrange(9)
    if change == 0:
        entry["dtype"] = rng.choice(DTYPES)
    elif change == 1:
        entry["shape"] = rng.choice([[10**9], [-1], [2**62, 4], [], [0], [0, 10**12], [1] * 1000, entry["shape"][::-1],
                                     [1, *entry["shape"]], entry["shape"] + [1], [2**63], ["1"], None, [1.5]])
    elif change == 2:
        entry["data_offsets"] = rng.choice([[0, 0], [0, 2**63], [-1, 4], [4, 0], header[rng.choice(names)]["data_offsets"],
                                            [0, len(numbers)], [len(numbers), 2 * len(numbers)], [0], None])
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
        text = rng.choice([text[:-1] + b',"' + name.encode() + b'":' + json.dumps(entry).encode() + b"}", b"[" * 10**5,
                           b'{"a":' * 10**5, text.decode().encode("utf-16"), text + b"\xff", text.replace(b"4", b"NaN", 1)])
    join_safetensors(file, text, numbers)


def strange_name(name: str, rng: random.Random) -> str:
    """A tensor's name with other numbers or words."""
    number = rng.choice(["999999999", "-1", "1e9", "٣", "9" * 5000, "", "00"])
    digits = [part for part in name.split(".") if part.isdecimal()]
    renumbered = name.replace(f".{digits[0]}.", f".{number}.") if digits else number
    return rng.choice([renumbered, renumbered, name + ".x", "x" + name, "../../etc/passwd", "x" * 10**5, "", "\0",
                       name.replace("weight", "weight_scale"), "model." + name, f"layers.{number}.x"])


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
        own[rng.choice(["heads", "grid", "defaults", "scale", "margin", "levels", "pixels_per_token", "first_step", "target",
                        "head_steps", "caption_slots", "llm_heads", "codes", "words", "prompt", "rows"])] = absurd(rng)
    else:
        own = edited(own, rng)
    if rng.random() < 0.3:
        own = own if isinstance(own, dict) else {}
        own["defaults"] = {rng.choice(["cfg", "temperature", "top_k", "top_p", "order", "steps", "kind", "iterations",
                                       "cfg_schedule", "x"]): absurd(rng)}
    text = json.dumps(own)
    header["__metadata__"] = {"specar": rng.choice([text] * 8 + ["[" * 10**5, text[:-1], "NaN", "1" * 6000])}
    join_safetensors(file, json.dumps(header).encode(), numbers)


# Tensors, in any container


def edit_tensor(file: Path, rng: random.Random) -> None:
    """Numbers, types and shapes that are legal in a file, and no model's."""
    tensors, save = opened(file)
    name = rng.choice(sorted(tensors))
    for each in [name] if rng.random() < 0.8 else sorted(tensors):
        if (changed := changed_tensor(tensors[each], rng)) is None:
            del tensors[each]
        else:
            tensors[each] = changed
    if rng.random() < 0.1:
        tensors[strange_name(name, rng)] = tensors.get(name, torch.zeros(1))
    save(tensors)


def changed_tensor(tensor: Tensor, rng: random.Random) -> Tensor | None:
    """None: the tensor is to be left out."""
    flat = tensor.flatten()
    return rng.choice([
        lambda: tensor.to(rng.choice([torch.int8, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64,
                                      torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])),
        lambda: tensor.float() * rng.choice([float("nan"), float("inf"), 0.0, 1e30, -1e4, 1e-40]),
        lambda: torch.cat((flat[:-1].float(), torch.tensor([rng.choice([float("nan"), float("-inf"), 3e38])]))).view_as(tensor)
        if len(flat) else tensor,
        lambda: tensor.mT if tensor.ndim > 1 else flat[None],
        lambda: tensor[..., :-1] if tensor.ndim else flat,
        lambda: torch.cat((tensor, tensor)) if tensor.ndim else flat,
        lambda: tensor[:0] if tensor.ndim else flat[:0],
        lambda: flat[0] if len(flat) else flat, lambda: flat, lambda: tensor[None], lambda: tensor[..., None],
        lambda: torch.zeros(rng.choice([(), (1,), (0, 3), (1, 1), (2, 2, 2), (3, 0, 5), (1000, 1000)])),
        lambda: None,
    ])()  # fmt: skip


def opened(file: Path) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], None]]:
    """The tensors of a file, and how to put others into it."""
    if file.suffix == ".safetensors":
        with safe_open(str(file), framework="pt") as content:
            metadata, tensors = content.metadata(), {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
        return tensors, lambda new: save_file(
            {name: tensor.clone().contiguous() for name, tensor in new.items()}, str(file), metadata)
    if file.suffix in PICKLES:
        content = torch.load(file, weights_only=True)
        inner = next((key for key, value in content.items() if isinstance(value, dict)), None)
        return dict(content if inner is None else content[inner]), lambda new: torch.save(
            new if inner is None else content | {inner: new}, file)
    raise Unfit


# Pickles, plain and in archives


def word(text: str) -> bytes:
    return b"X" + struct.pack("<i", len(text.encode())) + text.encode()


def hostile(canary: Path, rng: random.Random) -> bytes:
    """A pickle that writes the canary when it is read by an ordinary reader, or asks for endless memory."""
    touch, write = f"touch '{canary}'", f"open({str(canary)!r}, 'w')"
    module, name, argument = rng.choice([
        ("os", "system", touch), ("posix", "system", touch), ("nt", "system", touch), ("builtins", "eval", write),
        ("builtins", "exec", write), ("__builtin__", "eval", write), ("subprocess", "getoutput", touch),
        ("os", "popen", touch), ("timeit", "timeit", write), ("builtins", "open", str(canary)), ("pdb", "run", write),
        ("torch", "load", str(canary)), ("torch.hub", "load", str(canary)), ("torch.serialization", "load", str(canary)),
        ("numpy.testing._private.utils", "runstring", write), ("torch.jit", "load", str(canary)), ("runpy", "run_path", str(canary)),
        ("torch._utils", "_rebuild_tensor_v2.__globals__", write), ("torch.utils.collect_env", "run", touch),
        ("torch._inductor.codecache", "compile_file", touch), ("shutil", "rmtree", str(canary.parent)),
        ("argparse", "Namespace", write), ("builtins", "getattr", write), ("pathlib.Path", "touch", str(canary)),
    ])  # fmt: skip
    call = f"c{module}\n{name}\n(".encode() + word(argument) + b"tR"
    big = b"L" + str(10**12).encode() + b"L\n"
    grow = b"(lq\0" + b"".join(b"0(h%c" % i * 1 + b"h%c" % i + b"lq%c" % (i + 1) for i in range(100))  # 2^100 leaves
    return b"\x80\x02" + rng.choice([
        call, b"}" + word("model") + call + b"s", b"(" + word(argument) + f"i{module}\n{name}\n".encode(),
        f"c{module}\n{name}\n".encode() + word(argument) + b"\x85\x81", b"cbuiltins\nbytearray\n(" + big + b"tR",
        b"ctorch\nFloatTensor\n(" + big + b"tR", b"ctorch\nSize\n((" + big * 2 + b"ttR", grow, b"(" * 10**6, b"]" * 10**5,
        b"\x8e" + struct.pack("<Q", 2**62), b"X\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"}}" * 9,
        b"ccollections\nOrderedDict\n)R}" + word("__class__") + word("x") + b"sb", b"\x82\x01", b"Q", word("a") + b"Q",
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n(" + big * 2 + b"t(" + big * 2 + b"t\x89tR",
    ]) + b"."  # fmt: skip


def become_hostile(file: Path, rng: random.Random) -> None:
    """A pickle that attacks, alone or as the description of an archive."""
    if file.suffix not in (*PICKLES, ".jit"):
        raise Unfit
    attack = hostile(file.with_name(CANARY), rng)
    if file.suffix != ".jit" and rng.random() < 0.4:
        file.write_bytes(attack)
    else:
        rewrite_archive(file, lambda members: {name: attack if name.endswith("data.pkl") else content
                                               for name, content in members.items()})


def edit_archive(file: Path, rng: random.Random) -> None:
    """Members missing, cut, compressed, in another order, or with others' content; pickles with other codes."""
    if not zipfile.is_zipfile(file):
        raise Unfit

    def change(members: dict[str, bytes]) -> dict[str, bytes]:
        kind, name = rng.randrange(6), rng.choice(sorted(members))
        described = next(name for name in members if name.endswith("data.pkl"))
        if kind == 0:
            del members[name]
        elif kind == 1:
            members[name] = members[name][: rng.randrange(len(members[name]) + 1)]
        elif kind == 2:
            members[name] = members[rng.choice(sorted(members))]
        elif kind == 3:
            members[rng.choice(["../../x", "/etc/x", "archive/data/../x", ""])] = members.pop(name)
        else:
            content = bytearray(members[described])
            for _ in range(rng.choice([1, 1, 3, 10])):
                content[rng.randrange(len(content))] = rng.choice([rng.randrange(256), *b"(t.}Rb]\x81\x85q"])
            members[described] = bytes(content)
        return members

    rewrite_archive(file, change, zipfile.ZIP_DEFLATED if rng.random() < 0.15 else zipfile.ZIP_STORED)


def lie_about_tensors(file: Path, rng: random.Random) -> None:
    """A pickle whose tensor has a size, steps, a place or a storage that cannot be."""
    if file.suffix not in PICKLES:
        raise Unfit
    tensors, _ = opened(file)
    name = rng.choice(sorted(tensors))
    tensor, many = tensors[name], rng.choice([10**5, 10**9, 2**40])
    tensors[name] = rng.choice([
        lambda: tensor.flatten()[:1].expand(many), lambda: tensor.flatten()[:1].expand(10**5, 10**5), lambda: tensor.to("meta"),
        lambda: torch.empty(many, device="meta"), lambda: tensor.to_sparse(), lambda: torch.nn.Parameter(tensor.float()),
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8), lambda: tensor.to(torch.complex64).conj(),
        lambda: torch.nested.nested_tensor([tensor.flatten()]), lambda: tensor[None].expand(1, *tensor.shape).mT,
    ])()  # fmt: skip
    try:
        torch.save(tensors, file, _use_new_zipfile_serialization=rng.random() < 0.7)
    except Exception as error:  # not everything can be saved in every format
        raise Unfit from error


def become_bomb(file: Path, rng: random.Random) -> None:
    """An archive in which a few bytes stand for three gigabytes."""
    if not zipfile.is_zipfile(file):
        raise Unfit
    with zipfile.ZipFile(file) as archive:
        victim = rng.choice([name for name in archive.namelist() if name.endswith(("data.pkl", "data/0", "version"))])
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    megabyte = packer.compress(b"\0" * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(b"\0" * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
    packed = megabyte + again * 3070 + packer.flush()
    rewrite_archive(file, lambda members: members | {victim: packed})
    declared = struct.pack("<II", len(packed), 3071 << 20)
    content, stored = file.read_bytes(), struct.pack("<II", len(packed), len(packed))
    for mark, method, sizes in ((b"PK\3\4", 8, 18), (b"PK\1\2", 10, 20)):  # the member's two headers
        start = content.index(stored) - sizes if mark == b"PK\3\4" else content.rindex(stored) - sizes
        assert content[start : start + 4] == mark
        content = (content[: start + method] + b"\x08\0" + content[start + method + 2 : start + sizes] + declared
                   + content[start + sizes + 8 :])
    file.write_bytes(content)


def rewrite_archive(file: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]],
                    compression: int = zipfile.ZIP_STORED) -> None:
    if not zipfile.is_zipfile(file):
        raise Unfit
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in change(members).items():
            archive.writestr(name, content)


def become_tar(file: Path, rng: random.Random) -> None:
    """The oldest format of PyTorch, whose reader unpacks; with a member that would land elsewhere."""
    import io
    import tarfile

    if file.suffix not in PICKLES:
        raise Unfit
    with tarfile.open(file, "w") as archive:
        for name in ("storages", "tensors", "pickle", f"../{CANARY}", str(file.with_name(CANARY))):
            content = pickle.dumps(1) if "/" in name else hostile(file.with_name(CANARY), rng)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        truncate, flip_bits, overwrite, become_enormous, become_noise, swap, become_no_file, edit_json, spell_json,
        lead_elsewhere, edit_header, lie_about_the_header, edit_metadata, edit_tensor, become_hostile, edit_archive,
        lie_about_tensors, become_bomb, become_tar,
    )
}
OFTEN = ("edit json", "edit header", "edit metadata", "edit tensor", "edit archive", "flip bits")  # have most ways to go


def mutate(folder: Path, rng: random.Random) -> str:
    """Change one file below a folder, sometimes two; what was done, in words."""
    done = []
    for _ in range(1 if rng.random() < 0.85 else 2):
        while True:
            name = rng.choice([*MUTATIONS, *OFTEN * 2])
            file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()) or [None])
            if file is None:
                break
            try:
                MUTATIONS[name](file, rng)
            except Exception:  # made for files of another kind, or for sound ones
                continue
            done.append(f"{name}: {file.relative_to(folder)}")
            break
    return ", ".join(done)
