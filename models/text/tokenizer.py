"""Tokenizers of language models."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ...limits.limits import ADDED, GROWTH, TOKENIZER, TOKENS, FileError
from ...model_loaders.files.checkpoint import read_settings, refuse_large
from ...model_loaders.files.errors import CheckpointError

_ADDING = ("added_tokens.json", "tokenizer_config.json")


def find_tokenizer(
    path: Path, names: Sequence[str], search: Sequence[Path], files: Sequence[str] = ("tokenizer.json",)
) -> Path | None:
    """The first of ``files`` in the model's Hugging Face folder, in the folder named as the weight file, or in one of
    the folders ``names`` beside it or in the search folders."""
    own = [path.parent, path.parent / path.stem]
    folders = [*own, *(folder / name for folder in (path.parent, path.parent.parent, *search) for name in names)]
    return next((folder / file for folder in folders for file in files if (folder / file).is_file()), None)


@contextmanager
def convert_errors(path: Path, wanted: str = "") -> Iterator[None]:
    """Convert errors of the tokenizer library to CheckpointError: plain exceptions, and Rust panics, which do not
    derive from Exception and would end the thread."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path} cannot be read{wanted}: {error}. Download it again.") from error


def check_ids(file: Path, stated: Mapping[str, int], id_of: Callable[[str], int | None]) -> None:
    """Raise CheckpointError unless the tokenizer ``file`` gives special tokens the ids ``stated`` by the model's own
    files (or, where these state none, those of the released models)."""
    for token, wanted in stated.items():
        if (found := id_of(token)) != wanted:
            has = "has no token" if found is None else f"has the id {found} for"
            raise CheckpointError(
                f"{file} {has} {token}, which has the id {wanted} in the model's files: it is the "
                "tokenizer of another model. Use the one released with it."
            )


class Tokenizer:
    """A language model's tokenizer, opened on first use: its tokenizer.json, or the vocab.json of Qwen2 with merges.txt
    and added_tokens.json beside it.

    file None: it was not found; ``missing`` is the error message. stated: see check_ids. words: ids that the model has
    for text (None: not known here). What the file says about cutting or padding texts is not used: programs save there
    how they called the tokenizer last. Nor is what it puts around them. read: makes the library's tokenizer of a file
    (None: as above).
    """

    def __init__(
        self,
        file: Path | None,
        missing: str,
        stated: Mapping[str, int] | None = None,
        words: int | None = None,
        read: Callable[[Path], Any] | None = None,
    ):
        self.file, self.missing, self.stated, self.words = file, missing, stated or {}, words
        self.read = read or _read_tokenizer
        self._opened = None

    @property
    def _path(self) -> Path:
        if self.file is None:
            raise FileNotFoundError(self.missing)
        return self.file

    def _open(self) -> Any:
        path = self._path
        if self._opened is None:
            with convert_errors(path):
                opened = self.read(path)
                refuse_growth(opened.normalizer)
            opened.no_truncation()
            opened.no_padding()
            opened.post_processor = _alone()
            count = opened.get_vocab_size()
            if self.words is not None and count > self.words:
                raise CheckpointError(
                    f"{path} has {count} tokens, but the model {self.words}: it is the "
                    "tokenizer of another model. Use the one released with it."
                )
            check_ids(path, self.stated, opened.token_to_id)
            self._opened = opened
        return self._opened

    def ids(self, text: str) -> list[int]:
        """Ids of a string, which may contain special tokens; none are added."""
        opened = self._open()
        with convert_errors(self._path):
            return opened.encode(text, add_special_tokens=False).ids

    def specials_in(self, text: str) -> list[str]:
        """The special tokens in a string, each once. Some files also list plain letters among the tokens that were
        added."""
        ids = dict.fromkeys(self.ids(text))
        with convert_errors(self._path):
            added = self._open().get_added_tokens_decoder()
        tokens = (added[id] for id in ids if id in added)
        marked = [token.content for token in tokens if token.special or token.content.startswith("<")]
        return [name for name in marked if name in text]  # an unknown letter has the id of a special token, too

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that stand for nothing."""
        opened = self._open()
        with convert_errors(self._path):
            return opened.decode(list(ids), skip_special_tokens=True)

    def beyond(self, text: str, count: int) -> str:
        """The part of a string that lies beyond its first ``count`` tokens."""
        opened = self._open()
        with convert_errors(self._path):
            ends = [end for _, end in opened.encode(text, add_special_tokens=False).offsets]
        return text[ends[count - 1] :].strip() if len(ends) > count else ""

    def id(self, token: str) -> int:
        """Id of one token. Raises CheckpointError if the tokenizer does not have it."""
        opened = self._open()
        with convert_errors(self._path):
            found = opened.token_to_id(token)
        if found is None:
            raise CheckpointError(
                f"{self.file} has no token {token}: it is the tokenizer of another model. Use the one released with it."
            )
        return found

    @cached_property
    def first(self) -> int:
        """Id of the token before every text: the bos_token of the tokenizer_config.json beside it or, as Qwen has none,
        the eos_token.

        Raises FileNotFoundError without a tokenizer, CheckpointError if that file is missing or names neither.
        """
        self._open()
        file = self._path.parent / "tokenizer_config.json"
        settings = read_settings(file, TOKENS)
        token = settings.get("bos_token") or settings.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            raise CheckpointError(
                f"{file}, which names the first token of every prompt, is missing or names none. "
                "Download the one that belongs to tokenizer.json."
            )
        return self.id(token)

    def __len__(self) -> int:
        return self._open().get_vocab_size()


def refuse_growth(normalizer: Any) -> None:
    """Raise FileError for a normalizer that makes much of little: each step may write a text for a character."""
    growth, steps = 1, [json.loads(normalizer.__getstate__())] if normalizer else []
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", ())
        growth *= prod(max(1, len(step.get(text, ""))) for text in ("content", "prepend"))
    if growth > GROWTH:
        raise FileError(f"it writes more than {GROWTH} characters for one")


def _alone():
    """A post-processor that puts nothing around a text."""
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])


def _read_tokenizer(file: Path):
    """The tokenizers.Tokenizer of a file. Raises exceptions of its libraries, CheckpointError for files that are too
    large."""
    import tokenizers

    if file.name != "vocab.json":
        refuse_large(file, TOKENIZER)
        return tokenizers.Tokenizer.from_buffer(file.read_bytes().removeprefix(BOM_UTF8))
    from transformers import Qwen2TokenizerFast

    for each in (*file.parent.glob("*.json"), *file.parent.glob("*.txt"), *file.parent.glob("*.jinja")):
        refuse_large(each, ADDED if each.name in _ADDING else TOKENIZER)
    with convert_errors(file, " as Qwen2's tokenizer, to which merges.txt and tokenizer_config.json belong"):
        return Qwen2TokenizerFast.from_pretrained(file.parent, local_files_only=True).backend_tokenizer
