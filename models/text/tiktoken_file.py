"""Tokenizers released as a file of ranks for OpenAI's tiktoken, read without that package.

A pattern splits a string into pieces. In every piece, adjacent byte strings are merged, the pair of the lowest rank
first, while the file contains the result (byte pair encoding, arXiv:1508.07909). Ranks are ids.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path

from ...limits.limits import RANKS
from ...model_loaders.files.checkpoint import refuse_large
from ...model_loaders.files.errors import CheckpointError
from .tokenizer import check_ids


class RankTokenizer:
    """A file of ranks, and the special tokens whose ids follow in this order; opened on first use.

    pattern: regular expression of the pieces, in the syntax of the ``tokenizers`` library. specials: all of the form
    <|...|>. stated: see check_ids.
    """

    def __init__(self, file: Path, pattern: str, specials: Sequence[str], stated: Mapping[str, int] | None = None):
        self.file, self.pattern, self.specials, self.stated = file, pattern, specials, stated or {}
        self._opened: tuple[Mapping[bytes, int], Mapping[str, int]] | None = None

    def _open(self) -> tuple[Mapping[bytes, int], Mapping[str, int]]:
        """(ranks, ids of the special tokens)."""
        if self._opened is None:
            ranks = read_ranks(self.file)
            specials = {name: len(ranks) + i for i, name in enumerate(self.specials)}
            check_ids(self.file, self.stated, specials.get)
            self._opened = ranks, specials
        return self._opened

    def ids(self, text: str) -> list[int]:
        """Ids of a string, which may contain special tokens; none are added."""
        from tokenizers import Regex, pre_tokenizers

        ranks, specials = self._open()
        splitter = pre_tokenizers.Split(Regex(self.pattern), "isolated")
        found: list[int] = []
        for part in _divided(unicodedata.normalize("NFC", text), specials):
            if part in specials:
                found.append(specials[part])
            elif part:
                for piece, _place in splitter.pre_tokenize_str(part):
                    found += joined(piece.encode(), ranks)
        return found

    def specials_in(self, text: str) -> list[str]:
        """The special tokens in a string, each once."""
        specials = self._open()[1]
        return [part for part in dict.fromkeys(_divided(text, specials)) if part in specials]

    def id(self, token: str) -> int:
        """Id of a special token. Raises CheckpointError if the tokenizer does not have it."""
        special = self._open()[1].get(token)
        if special is None:
            raise CheckpointError(
                f"{self.file} has no token {token}: it is the tokenizer of another model. Use the one released with it."
            )
        return special

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._pieces[id] for id in ids if id < len(self._pieces)).decode(errors="replace")

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The byte strings by rank."""
        ranks = self._open()[0]
        return sorted(ranks, key=ranks.__getitem__)

    def __len__(self) -> int:
        return sum(map(len, self._open()))


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


def _divided(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """A text in parts: special tokens, and what stands between them, which may look like one."""
    begin = 0
    for found in re.finditer(r"<\|[^|]*\|>", text):
        if found[0] in specials:
            yield text[begin : found.start()]
            yield found[0]
            begin = found.end()
    yield text[begin:]


def joined(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Ids of a piece (byte pair encoding): of equal ranks, the leftmost pair is joined first. n log n in its length."""
    if piece in ranks:
        return [ranks[piece]]
    size = len(piece)
    stops = [*range(1, size + 1), 0]  # where the part that begins at a byte stops; 0: none begins there
    starts = [*range(-1, size)]  # where the part that stops at a byte begins
    pairs: list[tuple[int, int, int, int]] = []  # rank, begin, middle, stop; those of parts that are gone, too

    def offer(begin: int, middle: int, stop: int) -> None:
        if (rank := ranks.get(piece[begin:stop])) is not None:
            heappush(pairs, (rank, begin, middle, stop))

    for begin in range(size - 1):
        offer(begin, begin + 1, begin + 2)
    while pairs:
        _, begin, middle, stop = heappop(pairs)
        if stops[begin] != middle or stops[middle] != stop:
            continue
        stops[begin], stops[middle], starts[stop] = stop, 0, begin
        if begin:
            offer(starts[begin], begin, stop)
        if stop < size:
            offer(begin, stop, stops[stop])
    return [ranks[piece[begin:stop]] for begin, stop in enumerate(stops) if stop]
