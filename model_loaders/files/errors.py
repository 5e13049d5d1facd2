"""Errors about files: which file, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...limits.limits import FileError

_PAGE_FILE = re.compile(r"(os error |error code: <|WinError )1455\b")  # in messages of safetensors, PyTorch and Python
_NO_MEMORY = re.compile(r"not enough memory|(can't|cannot) allocate memory", re.IGNORECASE)


class CheckpointError(FileError):
    """A weight file that cannot be used; the message names the file, the reason and the remedy."""


@contextmanager
def incomplete_without(needed: str, path: Path) -> Iterator[None]:
    """Convert the error of reading sizes from a missing tensor to a CheckpointError that says what is needed."""
    try:
        yield
    except (KeyError, ValueError) as error:  # a tensor that determines a size is missing, or a group of them
        raise CheckpointError(
            f"{path.name} is incomplete ({error}): {needed} are needed. Download it again."
        ) from error


@contextmanager
def as_released(path: Path) -> Iterator[None]:
    """Convert any error of reading a malformed file to a CheckpointError: a tensor without dimensions, strings in place
    of numbers in config.json ..."""
    try:
        yield
    except (CheckpointError, torch.cuda.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, RuntimeError) as error:
        raise_if_out_of_memory(error, path)
        raise CheckpointError(
            f"{path.name}, its metadata or the config.json beside it is not as released: {error} "
            f"({type(error).__name__}). Download them again."
        ) from error


def raise_if_out_of_memory(error: BaseException, path: Path) -> None:
    """Raise CheckpointError if ``error`` means that memory was too short to read a file or hold its weights."""
    text = " ".join(str(cause) for cause in (error, error.__cause__) if cause)
    size = f"{path.name} ({path.stat().st_size / 1e9:.1f} GB)" if path.is_file() else path.name
    if _PAGE_FILE.search(text):
        raise CheckpointError(
            f"Windows cannot reserve memory for {size}, because its page file is too small (error 1455). Let Windows "
            "manage the size of the page file (System > About > Advanced system settings > Performance > Advanced > "
            "Virtual memory), close other programs, or start ComfyUI with --disable-mmap."
        ) from error
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError) or _NO_MEMORY.search(text):
        raise CheckpointError(
            f"There is not enough memory to load {size}. Close other programs, or choose a dtype with fewer bytes."
        ) from error
