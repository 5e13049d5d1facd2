"""Prompt -> features (``encode(text) -> [1, n, F]``, fp32): the bundled word table, token ids, class names.

(T5 is in model_loaders/text/t5.py.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import torch
from torch import Tensor

from ...limits.limits import WORDS, FileError, legal_name
from ...model_loaders.files.checkpoint import CheckpointError, open_checkpoint
from .prompt_syntax import words_of
from .tokenizer import Tokenizer

Images = Sequence[Tensor]  # token grids [h, w] (int64) of the images of a prompt
SHOWN = 300  # characters of a prompt in a notice
HINTS = 6  # unknown words in a notice
LATIN = "a-z0-9\u00df-\u024f"
# A word, one in another script, or a symbol such as an emoji.
WORD = re.compile(rf"[{LATIN}]+(?:[_'-]+[{LATIN}]+)*|[^\W{LATIN}_]+|[\u2190-\u2bff\U0001f000-\U0001faff]")


class PromptEncoder(Protocol):
    """slots: the most features of a prompt that ``encode`` makes. Default: no limit."""

    slots: int = sys.maxsize

    def encode(self, text: str) -> Tensor:
        """Features [1, n, F] (fp32, CPU) of a prompt, valid slots only; raises ValueError with a remedy."""
        ...

    def notices(self, text: str) -> list[str]:
        """What of a prompt ``encode`` leaves out, or does not read as words, a sentence each."""
        return []


class WordEncoder(PromptEncoder):
    """One learned vector per known word: the bundled model's text encoder.

    A colour belongs to the noun after it: "on a blue background" becomes the single word ``bg_blue``, and "red curly
    hair" ``hair_red`` and ``curly``, if these are ``nouns`` with the prefixes ``bg`` and ``hair``, and have these
    colours. Stop words are removed, synonyms replaced, and at most ``slots`` words used; ``fills``: these are repeated
    until they fill all slots. (LlamaGen's caption slots have keys of zero, so the attention that a prompt gets beside
    the image tokens grows with their number.)
    """

    def __init__(
        self,
        table: Tensor,
        words: list[str],
        stop_words: list[str],
        synonyms: dict[str, str],
        nouns: dict[str, str],
        slots: int,
        fills: bool = False,
    ):
        self.table, self.words, self.slots, self.fills = table.float(), words, slots, fills
        self.index = {word: i for i, word in enumerate(words)}
        self.stop_words, self.synonyms, self.nouns = set(stop_words), synonyms, nouns
        self.noun_of = {prefix: next(n for n in nouns if nouns[n] == prefix) for prefix in nouns.values()}
        coloured = filter(self._is_coloured, (*words, *synonyms))
        self.colours = list(dict.fromkeys(word.split("_", 1)[1] for word in coloured))

    @classmethod
    def open(cls, path: Path, slots: int) -> WordEncoder:
        """Read ``text_encoder.safetensors``. Raises CheckpointError if it is another kind of file."""
        checkpoint = open_checkpoint(path, mapped=False)  # a small table, not worth a memory map
        table, metadata = checkpoint.tensors.get("word_embeddings.weight"), checkpoint.metadata
        try:
            words, stop_words = (_legal_words(metadata.get(name)) for name in ("words", "stop_words"))
            synonyms = _legal_pairs(metadata.get("synonyms"))
            nouns = _legal_pairs(metadata.get("nouns", {"background": "bg"}))
            if table is None or table.ndim != 2 or len(table) != len(words):
                raise FileError("its table does not fit its words")
            if not table.float().isfinite().all():
                raise FileError("its table has NaN or infinite values")
        except FileError as error:
            raise CheckpointError(
                f"{path.name} is not a word-table text encoder, or damaged: {error}. Download it again."
            ) from error
        return cls(table, words, stop_words, synonyms, nouns, slots, metadata.get("fills") is True)

    def parse(self, text: str) -> tuple[list[str], list[str]]:
        """(known words in order, unknown words) of a prompt."""
        text = re.sub(r"[()\[\]{}]|:[\d.]+", " ", words_of(text))  # what other models read as weights
        text = " ".join(text.lower().split())  # the next line takes the square of a gap's length
        colours, nouns = ("|".join(map(re.escape, each)) for each in (self.colours, self.nouns))
        text = re.sub(rf"\b(?:on|with|against)?\s*(?:an?|the)?\s*({colours})\s+({nouns})\b", self._bound, text)
        known, unknown = [], []
        words: list[str] = WORD.findall(text)
        for word in words:
            forms = (word, word.rstrip("s"), word.removesuffix("es"))
            form = next((each for each in forms if each in self.index or each in self.synonyms), word)
            for part in self.synonyms.get(form, form).split():
                if part in self.index:
                    known.append(part)
                elif part not in self.stop_words:
                    unknown.append(part)
        return list(dict.fromkeys(known)), list(dict.fromkeys(unknown))

    def _bound(self, match: re.Match[str]) -> str:
        """The word for a noun's colour, and the noun if it is a word, too; the same text if it has no such colour."""
        colour, noun = match.groups()
        word = f"{self.nouns[noun]}_{colour}"
        if word not in self.index and word not in self.synonyms:
            return match[0]
        return f" {word} {noun if noun in self.index or noun in self.synonyms else ''} "

    def _is_coloured(self, word: str) -> bool:
        return "_" in word and word.split("_", 1)[0] in self.noun_of

    def _as_asked(self, word: str) -> str:
        """``bg_blue`` -> "blue background"."""
        if not self._is_coloured(word):
            return word
        prefix, colour = word.split("_", 1)
        return f"{colour} {self.noun_of[prefix]}"

    def resembling(self, word: str) -> str:
        """The known word that an unknown one may be a misspelling of; "" if there is none."""
        words = [known for known in (*self.words, *self.synonyms) if not self._is_coloured(known)]
        words += [*self.colours, *self.nouns]
        return "".join(get_close_matches(word, words, 1, cutoff=0.75))

    def known_words(self) -> list[str]:
        """The words to ask with: those of subjects and styles, then the coloured ones."""
        return [self._as_asked(word) for word in sorted(self.words, key=self._is_coloured)]

    def notices(self, text: str) -> list[str]:
        """Unknown words, each with the known one that it resembles, and known words beyond the slots. Where one
        resembles none, three that are known."""
        known, unknown = self.parse(text)
        likes = {word: self.resembling(word) for word in unknown[:HINTS]}
        named = ", ".join(self._hint(word, like) for word, like in likes.items())
        named += f" and {len(unknown) - HINTS} more" * (len(unknown) > HINTS)
        rest = left_out(self.slots, "words of a prompt", ", ".join(map(self._as_asked, known[self.slots :])))
        if not unknown and (known or not text.strip()):
            return rest
        said = "The model ignores these words" if known else "The model knows none of these words"
        said = f"{said}: {named or shorten(text, SHOWN)}."
        if not known or "" in likes.values():
            words, subjects = self.known_words(), [word for word in self.words if not self._is_coloured(word)]
            examples = dict.fromkeys((*subjects[-1:], *subjects[:1], *words[-1:]))
            said += f" Try: {', '.join(examples)}. All {len(words)} words: AR Model Info."
        return [said, *rest]

    def _hint(self, word: str, like: str) -> str:
        """An unknown word, with the known one that it resembles ("": none)."""
        more = like and f"{like}?"
        if like == word:
            nouns = [n for prefix, n in self.noun_of.items() if {f"{prefix}_{word}"} & {*self.index, *self.synonyms}]
            more = f"only as the colour of {', '.join(nouns)}" if nouns else "only with a colour"
        return f"{word:.{SHOWN}}" + (f" ({more})" if more else "")

    def encode(self, text: str) -> Tensor:
        """Features [1, n, F] of the n known words, or of all slots if they are filled."""
        known, _ = self.parse(text)
        known = (known * self.slots if self.fills else known)[: self.slots]
        return self.table[[self.index[word] for word in known]][None]


def _legal_words(words: Any) -> list[str]:
    """A list of words from a file, which notices quote. Raises FileError unless they are at most WORDS strings."""
    if not isinstance(words, list) or len(words) > WORDS:
        raise FileError(f"a list of words is missing, or has more than {WORDS}")
    return [legal_name(word) for word in words]


def _legal_pairs(pairs: Any) -> dict[str, str]:
    """A table of words from a file; otherwise as :func:`_legal_words`."""
    if not isinstance(pairs, dict):
        raise FileError("a table of words is missing")
    return dict(zip(_legal_words([*pairs]), _legal_words([*pairs.values()]), strict=True))


def left_out(slots: int, units: str, rest: str) -> list[str]:
    """What to say where an encoder of so many slots leaves out the ``rest`` of a prompt; nothing if that is empty."""
    return [f"The model reads at most {slots} {units} and leaves out: {shorten(rest, SHOWN)}."] * bool(rest)


def special_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """What to say of the special tokens that a user wrote: as in the authors' code, they stay what they are."""
    names = shorten(", ".join(tokenizer.specials_in(text)), SHOWN)
    return [
        f"The model reads these as its special tokens, not as words: {names}. Leave them out, unless you mean them: it "
        "adds its own."
    ] * bool(names)


def grids_of(images: Images) -> list[tuple[int, int]]:
    """Rows and columns of each of the images."""
    return [(image.shape[0], image.shape[1]) for image in images]


def features_of(ids: Sequence[int]) -> Tensor:
    """Token ids as the features [1, n, 1] of a CONDITIONING, in fp32 as every model's."""
    return torch.tensor(ids, dtype=torch.float32)[None, :, None]


@dataclass(frozen=True)
class ImagePrompts:
    """How a language model was trained to read images with a prompt.

    most: images of a prompt. codes: different tokens of an image. scaled: (image [H, W, 3] in 0..1, pixels per token)
    -> the image in the size in which it is encoded; raises ValueError for a shape that the model does not read. write:
    (prompt, grid of the new image, token grids of the images) -> all ids before the first new image token.
    write_negative: the same for the second branch of guidance, whose text is empty where there is none (None: that
    branch reads no images). seen: what the encoder in the model's own files reads instead of what is ``scaled`` (None:
    it has none, and the image decoder's encoder is used). params: the authors' SamplingParams for prompts with images
    that differ from those without.
    """

    most: int
    codes: int
    scaled: Callable[[Tensor, int], Tensor]
    write: Callable[[str, tuple[int, int], Images], Sequence[int]]
    write_negative: Callable[[str, tuple[int, int], Images], Sequence[int]] | None = None
    seen: Callable[[Tensor, int], Tensor] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenEncoder(PromptEncoder):
    """The tokenizer of a language model, with the prompt template of its training.

    write: (prompt, grid (rows, cols) of the image) -> all ids before the first image token, by the ``tokenizer``. grid:
    the default grid. write_negative: the same for a negative prompt, if its template differs (None: the same). images:
    how prompts with images are written (None: the model cannot read images).
    """

    tokenizer: Tokenizer
    write: Callable[[str, tuple[int, int]], Sequence[int]]
    grid: tuple[int, int]
    write_negative: Callable[[str, tuple[int, int]], Sequence[int]] | None = None
    images: ImagePrompts | None = None

    def ids(
        self, text: str, grid: tuple[int, int] | None = None, negative: bool = False, images: Images = ()
    ) -> Sequence[int]:
        """Ids of a prompt, and of images [h, w] (int64) that it is about.

        Raises FileNotFoundError or CheckpointError if there is no tokenizer.
        """
        if images and self.images:
            write_both = self.images.write_negative if negative and self.images.write_negative else self.images.write
            return write_both(text, grid or self.grid, images)
        write = self.write_negative if negative and self.write_negative else self.write
        return write(text, grid or self.grid)

    def encode(self, text: str) -> Tensor:
        """``ids`` of a prompt as the features [1, n, 1] of a CONDITIONING."""
        return features_of(self.ids(text))

    def notices(self, text: str) -> list[str]:
        """Special tokens."""
        return special_tokens(self.tokenizer, text)


class ClassEncoder(PromptEncoder):
    """A class name or number instead of a prompt (class-conditional models)."""

    def __init__(self, classes: int, names: list[str] | None = None):
        self.classes, self.names = classes, [name.lower() for name in names or ()]

    def encode(self, text: str) -> Tensor:
        """Class number [1, 1, 1] (fp32). Raises ValueError for an unknown name or a number out of range."""
        wanted = text.strip().lower()
        if wanted.isdecimal() and len(wanted) < 10 and int(wanted) < self.classes:
            return torch.tensor([[[float(wanted)]]])
        matches = [i for i, name in enumerate(self.names) if wanted and wanted in (name, *re.split(r",\s*", name))]
        if matches:
            return torch.tensor([[[float(matches[0])]]])
        near = [name for name in self.names if wanted and wanted in name][:5]
        hint = f" Did you mean: {'; '.join(near)}?" if near else ""
        raise ValueError(
            f"This model generates classes, not prompts: {text[:200]!r} is not a class. Enter a number from 0 to "
            f"{self.classes - 1}" + (" or a class name." if self.names else ".") + hint
        )


class MissingEncoder(PromptEncoder):
    """Placeholder for a text encoder that was not found; raises the error when it is used."""

    def __init__(self, message: str):
        self.message = message

    def encode(self, text: str) -> Tensor:
        raise FileNotFoundError(self.message)
