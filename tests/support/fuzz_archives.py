"""The part of fuzz.py that is about tensors in any container, pickles and archives."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .fuzz_files import CANARY, ENORMOUS, UnfitError, strange_name

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
DTYPES = (torch.int8, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.int64)
DTYPES += (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)


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
    return rng.choice(
        [
            lambda: tensor.to(rng.choice(DTYPES)),
            lambda: tensor.float() * rng.choice([float("nan"), float("inf"), 0.0, 1e30, -1e4, 1e-40]),
            lambda: torch.cat((flat[1:].float(), torch.tensor([rng.choice([float("nan"), 3e38])]))).view_as(tensor),
            lambda: tensor.mT if tensor.ndim > 1 else flat[None],
            lambda: tensor[..., :-1] if tensor.ndim else flat,
            lambda: torch.cat((tensor, tensor)) if tensor.ndim else flat,
            lambda: tensor[:0] if tensor.ndim else flat[:0],
            lambda: flat[0] if len(flat) else flat,
            lambda: flat,
            lambda: tensor[None],
            lambda: tensor[..., None],
            lambda: torch.zeros(rng.choice([(), (1,), (0, 3), (1, 1), (2, 2, 2), (3, 0, 5), (1000, 1000)])),
            lambda: None,
        ]
    )()


def opened(file: Path) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], None]]:
    """The tensors of a file, and how to put others into it."""
    if file.suffix == ".safetensors":
        with safe_open(str(file), framework="pt") as content:
            metadata, tensors = content.metadata(), {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
        return tensors, lambda new: save_file(
            {name: tensor.clone().contiguous() for name, tensor in new.items()}, str(file), metadata
        )
    if file.suffix in PICKLES:
        refuse_bomb(file)
        content = torch.load(file, weights_only=True)
        inner = next((key for key, value in content.items() if isinstance(value, dict)), None)
        return dict(content if inner is None else content[inner]), lambda new: torch.save(
            new if inner is None else content | {inner: new}, file
        )
    raise UnfitError


# Pickles, plain and in archives


def word(text: str) -> bytes:
    return b"X" + struct.pack("<i", len(text.encode())) + text.encode()


RUN = (  # functions that run a command, a line of Python, or what is in a file
    "os.system posix.system nt.system subprocess.getoutput os.popen torch.utils.collect_env.run "
    "torch._inductor.codecache.compile_file",
    "builtins.eval builtins.exec __builtin__.eval timeit.timeit pdb.run numpy.testing._private.utils.runstring "
    "argparse.Namespace builtins.getattr",
    "builtins.open torch.load torch.hub.load torch.jit.load runpy.run_path torch.serialization.load",
)
BIG = b"L" + str(10**12).encode() + b"L\n"
GROW = b"]q\0" + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(100))  # a list of 2^100 lists
ENDLESS = [
    b"cbuiltins\nbytearray\n(" + BIG + b"tR",
    b"ctorch\nFloatTensor\n(" + BIG + b"tR",
    b"ctorch\nSize\n((" + BIG * 2 + b"ttR",
    *(GROW, b"(" * 10**6, b"]" * 10**5, b"}}" * 9, b"\x82\x01", b"Q", word("a") + b"Q"),
    *(b"\x8e" + struct.pack("<Q", 2**62), b"X\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f"),
    b"ccollections\nOrderedDict\n)R}" + word("__class__") + word("x") + b"sb",
    b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n(" + BIG * 2 + b"t(" + BIG * 2 + b"t\x89tR",
]


def hostile(canary: Path, rng: random.Random) -> bytes:
    """A pickle that writes the canary when it is read by an ordinary reader, or asks for endless memory."""
    touch, write = f"touch '{canary}'", f"open({str(canary)!r}, 'w')"
    calls = [
        (*function.rsplit(".", 1), argument)
        for functions, argument in zip(RUN, (touch, write, str(canary)), strict=True)
        for function in functions.split()
    ]
    calls += [("torch._utils", "_rebuild_tensor_v2.__globals__", write), ("shutil", "rmtree", str(canary.parent))]
    module, name, argument = rng.choice([*calls, ("pathlib.Path", "touch", str(canary))])
    function = f"c{module}\n{name}\n".encode()
    call = function + b"(" + word(argument) + b"tR"
    attacks = [call, b"}" + word("model") + call + b"s", function + word(argument) + b"\x85\x81"]
    attacks.append(b"(" + word(argument) + f"i{module}\n{name}\n".encode())
    return b"\x80\x02" + rng.choice([*attacks * 2, *ENDLESS]) + b"."


def become_hostile(file: Path, rng: random.Random) -> None:
    """A pickle that attacks, alone or as the description of an archive."""
    if file.suffix not in (*PICKLES, ".jit"):
        raise UnfitError
    attack = hostile(file.with_name(CANARY), rng)
    if file.suffix != ".jit" and rng.random() < 0.4:
        file.write_bytes(attack)
    else:
        rewrite_archive(
            file,
            lambda members: {
                name: attack if name.endswith("data.pkl") else content for name, content in members.items()
            },
        )


def refuse_bomb(file: Path) -> None:
    """Archives that were made bombs are not unpacked again."""
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > ENORMOUS:
            raise UnfitError


def edit_archive(file: Path, rng: random.Random) -> None:
    """Members missing, cut, compressed, in another order, or with others' content; pickles with other codes."""
    if not zipfile.is_zipfile(file):
        raise UnfitError

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
        raise UnfitError
    tensors, _ = opened(file)
    name = rng.choice(sorted(tensors))
    tensor, many = tensors[name], rng.choice([10**5, 10**9, 2**40])
    tensors[name] = rng.choice(
        [
            lambda: tensor.flatten()[:1].expand(many),
            lambda: tensor.flatten()[:1].expand(10**5, 10**5),
            lambda: torch.empty(many, device="meta"),
            lambda: tensor.to("meta"),
            lambda: tensor.to_sparse(),
            lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
            lambda: torch.nn.Parameter(tensor),
            lambda: tensor.to(torch.complex64).conj(),
            lambda: torch.nested.nested_tensor([tensor.flatten()]),
            lambda: tensor[None].expand(1, *tensor.shape).mT,
        ]
    )()
    try:
        torch.save(tensors, file, _use_new_zipfile_serialization=rng.random() < 0.7)
    except Exception as error:  # not everything can be saved in every format
        raise UnfitError from error


def become_bomb(file: Path, rng: random.Random) -> None:
    """An archive in which a few bytes stand for three gigabytes."""
    if not zipfile.is_zipfile(file):
        raise UnfitError
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
        content = (
            content[: start + method]
            + b"\x08\0"
            + content[start + method + 2 : start + sizes]
            + declared
            + content[start + sizes + 8 :]
        )
    file.write_bytes(content)


def rewrite_archive(
    file: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], compression: int = zipfile.ZIP_STORED
) -> None:
    refuse_bomb(file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in change(members).items():
            archive.writestr(name, content)


def become_tar(file: Path, rng: random.Random) -> None:
    """The oldest format of PyTorch, whose reader unpacks; with a member that would land elsewhere."""
    if file.suffix not in PICKLES:
        raise UnfitError
    with tarfile.open(file, "w") as archive:
        for name in ("storages", "tensors", "pickle", f"../{CANARY}", str(file.with_name(CANARY))):
            content = pickle.dumps(1) if "/" in name else hostile(file.with_name(CANARY), rng)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
