"""Emu3.5-Image (arXiv:2510.26583): 34 billion parameters, images of about 1024 x 1024 pixels in nine sizes.

Vocabulary, tokenizer and the size in front of an image are Emu3's. The layers are Qwen3's: heads get an RMSNorm, and
all of them together are wider than the model. Emu3.5, which also writes text between images, has the same files.

Images that are to be edited or combined stand in front of the user's words, in both branches of guidance (x2i in the
official code).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.sizes import Grid, choose_grid, legal_grid
from ...models.text.prompt_encoders import ImagePrompts, Images
from ...models.text.tokenizer import Tokenizer
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import meaning
from ..llama import language_root
from .emu3 import Words, build_emu, names_of, open_tokenizer, opening_ids, prompt_encoder, scale_image, special_names

# What stands around a prompt in training, and around a negative one, which is empty by default. <|extra_100|> begins
# the answer.
PROMPT = "You are a helpful assistant for t2i task. USER: {} ASSISTANT: <|extra_100|>"
NEGATIVE = "You are a helpful assistant. USER: {} ASSISTANT: <|extra_100|>"
IMAGE_PROMPT = "You are a helpful assistant for x2i task. USER: <|image start|>{} ASSISTANT: <|extra_100|>"
IMAGE_NEGATIVE = "You are a helpful assistant. USER: <|image start|>{} ASSISTANT: <|extra_100|>"
# Grids (rows, columns) by the aspect ratios of the official code, the default first, and that of 512 x 512 pixels.
SIZES = ((55, 73), (64, 64), (73, 55), (52, 78), (78, 52), (47, 85), (85, 47), (41, 97), (32, 32))
_AREA = 64 * 64  # tokens of an image that is read
_IMAGES, _ASPECT = 3, 4  # the most images of a prompt, and the widest and tallest of them
_ROOT = "model."
_CODES = 131072
_IDS = 282926
_PATCH = 16
_CFG = {"emu35": (2.0, 2.0), "emu35image": (5.0, 3.0)}  # released names -> the authors' guidance, and with images
_IMAGE, _DECODER = "Emu3.5-Image", "Emu3.5-VisionTokenizer"


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a language model with Qwen3's layers, under plain names and with a head of its own."""
    norm = f"{_ROOT}layers.0.self_attn.q_norm"
    plain = language_root(tensors, (_ROOT,), "q_norm.weight") is not None and "lm_head.weight" in tensors
    return plain and tensors[f"{norm}.weight"].ndim == 1 and f"{norm}.bias" not in tensors


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU.

    Raises CheckpointError for tensors that are missing, misshapen or not finite, for a language model without image
    tokens, and for a size that the model does not generate.
    """
    path, name = checkpoint.path, title(checkpoint.path)
    ids = len(names_of(checkpoint).matrices(checkpoint)[0])
    if ids != _IDS and not checkpoint.settings.get("vocabulary_map"):
        raise CheckpointError(
            f"{name} is a language model with the layers of {_IMAGE}, but its vocabulary of {ids} ids has no image "
            f"tokens, so it writes only text. {_IMAGE} has {_IDS} ids: download BAAI/{_IMAGE}."
        )
    specials = special_names(_CODES)  # here: their names take 11 MB
    words = Words.of(checkpoint, specials)
    own = checkpoint.own_settings
    grids = (legal_grid(own["grid"]),) if "grid" in own else GRIDS
    tokenizer = open_tokenizer(path, search, specials, f"BAAI/{_IMAGE}", words)
    area = prod(grids[0]) if "grid" in own else _AREA
    cfg, image_cfg = meaning(name, _CFG) or _CFG["emu35image"]

    def write(text: str, size: Grid, images: Images) -> list[int]:
        return image_prompt_ids(words, tokenizer, IMAGE_PROMPT, text, size, images)

    def write_negative(text: str, size: Grid, images: Images) -> list[int]:
        return image_prompt_ids(words, tokenizer, IMAGE_NEGATIVE, text, size, images)

    default = choose_grid(path, grid, grids[0], grids)
    images = ImagePrompts(
        _IMAGES,
        words.codes,
        partial(scale_image, grid_of=partial(scaled_grid, area=area)),
        write,
        write_negative,
        params={"cfg": image_cfg} | own.get("defaults", {}),
    )
    return build_emu(
        checkpoint,
        dtype,
        operations,
        words,
        (words.row_end,),
        {},
        prompt_encoder(words, tokenizer, PROMPT, NEGATIVE, default, images),
        "",
        family="emu3.5",
        grid=default,
        grids=grids,
        defaults={"cfg": cfg, "top_k": 5120},
        pixels_per_token=_PATCH,
        longest=32768,
    )


# Images in a prompt


def scaled_grid(height: int, width: int, patch: int, area: int = _AREA) -> Grid:
    """Grid of tokens to which an image of so many pixels is scaled before it is read: of about ``area`` tokens. The
    official code's smart_resize(), with its order of rounding.

    Raises ValueError for images that are wider or taller than the model is known to read.
    """
    if max(height, width) > _ASPECT * min(height, width):
        raise ValueError(
            f"The image is {width} x {height} pixels, but {_IMAGE} reads images of up to {_ASPECT}:1. Crop it."
        )
    ratio = width / height
    tall = int((area * patch**2 / ratio) ** 0.5)
    return ((tall + patch // 2) // patch, (int(tall * ratio) + patch // 2) // patch)


def scaled_grids() -> set[Grid]:
    """Every grid that ``scaled_grid`` gives of released models: for each height in pixels, all widths that ratios with
    this height lead to."""
    pixels, found = _AREA * _PATCH**2, set()
    for tall in range(int((pixels / _ASPECT) ** 0.5), int((pixels * _ASPECT) ** 0.5) + 1):
        wide = range(int(tall * pixels / (tall + 1) ** 2), int(pixels / tall) + 1)
        found |= {((tall + _PATCH // 2) // _PATCH, (each + _PATCH // 2) // _PATCH) for each in wide}
    return found


# An edited image has the size of its source.
GRIDS = tuple(dict.fromkeys((*SIZES, *sorted(scaled_grids()))))


def image_prompt_ids(
    words: Words, tokenizer: Tokenizer, template: str, text: str, grid: Grid, images: Images
) -> list[int]:
    """A prompt with images [h, w] (int64) where the template begins one, and the start of the new image of ``grid``.

    Raises CheckpointError for the tokenizer of another model.
    """
    before, _, after = template.partition("<|image start|>")
    ids = tokenizer.ids(f"{before}<|image start|>{after.replace('{}', text, 1)}")
    place = ids.index(words.opening)
    written = [id for image in images for id in image_ids(words, tokenizer, image)]
    return [words.beginning, *ids[:place], *written, *ids[place + 1 :], *opening_ids(words, tokenizer, grid)]


def image_ids(words: Words, tokenizer: Tokenizer, image: Tensor) -> list[int]:
    """A whole image [h, w] (int64): its start, the rows with a token between them, its end."""
    rows, cols = image.shape
    ends = image.new_full((rows, 1), words.row_end)
    body = torch.cat((image + words.first, ends), dim=1).flatten()[:-1].tolist()
    return [*opening_ids(words, tokenizer, (rows, cols)), *body, words.closing]


FAMILY = Family(
    labels=(_IMAGE,),
    decoders={
        "emu3.5": ReleasedDecoder(
            (f"{_DECODER}/model", "vision_tokenizer/model"),  # the latter in Emu35-Comfyui-Nodes
            f"the folder {_DECODER} (repository BAAI/{_DECODER})",
        )
    },
    recognise=recognise,
    load=load,
    releases={
        r"Emu3\.5(-Image)?": (
            Download(r"BAAI/\g<0>", r"ar_models/\g<0>"),
            Download(f"BAAI/{_DECODER}", f"vae/{_DECODER}", "model.safetensors and config.json"),
        )
    },
    image_prompt_models=(_IMAGE,),
    silent=(
        "reads images only to make new ones of them (AR Image Prompt): its authors published how to ask it for images, "
        "and for stories and instructions with images, but not for an answer in words"
    ),
)
