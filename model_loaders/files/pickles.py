"""Reading what torch.save wrote (.pt, .pth, .bin, .ckpt): only tensors in containers of plain values."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ZIP = b"PK\3\4"
_OLD = b"\nl\xfc\x9cF\xf9 j\xa8P\x19"  # start of files in PyTorch's format before zip files
_SPREAD = 4  # maximum total size of the tensors, in file sizes: some have two names


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
        allowed: list[Any] = []
        if packed and _unsafe_globals(path) == {"argparse.Namespace"}:
            allowed = [(_InertNamespace, "argparse.Namespace")]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=packed and mapped)
    except Exception as error:  # a damaged pickle can raise anything
        unsafe = ", ".join(sorted(_unsafe_globals(path))[:3])
        raise ValueError(f"(It asks for {unsafe}.)" if unsafe else f"({str(error)[:200]})") from error


def _is_zip(path: Path) -> bool:
    """Whether this is a zip file, not the older format. Raises ValueError for zip files that PyTorch did not write,
    because its reader would decompress any amount of data."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == b"\x80" and _OLD in start:
        return False
    if not start.startswith(_ZIP):
        raise ValueError("PyTorch did not write it")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, which PyTorch's files are not")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its parts are larger than the file")
    return True


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
            raise ValueError(f"{name} is not a plain tensor")
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > _SPREAD * path.stat().st_size:
        raise ValueError("its tensors are larger than the file")
