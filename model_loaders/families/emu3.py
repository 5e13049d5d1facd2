"""Emu3 (arXiv:2409.18869): Emu3-Gen generates images of about 720 x 720 pixels, Emu3-Stage1 of about 512 x 512.

Image tokens are part of the language model's vocabulary, and the image's size precedes it in digits. Accepts the
original repositories (with a tiktoken file) and folders of transformers, old and new, which contain the image decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, floor, prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.image_reader import TokenReader
from ...models.networks.positions import SequencePositions
from ...models.pictures import resize
from ...models.sizes import Grid, choose_grid, legal_grid
from ...models.text.prompt_encoders import ImagePrompts, TokenEncoder, features_of
from ...models.text.tiktoken_file import tokenizer_of
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import meaning, root_of
from ..llama import backbone_config, language_root, positive, rope_theta, text_settings
from .language_models import Ids, Names, build_language_model, token_reader

# The suffix of every prompt in training, and the default negative prompt.
QUALITY = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_ROOTS = {"model.text_model.": "", "text_model.model.": "text_model.", "model.": ""}  # of language model -> of its head
_VQ = ("model.vqmodel.", "vqmodel.")
_WORDS, _CODES = 184622, 32768  # of all released models: the codes are the last ids
_RANKS = 151643  # ids of the tokenizer's file, after which the special tokens follow
_HEADS = {4096: 32}  # width -> heads
_SIDES = {"gen": 90, "stage1": 64}  # words of released names -> tokens per side of a square image
_ASPECT = 4  # the widest and tallest images supported
_READ, _READ_ASPECT = 64 * 64, 5  # least tokens of an image that is read, and the widest and tallest of them
_FOLDERS = (  # with the same tokenizer
    "Emu3-Gen",
    "Emu3-Stage1",
    "Emu3-Gen-hf",
    "Emu3-Stage1-hf",
    "Emu3-Chat",
    "Emu3-Chat-hf",
    "Emu3.5-Image",
    "Emu3.5",
)
_PATTERN = (  # how the original tokenizer splits a text: contractions, words, digits, signs, white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMES = {  # names of the special tokens
    "beginning": "<|extra_203|>",
    "end": "<|extra_204|>",
    "row_end": "<|extra_200|>",
    "frame_end": "<|extra_201|>",
    "image": "<|image token|>",
    "opening": "<|image start|>",
    "closing": "<|image end|>",
}
_FIRST = "<|visual token 000000|>"


def special_names(codes: int) -> tuple[str, ...]:
    """The special tokens after the ranks, those of the image codes at the end."""
    return (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *(f"<|extra_{i}|>" for i in range(205)),
        "<|image token|>",
        "<|image start|>",
        "<|image end|>",
        *(f"<|visual token {code:06d}|>" for code in range(codes)),
    )


_RANKED = special_names(_CODES)


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is an Emu3: it contains an image decoder and a language model, or has Emu3's vocabulary size."""
    root = language_root(tensors, tuple(_ROOTS))
    if root is None or (table := tensors[f"{root}embed_tokens.weight"]).ndim != 2:
        return False
    contained = root_of(tensors, _VQ, "quantize.embedding.weight") is not None
    return len(table) == _WORDS or (root != "model." and contained)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU; an image decoder in the same file is not read.

    Raises CheckpointError for tensors that are missing, misshapen or not finite, for a model that only reads images,
    and if the size of generated images is unknown.
    """
    settings = checkpoint.settings
    words = Words.of(checkpoint, _RANKED)
    patch = 2 ** (len((settings.get("vq_config") or {}).get("channel_multiplier") or (1, 2, 2, 4)) - 1)
    default, grids = generated_sizes(checkpoint, settings, patch, grid)
    tokenizer = open_tokenizer(checkpoint.path, search, words=words)
    encoder = prompt_encoder(words, tokenizer, "{}" + QUALITY, "{}", default)
    return build_emu(
        checkpoint,
        dtype,
        operations,
        words,
        words.specials,
        _HEADS,
        encoder,
        NEGATIVE,
        family="emu3",
        grid=default,
        grids=grids,
        defaults={"cfg": 3.0, "top_k": 2048},
        pixels_per_token=patch,
        longest=9216,
    )


def names_of(checkpoint: Checkpoint) -> Names:
    """The names of the language model's tensors."""
    root = next(root for root in _ROOTS if f"{root}embed_tokens.weight" in checkpoint.tensors)
    return Names(root, f"{_ROOTS[root]}lm_head.weight", _VQ)


def prompt_encoder(
    words: Words, tokenizer: Tokenizer, prompt: str, negative: str, grid: Grid, images: ImagePrompts | None = None
) -> TokenEncoder:
    """Writes prompts. prompt, negative: their templates, with {} for the user's words. grid: the default size. images:
    how prompts with images are written."""

    def write(template: str, text: str, size: Grid) -> list[int]:
        return prompt_ids(words, tokenizer, template.replace("{}", text, 1), size)

    return TokenEncoder(tokenizer, partial(write, prompt), grid, partial(write, negative), images)


def build_emu(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    operations: Any,
    words: Words,
    specials: tuple[int, ...],
    known_heads: Mapping[int, int],
    encoder: TokenEncoder,
    null: str,
    **model: Any,
) -> DiscreteModel:
    """A model with Emu3's vocabulary.

    specials: the end of a row, then the tokens after the last row. known_heads: see backbone_config. null: the default
    negative prompt. model: further arguments of DiscreteModel; of these, ``defaults`` are the authors' SamplingParams,
    and ``longest`` is for files whose config.json does not tell it.
    """
    text, names = text_settings(checkpoint), names_of(checkpoint)
    params = model["defaults"]
    params = {**params, "top_k": min(params["top_k"], words.codes), **checkpoint.own_settings.get("defaults", {})}
    longest = positive(text, "max_position_embeddings", model["longest"])
    return build_language_model(
        checkpoint,
        dtype,
        operations,
        names,
        Ids(words.images, words.first, specials, row_ends=True),
        backbone_config(checkpoint, names.root, words.codes + len(specials), known_heads, norm_eps=1e-5),
        lambda features, size: features_of(encoder.ids(null, size, negative=True)),
        positions=SequencePositions(rope_theta(text, 1e6)),
        prompt_encoder=encoder,
        **{**model, "defaults": SamplingParams(**params), "longest": longest},
    )


# Sizes


def size_table(side: float) -> list[tuple[int, int]]:
    """Grids (rows, columns) of all images with the area of a square of ``side`` tokens per side, from tall to wide.

    Both sides are the exact ones of an aspect ratio, rounded: as the ratio grows, one of the two changes at a time,
    wherever it is half-way between two integers.
    """
    widest = sqrt(_ASPECT)
    steps = [(i + 0.5) / side for i in range(int(side * widest) + 1)]
    turns = sorted(turn for step in steps for turn in (step, 1 / step) if 1 / widest < turn < widest)
    turns = [1 / widest, *turns, widest]
    middles = [(a + b) / 2 for a, b in pairwise(turns)]
    return list(dict.fromkeys((round(side / stretch), round(side * stretch)) for stretch in middles))


def generated_sizes(
    checkpoint: Checkpoint, settings: Mapping[str, Any], patch: int, wanted: tuple[int, int] | None
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """(default grid, all grids): by our metadata, the ``image_area`` in pixels of an original config.json, the name of
    folder or file, or else the grid that the user ``wanted``.

    Raises CheckpointError if all are missing, for a grid of another size, and for Emu3-Chat.
    """
    path, name, meta = checkpoint.path, title(checkpoint.path), checkpoint.own_settings
    own = legal_grid(meta["grid"]) if "grid" in meta else None
    area = settings.get("image_area")
    if meaning(name, {"emu3chat": True}):
        raise CheckpointError(
            f"{name} was trained to read images, not to generate them. Use Emu3-Gen (720 x 720 pixels) or Emu3-Stage1 "
            "(512 x 512)."
        )
    if own:
        side = sqrt(own[0] * own[1])
    elif isinstance(area, int) and area >= patch**2:
        side = sqrt(area) / patch
    else:
        asked = (side for side in _SIDES.values() if wanted and tuple(wanted) in size_table(side))
        side = meaning(name, _SIDES) or next(asked, None)
    if side is None:
        raise CheckpointError(
            f"The name {name} does not show whether this is Emu3-Gen or Emu3-Stage1, which have different sizes of "
            "images: keep the released name of its folder, or set grid to 90 x 90 tokens (Gen) or 64 x 64 (Stage1)."
        )
    default = own or legal_grid((round(side), round(side)))  # before the table of sizes, which has as many rows
    grids = size_table(side)
    return choose_grid(path, wanted, default, grids), grids


# Vocabulary


@dataclass(frozen=True)
class Words:
    """Ids of the image codes (``codes`` of them, starting at ``first``) and of the special tokens."""

    first: int
    codes: int
    beginning: int
    end: int
    row_end: int
    frame_end: int
    image: int
    opening: int
    closing: int

    @property
    def images(self) -> range:
        """Ids of the image codes, in order."""
        return range(self.first, self.first + self.codes)

    @property
    def by_name(self) -> dict[str, int]:
        """The special tokens and the first code by name, for the comparison with a tokenizer."""
        return {name: getattr(self, role) for role, name in _NAMES.items()} | {_FIRST: self.first}

    @property
    def specials(self) -> tuple[int, int, int, int]:
        """The end of a row, and the tokens after the last row: end of frame, of image, of text."""
        return self.row_end, self.frame_end, self.closing, self.end

    @classmethod
    def of(cls, checkpoint: Checkpoint, specials: Sequence[str]) -> Words:
        """From config.json's vocabulary_map; without one, as released, for a vocabulary that ends in ``specials``.

        Raises CheckpointError if neither applies, or the codes are not consecutive after all text ids.
        """
        words, path = len(names_of(checkpoint).matrices(checkpoint)[0]), checkpoint.path
        released = {name: _RANKS + i for i, name in enumerate(specials)} if words == _RANKS + len(specials) else {}
        ids = released | (checkpoint.settings.get("vocabulary_map") or {})
        codes = {name[-8:-2]: id for name, id in ids.items() if name.startswith("<|visual token ")}
        first = codes.get("000000", -1)
        found = {role: ids.get(name, -1) for role, name in _NAMES.items()}
        in_a_row = first >= 0 and codes == {f"{code:06d}": first + code for code in range(len(codes))}
        if not in_a_row or first + len(codes) > words or not all(0 <= id < first for id in found.values()):
            raise CheckpointError(
                f"{path.parent.name} does not show which of its {words} ids are image tokens and special tokens: "
                "its config.json has no vocabulary_map, or one with another order. Download config.json of the "
                "released model again."
            )
        return cls(first, len(codes), **found)


def prompt_ids(words: Words, tokenizer: Tokenizer, text: str, grid: tuple[int, int]) -> list[int]:
    """Begin of text, text, begin of image, its size in tokens, image token. Raises CheckpointError for the tokenizer of
    another model."""
    return [words.beginning, *tokenizer.ids(text), *opening_ids(words, tokenizer, grid)]


def opening_ids(words: Words, tokenizer: Tokenizer, grid: tuple[int, int]) -> list[int]:
    """The start of an image: begin of image, its size in tokens, image token."""
    return [words.opening, *tokenizer.ids(f"{grid[0]}*{grid[1]}"), words.image]


# Questions about images


def reader(checkpoint: Checkpoint, model: DiscreteModel, search: Sequence[Path], operations=nn) -> TokenReader:
    """How Emu3-Stage1 continues a text that begins with an image. Raises CheckpointError as ``load`` does, and for
    Emu3-Gen."""
    path, own = checkpoint.path, checkpoint.own_settings
    if meaning(title(path), _SIDES) == _SIDES["gen"]:
        raise CheckpointError(
            f"{title(path)} was trained to generate images, not to describe them. Load Emu3-Stage1 (repository "
            "BAAI/Emu3-Stage1) instead, which does both."
        )
    words = Words.of(checkpoint, _RANKED)
    tokenizer = open_tokenizer(path, search, words=words)
    least = prod(legal_grid(own["grid"])) if "grid" in own else _READ

    def write(text: str, image: Tensor) -> list[int]:
        return question_ids(words, tokenizer, text, image)

    size, scale = words.images.stop, partial(scale_image, grid_of=partial(read_grid, least=least))
    return token_reader(
        checkpoint, model, names_of(checkpoint), size, operations, tokenizer, scale, write, _NAMES["end"]
    )


def scale_image(image: Tensor, patch: int, grid_of: Callable[[int, int, int], Grid]) -> Tensor:
    """An image [H, W, 3] in 0..1 in the size of the grid of its height, width and ``patch``."""
    height, width = image.shape[:2]
    rows, cols = grid_of(height, width, patch)
    return resize(image, rows * patch, cols * patch)


def read_grid(height: int, width: int, patch: int, least: int = _READ) -> Grid:
    """Grid of tokens to which an image of so many pixels is scaled before it is read: its own, with ``least`` to four
    times as many tokens. The official code's smart_resize(), with its order of rounding.

    Raises ValueError for images that are smaller than a token, or wider or taller than the model is known to read.
    """
    if min(height, width) < patch or max(height, width) > _READ_ASPECT * min(height, width):
        raise ValueError(
            f"The image is {width} x {height} pixels, but Emu3 reads images of at least {patch} pixels a side, and up "
            f"to {_READ_ASPECT}:1. Crop or enlarge it."
        )
    rows, cols = round(height / patch), round(width / patch)
    if rows * cols > 4 * least:
        shrunk = sqrt(height * width / (4 * least * patch**2))
        return floor(height / shrunk / patch), floor(width / shrunk / patch)
    if rows * cols < least:
        grown = sqrt(least * patch**2 / (height * width))
        return ceil(height * grown / patch), ceil(width * grown / patch)
    return rows, cols


def question_ids(words: Words, tokenizer: Tokenizer, text: str, image: Tensor) -> list[int]:
    """Begin of text, a whole image [h, w] (int64) with the end of a row after each, end of frame and image, and the
    text that is continued. Raises CheckpointError for the tokenizer of another model."""
    rows, cols = image.shape
    body = torch.cat((image + words.first, image.new_full((rows, 1), words.row_end)), dim=1).flatten().tolist()
    opening = opening_ids(words, tokenizer, (rows, cols))
    return [words.beginning, *opening, *body, words.frame_end, words.closing, *tokenizer.ids(text)]


def open_tokenizer(
    path: Path,
    search: Sequence[Path],
    specials: Sequence[str] = _RANKED,
    repository: str = "BAAI/Emu3-Gen",
    words: Words | None = None,
) -> Tokenizer:
    """The tokenizer from folders of transformers or original ones, of this model or another Emu3. words: its ids are
    compared with these."""
    found = find_tokenizer(path, _FOLDERS, search, ("tokenizer.json", "emu3.tiktoken"))
    ranks = found is not None and found.suffix == ".tiktoken"
    return Tokenizer(
        found,
        (
            "Emu3 reads prompts through emu3.tiktoken (or tokenizer.json), which was not found. Put that of "
            f"{repository} into the folder {path.parent}."
        ),
        words and words.by_name,
        read=partial(tokenizer_of, pattern=_PATTERN, specials=specials) if ranks else None,
    )


_DECODER = "Emu3-VisionTokenizer"
FAMILY = Family(
    labels=("Emu3",),
    decoders={"emu3": ReleasedDecoder((f"{_DECODER}/model",), f"the folder {_DECODER} (repository BAAI/{_DECODER})")},
    recognise=recognise,
    load=load,
    releases={
        r"Emu3-(Gen|Stage1)": (
            Download(r"BAAI/\g<0>", r"ar_models/\g<0>"),
            Download(f"BAAI/{_DECODER}", f"vae/{_DECODER}"),
        )
    },
    readers={"emu3": reader},
    caption_models=("Emu3-Stage1",),
)
