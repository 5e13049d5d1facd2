"""Nearest neighbours of every code vector of a codebook.

The table of a large codebook takes seconds to compute, so it is stored in the user's cache folder. If the file is
missing or cannot be written, the table is computed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..limits.replacing import replace

log = logging.getLogger(__name__)

COLUMNS = 1000  # stored in a file, so that it also serves requests for fewer
WORTH_CACHING = 2**24  # pairs of codes: with at least these, reading a file is faster than computing
_CHUNK = 2**20  # pairs compared at a time


def neighbour_table(codebook: Tensor, count: int) -> Tensor:
    """Table [V, count] (int64): each code's neighbours by Euclidean distance in ``codebook`` [V, C], itself excluded.

    Ties are ordered by code number. Raises ValueError unless count is in 1 .. V - 1.
    """
    vocab = len(codebook)
    if not 1 <= count < vocab:
        raise ValueError(f"{count} neighbours were requested, but a codebook of {vocab} codes has 1 to {vocab - 1}.")
    codebook = codebook.detach().cpu().float().contiguous()
    if vocab**2 < WORTH_CACHING:
        return compute_neighbours(codebook, count).long()
    columns = min(max(count, COLUMNS), vocab - 1)
    path = cache_folder() / f"neighbours-{codebook_hash(codebook, columns)}.safetensors"
    table = _read(path, vocab, columns)
    if table is None:
        log.info("Computing the nearest neighbours of %d code vectors (once; the result is cached).", vocab)
        table = compute_neighbours(codebook, columns)
        _write(path, table)
    return table[:, :count].long()


def compute_neighbours(codebook: Tensor, count: int) -> Tensor:
    """The same table (int32) without a cache, in chunks of rows: at most about a million distances at a time."""
    vectors = codebook.double()
    norm = vectors.square().sum(-1)
    code = torch.arange(len(codebook))
    table = torch.empty((len(codebook), count), dtype=torch.int32)
    for mine in code.split(max(1, _CHUNK // len(codebook))):
        scale = norm[mine, None] + norm
        square = scale - 2 * vectors[mine] @ vectors.T
        square = torch.where(square > 1e-12 * scale, square, 0).float()  # equal vectors have distance exactly 0
        square[torch.arange(len(mine)), mine] = torch.inf
        # Bits of non-negative floats sort like the floats; the code's number in the low bits breaks ties.
        key = (square.view(torch.int32).long() << 32) | code
        table[mine] = (key.topk(count, largest=False).values & 0xFFFFFFFF).int()
    return table


def codebook_hash(codebook: Tensor, columns: int) -> str:
    """Hash of a codebook and the number of columns, for the file name of its table."""
    header = f"{tuple(codebook.shape)} {columns}".encode()
    return hashlib.sha256(header + codebook.numpy().tobytes()).hexdigest()[:24]


def cache_folder() -> Path:
    """The user's cache folder for this pack, by the platform's convention."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "comfyui-specar"


def _read(path: Path, vocab: int, columns: int) -> Tensor | None:
    """The table in a cache file, or None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        table = load_file(path)["neighbours"]
    except (SafetensorError, OSError, KeyError) as error:
        log.warning("The cached neighbour table %s is damaged (%s) and is computed again.", path, error)
        return None
    legal = table.shape == (vocab, columns) and table.dtype == torch.int32
    if not (legal and (table >= 0).all() and (table < vocab).all()):
        log.warning("The cached neighbour table %s does not fit its codebook and is computed again.", path)
        return None
    return table


def _write(path: Path, table: Tensor) -> None:
    """Write a table atomically. If the folder is not writable, only log a warning."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        os.close(handle)
        save_file({"neighbours": table}, temporary)
        replace(Path(temporary), path)
    except (OSError, SafetensorError) as error:
        log.warning("The neighbour table could not be cached in %s (%s).", path.parent, error)
        if temporary:
            Path(temporary).unlink(missing_ok=True)
