"""Emu3.5-Image (arXiv:2510.26583): 34 billion parameters, images of about 1024 x 1024 pixels in nine sizes.

Vocabulary, tokenizer and the size in front of an image are Emu3's. The layers are Qwen3's: heads get an RMSNorm, and
all of them together are wider than the model. Emu3.5, which also writes text between images, has the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..ar_model import DiscreteModel
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import meaning
from ..registry import Family, ReleasedDecoder, Source
from ..sizes import chosen_grid, legal_grid
from ..text.language_model import language_root
from .emu3 import Words, assembled, names_of, open_tokenizer, ranked

# What stands around a prompt in training, and around a negative one, which is empty by default. <|extra_100|> begins
# the answer.
PROMPT = "You are a helpful assistant for t2i task. USER: {} ASSISTANT: <|extra_100|>"
NEGATIVE = "You are a helpful assistant. USER: {} ASSISTANT: <|extra_100|>"
# Grids (rows, columns) by the aspect ratios of the official code, the default first, and that of 512 x 512 pixels.
SIZES = ((55, 73), (64, 64), (73, 55), (52, 78), (78, 52), (47, 85), (85, 47), (41, 97), (32, 32))
_ROOT = "model."
_CODES = 131072
_IDS = 282926
_PATCH = 16
_CFG = {"emu35": 2.0, "emu35image": 5.0}  # released names -> the authors' guidance
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
    specials = ranked(_CODES)  # here: their names take 11 MB
    words = Words.of(checkpoint, specials)
    own = checkpoint.own_settings
    grids = (legal_grid(own["grid"]),) if "grid" in own else SIZES
    return assembled(
        checkpoint,
        dtype,
        operations,
        "emu3.5",
        words,
        (words.row_end,),
        open_tokenizer(path, search, specials, f"BAAI/{_IMAGE}", words),
        (PROMPT, NEGATIVE, ""),
        chosen_grid(path, grid, grids[0], grids),
        grids,
        _PATCH,
        {"cfg": meaning(name, _CFG) or _CFG["emu35image"], "top_k": 5120},
        longest=32768,
        known_heads={},
    )


FAMILY = Family(
    labels=(_IMAGE,),
    decoders={"emu3.5": ReleasedDecoder((f"{_DECODER}/model",), f"the folder {_DECODER} (repository BAAI/{_DECODER})")},
    recognise=recognise,
    load=load,
    releases={
        r"Emu3\.5(-Image)?": (
            Source(r"BAAI/\g<0>", r"ar_models/\g<0>"),
            Source(f"BAAI/{_DECODER}", f"vae/{_DECODER}", "model.safetensors and config.json"),
        )
    },
)
