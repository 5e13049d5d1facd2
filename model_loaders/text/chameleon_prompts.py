"""Vocabularies and prompts of the Chameleon family: Lumina-mGPT, Lumina-mGPT 2.0 and Anole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ..files.checkpoint import title
from ..files.errors import CheckpointError

CELL = 32  # side in pixels of the cells in which Lumina-mGPT measures images
BOS, BEGIN, END, ROW_END, TURN_END = "<s>", "<racm3:break>", "<eoss>", "<reserved08799>", "<reserved08706>"
LUMINA2_WORDS = 171385
_RELEASED = {  # words -> id of the first code, number of codes, special tokens, patch
    65536: (4, 8192, {BOS: 0, END: 8196, BEGIN: 8197} | {f"<reserved{n:05}>": n + 4 for n in range(8706, 9000)}, 16),
    LUMINA2_WORDS: (
        155000,
        16384,
        {BEGIN: 151665, END: 151666} | {f"<reserved{n:05}>": n + 142871 for n in range(8796, 8900)},
        8,
    ),
}


@dataclass(frozen=True)
class Vocabulary:
    """Ids of the image codes (``codes`` of them, starting at ``first``) and of the special tokens.

    patch: side in pixels of what a code stands for: 16 in Chameleon's VQGAN, 8 in MoVQGAN (Lumina-mGPT 2.0).
    """

    first: int
    codes: int
    ids: Mapping[str, int]
    patch: int
    path: Path

    @property
    def images(self) -> range:
        """Ids of the image codes, in order."""
        return range(self.first, self.first + self.codes)

    @classmethod
    def of(cls, settings: Mapping[str, Any], words: int, path: Path) -> Vocabulary:
        """From config.json's vocabulary_map; without one, as released, for a vocabulary of 65536. That of Lumina-mGPT
        2.0 is always as released: its authors' code does not read image tokens from the map either.

        Raises CheckpointError if neither applies, or the codes are not consecutive.
        """
        ids = settings.get("vocabulary_map") or {}
        if words == LUMINA2_WORDS or (not ids and words in _RELEASED):
            return cls(*_RELEASED[words], path)
        letters = str.maketrans("ABCDEFGHIJ", "0123456789")
        codes = {name[6:-1].translate(letters): id for name, id in ids.items() if name.startswith("IMGIMG")}
        movq = sorted(id for name, id in ids.items() if name.startswith("<MOVQGAN"))
        codes = {str(i): id for i, id in enumerate(movq)} or codes
        first = codes.get("0")
        if first is None or codes != {str(i): first + i for i in range(len(codes))} or first + len(codes) > words:
            raise CheckpointError(
                f"{title(path)} does not show which of its {words} ids are image tokens: its config.json "
                "has no vocabulary_map, or one with another order. Download config.json of the released model again."
            )
        return cls(first, len(codes), ids, 8 if movq else 16, path)

    def __getitem__(self, token: str) -> int:
        """Id of a special token. Raises CheckpointError if there is none."""
        if token not in self.ids:
            raise CheckpointError(
                f"The vocabulary_map in config.json of {title(self.path)} lacks {token}: it is that of another model."
            )
        return self.ids[token]


def open_tokenizer(
    name: str,
    source: str,
    words: Vocabulary,
    tokens: Sequence[str],
    path: Path,
    folders: Sequence[str],
    search: Sequence[Path],
) -> Tokenizer:
    """The tokenizer in a model's own folder, or in one of ``folders``, which were released with the same. name and
    source: of the model, and of the repository that has it, for the error message. tokens: special tokens to which it
    must give the same ids as ``words``, if they are there."""
    return Tokenizer(
        find_tokenizer(path, folders, search),
        (
            f"{name} reads prompts through tokenizer.json, which was not found. Put the one of {source} into the "
            f"folder {path.parent}."
        ),
        {token: words.ids[token] for token in tokens if token in words.ids},
    )


def message_ids(words: Vocabulary, tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's message: <s>, text, end of turn. Raises CheckpointError for the tokenizer of another model."""
    return [words[BOS], *tokenizer.ids(text), words[TURN_END]]


# Lumina-mGPT, both versions


def lumina_opening(words: Vocabulary, grid: tuple[int, int]) -> list[int]:
    """The start of an image: begin of image, height and width in cells. Alone it is the unconditional prompt."""
    return [words[token] for token in opening_tokens(words, grid)]


def lumina_prompt(words: Vocabulary, tokenizer: Tokenizer, text: str, grid: tuple[int, int]) -> list[int]:
    """The instruction that Lumina-mGPT was trained with, which states the size, and the start of the image."""
    return message_ids(words, tokenizer, _instruction(words, text, grid)) + lumina_opening(words, grid)


def lumina_image_prompt(
    words: Vocabulary, tokenizer: Tokenizer, text: str, grid: tuple[int, int], images: Sequence[Tensor]
) -> list[int]:
    """A message about images [h, w] (int64), and the start of the new image of ``grid``. In training, such a message
    does not state the size."""
    return lumina_question(words, tokenizer, text, images) + lumina_opening(words, grid)


def lumina_question(words: Vocabulary, tokenizer: Tokenizer, text: str, images: Sequence[Tensor]) -> list[int]:
    """A message with images [h, w] (int64) after its text. Raises CheckpointError for the tokenizer of another
    model."""
    message = message_ids(words, tokenizer, f"{text} ")
    shown = [id for image in images for id in lumina_image(words, image)]
    return [*message[:-1], *shown, message[-1]]


def lumina_image(words: Vocabulary, image: Tensor) -> list[int]:
    """A whole image [h, w] (int64): its start, its rows, each with its end, and its end."""
    rows, cols = image.shape
    ends = image.new_full((rows, 1), words[ROW_END])
    body = torch.cat((image + words.first, ends), dim=1).flatten().tolist()
    return [*lumina_opening(words, (rows, cols)), *body, words[END]]


def lumina2_prompt(words: Vocabulary, tokenizer: Tokenizer, text: str, grid: tuple[int, int]) -> list[int]:
    """The same in Lumina-mGPT 2.0, whose tokenizer is Qwen's: another first token, and the end of the turn is part of
    the text. Raises CheckpointError for the tokenizer of another model."""
    text = _instruction(words, text, grid) + TURN_END
    return [tokenizer.first, *tokenizer.ids(text), *lumina_opening(words, grid)]


def opening_tokens(words: Vocabulary, grid: tuple[int, int]) -> list[str]:
    """The special tokens at the start of an image."""
    return [BEGIN, *(f"<reserved{8800 + side * words.patch // CELL:05}>" for side in grid)]


def _instruction(words: Vocabulary, text: str, grid: tuple[int, int]) -> str:
    height, width = (side * words.patch for side in grid)
    return f"Generate an image of {width}x{height} according to the following prompt:\n{text}"


def lumina_tokens(words: Vocabulary, grids: Sequence[tuple[int, int]]) -> set[str]:
    """The special tokens of images of these grids."""
    return {END, ROW_END}.union(*(opening_tokens(words, grid) for grid in grids))


# Anole


def anole_prompt(words: Vocabulary, tokenizer: Tokenizer, text: str, _grid: tuple[int, int]) -> list[int]:
    """The unchanged prompt, and begin of image."""
    return [*message_ids(words, tokenizer, text), words[BEGIN]]


def anole_null(words: Vocabulary, _grid: tuple[int, int]) -> list[int]:
    """The unconditional prompt."""
    return [words[BOS], words[BEGIN]]
