"""SimpleAR (Wang et al., arXiv:2504.11455): a Qwen2 language model whose last ids are the codes of Cosmos DV8x16x16.

Reads the released Hugging Face folders, and single files in their naming. The id of code k is k + the number of text
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.networks.positions import SequencePositions
from ...models.sizes import choose_grid, legal_grid
from ...models.text.prompt_encoders import TokenEncoder, features_of
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import WEIGHT_FILES, Checkpoint
from ..files.errors import CheckpointError
from ..files.quantised import LazyMatrix
from ..llama import backbone_config, language_root, matrix, positive, rope_theta, text_settings
from .language_models import Ids, Names, build_language_model

_NAME = "simplear"
_NAMES = Names("model.")
_HEADS = {896: 14, 1536: 12}
_CODES, _WORDS = 64_000, 151_672  # of the released models, whose embeddings may have unused rows after them
_GRIDS = ((64, 64), (32, 32))
_REPOSITORIES = ("SimpleAR-1.5B-RL", "SimpleAR-1.5B-SFT", "SimpleAR-0.5B-RL", "SimpleAR-0.5B-SFT")
_ADDED = ("<|t2i|>", "<|i2t|>", "<|soi|>", "<|vtokens|>", "<|t2v|>", "<|v2t|>", "<|sov|>")  # the last text tokens
_BEGIN, _END = _ADDED[0], _ADDED[2]
_PROMPT = "A highly realistic image of {}"
_NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad "
    "eyes, bad limbs, distortion"
)  # as in training and evaluation of the released models


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a Qwen2 language model without the layers of a tower that reads images. ``load`` checks that its
    ids include image codes."""
    biased = language_root(tensors, (_NAMES.root,), "q_proj.bias") is not None
    layers = (name for name in tensors if re.search(r"(^|\.)(layers|blocks)\.\d+\.", name))
    return biased and all(name.startswith(f"{_NAMES.root}layers.") for name in layers)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU.

    Raises CheckpointError if tensors are missing, unknown, misshapen or not finite, for a language model without image
    codes, for a tokenizer of another model, and for an unsupported grid.
    """
    path, meta, settings = checkpoint.path, checkpoint.own_settings, text_settings(checkpoint)
    table = matrix(checkpoint.tensors, _NAMES.table, path)
    codes = meta.get("codes", _CODES)
    known = meta.get("words", _WORDS if len(table) >= _WORDS + codes else None)
    tokenizer = open_tokenizer(path, search, known)
    first = first_code(tokenizer, len(table), codes, known, path)
    grids = (legal_grid(meta["grid"]),) if "grid" in meta else _GRIDS
    heads = {table.shape[1]: meta["heads"]} if "heads" in meta else _HEADS
    encoder = prompt_encoder(tokenizer, grids[0])
    head = checkpoint.tensors.get(_NAMES.head)  # with a LoRA, it is no longer the embedding

    @cache
    def negative() -> Tensor:
        return features_of(encoder.ids(_NEGATIVE, negative=True))

    return build_language_model(
        checkpoint,
        dtype,
        operations,
        _NAMES,
        Ids(range(first, first + codes), first),
        backbone_config(checkpoint, _NAMES.root, codes, heads, norm_eps=1e-6),
        lambda features, size: negative(),
        tied=head is None or (settings.get("tie_word_embeddings", False) and not isinstance(head, LazyMatrix)),
        family=_NAME,
        grid=choose_grid(path, grid, grids[0], grids),
        grids=grids,
        defaults=SamplingParams(**{"cfg": 6.0} | meta.get("defaults", {})),
        prompt_encoder=encoder,
        positions=SequencePositions(rope_theta(settings, 1e6)),
        longest=positive(settings, "max_position_embeddings", None),
    )


def open_tokenizer(path: Path, search: Sequence[Path], words: int | None) -> Tokenizer:
    """The tokenizer in the model's folder, or in a folder of a released name there or in the search folders. words: the
    number of its tokens, if it is known."""
    folder = path.parent if path.name in WEIGHT_FILES else path.parent / path.stem
    repository = folder.name if folder.name in _REPOSITORIES else _REPOSITORIES[0]
    return Tokenizer(
        find_tokenizer(path, _REPOSITORIES, search, ("tokenizer.json", "vocab.json")),
        f"{path.name} reads prompts through its tokenizer, which was not found. Put tokenizer.json of "
        f"Daniel0724/{repository} into {folder}.",
        {} if words is None else {token: words - len(_ADDED) + i for i, token in enumerate(_ADDED)},
    )


def first_code(tokenizer: Tokenizer, rows: int, codes: int, known: int | None, path: Path) -> int:
    """Id of image code 0 in a vocabulary of ``rows``: the number of text tokens, as ``known`` by metadata or from the
    released models, or else the length of the tokenizer.

    Raises CheckpointError if the vocabulary is too small for the codes, and for a tokenizer of another length.
    """
    first = known or _WORDS
    source = f"the {first} tokens of its text vocabulary"
    if tokenizer.file is not None:
        count = len(tokenizer)
        for token in (_BEGIN, _END):
            tokenizer.id(token)
        if known not in (None, count):
            raise CheckpointError(
                f"{tokenizer.file} has {count} tokens, but the text vocabulary of {path.name} {known}, after which the "
                "image codes follow: it is the tokenizer of another model. Use the one released with it; if the model "
                'was trained with this one, state "words" under "specar" in config.json.'
            )
        first, source = count, f"the {count} tokens of {tokenizer.file}"
    if first + codes > rows:
        raise CheckpointError(
            f"{path.name} has a vocabulary of {rows}, too small for {source} and {codes} image codes. It is a Qwen2 "
            "language model without image tokens, or the tokenizer is that of another model. SimpleAR's models are "
            f"Daniel0724/{', '.join(_REPOSITORIES)}."
        )
    return first


def prompt_encoder(tokenizer: Tokenizer, grid: tuple[int, int]) -> TokenEncoder:
    """Formats prompts as in training.

    A prompt becomes "<|t2i|>A highly realistic image of ...<|soi|>"; in a negative one, "A highly
    realistic image of" is missing. A prompt that begins with <|t2i|> is used as is.
    """

    def write(text: str, template: str) -> list[int]:
        whole = text if text.startswith(_BEGIN) else _BEGIN + template.format(text)
        return tokenizer.ids(whole if whole.endswith(_END) else whole + _END)

    return TokenEncoder(tokenizer, lambda text, size: write(text, _PROMPT), grid, lambda text, size: write(text, "{}"))


_COSMOS = "Cosmos-1.0-Tokenizer-DV8x16x16"
FAMILY = Family(
    labels=("SimpleAR",),
    decoders={
        _NAME: ReleasedDecoder(
            (
                f"{_COSMOS}/decoder",
                f"{_COSMOS}/autoencoder",
                "cosmos_dv8x16x16_decoder",
                "cosmos_dv8x16x16_autoencoder",
            ),
            f"the folder {_COSMOS} (repository nvidia/{_COSMOS})",
        )
    },
    recognise=recognise,
    load=load,
    releases={
        r"SimpleAR-(0\.5|1\.5)B-(RL|SFT)": (
            Download(r"Daniel0724/\g<0>", r"ar_models/\g<0>"),
            Download(f"nvidia/{_COSMOS}", f"vae/{_COSMOS}", "decoder.jit"),
        )
    },
)
