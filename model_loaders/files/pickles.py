"""Reading what torch.save wrote (.pt, .pth, .bin, .ckpt): only tensors in containers of plain values."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits import PICKLE, SPREAD, FileError
from .archives import members_of, pickle_in, rehearse, rehearse_old, stored

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # start of files in PyTorch's format before zip files


class _InertNamespace:
    """Replaces argparse.Namespace, which training scripts save with the weights; ignores its content."""

    def __setstate__(self, state: Any) -> None:
        pass


def read_pickle(path: Path, mapped: bool) -> Any:
    """The content of a file, without executing anything. mapped: memory-map the tensors of a zip file.

    Raises ValueError for a file that is damaged or contains more than plain weights.
    """
    try:
        packed = _is_zip(path)
        _rehearse(path, packed)
    except FileError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(f"({type(error).__name__}: {error})") from error
    try:
        allowed: list[Any] = []
        if packed and _unsafe_globals(path) == {"argparse.Namespace"}:
            allowed = [(_InertNamespace, "argparse.Namespace")]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=packed and mapped)
    except Exception as error:  # a damaged pickle can raise anything
        unsafe = ", ".join(sorted(_unsafe_globals(path))[:3])
        raise FileError(f"(It asks for {unsafe}.)" if unsafe else f"({str(error)[:200]})") from error


def _is_zip(path: Path) -> bool:
    """Whether this is a zip file, not the older format. Raises ValueError for zip files that PyTorch did not write,
    because its reader would decompress any amount of data."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == b"\x80" and _OLD in start:
        return False
    if not start.startswith(_ZIP):
        raise FileError("PyTorch did not write it")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members_of(path).values()):
        raise FileError("it is compressed, which PyTorch's files are not")
    return True


def _rehearse(path: Path, packed: bool) -> None:
    """Raise an exception for a file with a pickle that would take torch's reader any time or memory."""
    size = path.stat().st_size
    if packed:
        with zipfile.ZipFile(path) as archive:
            rehearse(pickle_in(archive, stored(members_of(path), "data.pkl")), size)
        return
    with path.open("rb") as file:
        start = file.read(PICKLE)
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(start[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        raise FileError("it is a tar archive")
    rehearse_old(io.BytesIO(start), size)


def _unsafe_globals(path: Path) -> set[str]:
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if _is_zip(path) else set()
    except Exception:  # a damaged pickle can raise anything; then there is nothing to name
        return set()


def refuse_unreal(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for tensors whose data is not in the file: a pickle may describe sparse tensors, tensors on the
    meta device, and expanded ones."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
            raise FileError(f"{name} is not a plain tensor")
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > SPREAD * path.stat().st_size:
        raise FileError("its tensors are larger than the file")
