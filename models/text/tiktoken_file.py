"""Tokenizers released as a file of ranks for OpenAI's tiktoken, read without that package.

A pattern splits a string into pieces. In every piece, adjacent byte strings are merged, the pair of the lowest rank
first, while the file contains the result (byte pair encoding, arXiv:1508.07909). Ranks are ids.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...limits.limits import RANKS
from ...model_loaders.files.checkpoint import refuse_large
from ...model_loaders.files.errors import CheckpointError


def tokenizer_of(file: Path, pattern: str, specials: Sequence[str]) -> Any:
    """The tokenizers.Tokenizer of a file of ranks, and of the special tokens whose ids follow in this order.

    pattern: regular expression of the pieces, in the syntax of the ``tokenizers`` library. Raises CheckpointError for a
    damaged file.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = read_ranks(file)
    letters = dict(zip(sorted(range(256), key=_is_control), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    names = {piece: "".join(map(letters.__getitem__, piece)) for piece in ranks}
    merges = [
        (names[piece[:cut]], names[piece[cut:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    found = Tokenizer(models.BPE({names[piece]: rank for piece, rank in ranks.items()}, merges, ignore_merges=True))
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, normalized=True) for name in specials])
    return found


def _is_control(byte: int) -> bool:
    """Whether the byte-level alphabet writes a byte as another letter than Latin-1's, in the order of these bytes."""
    return not (33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Byte string -> rank. Lines have a base64 byte string and its rank. Raises CheckpointError for a damaged file."""
    try:
        refuse_large(file, RANKS)
        lines = (line.split(maxsplit=2) for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from error
    if set(ranks.values()) != set(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{file} is incomplete: ranks or single bytes are missing. Download it again.")
    return ranks
