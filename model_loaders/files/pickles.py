"""Reading what torch.save wrote (.pt, .pth, .bin, .ckpt): tensors in containers of plain values, and nothing else."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # stands where files begin that PyTorch wrote before it took to zip files
_SPREAD = 4  # times a file's size that its tensors may take: some stand there under two names


class _InertNamespace:
    """Stands in for argparse.Namespace, which training scripts save beside the weights; ignores its content."""

    def __setstate__(self, state: Any) -> None:
        pass


def read_pickle(path: Path, mapped: bool) -> Any:
    """The content of a file, of which nothing is run; ``mapped``: its tensors are maps of it, where it is a zip file.

    Raises ValueError for one that is damaged or asks for more.
    """
    try:
        packed = _is_zip(path)
        allowed: list[Any] = []
        if packed and _unsafe_globals(path) == {"argparse.Namespace"}:
            allowed = [(_InertNamespace, "argparse.Namespace")]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=packed and mapped)
    except Exception as error:  # a pickle of nonsense can fail in any way
        unsafe = ", ".join(sorted(_unsafe_globals(path))[:3])
        raise ValueError(f"(It asks for {unsafe}.)" if unsafe else f"({str(error)[:200]})") from error


def _is_zip(path: Path) -> bool:
    """Is this a zip file, and not of the format before? Raises ValueError for what PyTorch did not write: its readers
    unpack anything, however much comes out."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == b"\x80" and _OLD in start:
        return False
    if not start.startswith(_ZIP):
        raise ValueError("PyTorch did not write it")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, which PyTorch does not do")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its parts are larger than the file")
    return True


def _unsafe_globals(path: Path) -> set[str]:
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if _is_zip(path) else set()
    except Exception:  # a pickle of nonsense can fail in any way, and then names nothing
        return set()


def refuse_unreal(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for tensors without numbers of their own in the file: a pickle may describe sparse ones, some on
    no device, and such as repeat one number as often as they like."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(f"{name} is no plain tensor")
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > _SPREAD * path.stat().st_size:
        raise ValueError("its tensors are larger than the file")
