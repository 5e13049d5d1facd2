"""GLM-Image (zai-org/GLM-Image): its autoregressive stage, a GLM-4 language model that generates the codes of a small
preview, then those of the image, 32 pixels each.

The codes describe what an image shows; a diffusion transformer, which also reads the prompt, turns them into pixels
(see decoders/glm_image.py). Reads the folder ``vision_language_encoder`` of the release. Of the encoder of source
images in the same files only the codebook is read, by which rules compare codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.limits import bounded_int
from ...models.backbone import Backbone
from ...models.glm_image import PREVIEW, AxisPositions, preview_grid
from ...models.prefix import TextPrefix
from ...samplers.contract import SamplingParams
from ..ar_model import DiscreteModel, legal_grid
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.weights import load_weights
from ..registry import Family, ReleasedDecoder, Source
from ..text.language_model import (
    Tokenizer,
    backbone_config,
    backbone_tensors,
    find_tokenizer,
    language_root,
    matrix,
    others,
    positive,
    rope_theta,
    text_settings,
    word_tensors,
)
from ..text.prompt_encoders import TextEncoder

_NAME = "glm-image"
_ROOT, _TABLE, _HEAD = "model.language_model.", "model.language_model.embed_tokens.weight", "lm_head.weight"
_PARTS = ("model.visual.", "model.vqmodel.")  # of the encoder of source images
_CODEBOOK = "model.vqmodel.quantize.embedding.weight"  # compared by direction alone
_HEADS = {4096: 32}  # width -> heads
_CODES = 16_384  # their ids are the first of the vocabulary; the next one begins an image
_SIDES, _ASPECT = range(16, 65), 4  # tokens per side: 512 to 2048 pixels
_GRIDS = tuple((h, w) for h in _SIDES for w in _SIDES if max(h, w) <= _ASPECT * min(h, w))
_DEFAULT = (32, 32)
_PIXELS = 32  # per side of a token
_PARTIAL, _SECTIONS = 0.5, (8, 12, 12)  # the rotated part of a head, and its pairs of channels by axis
_OPEN, _CLOSE = "<sop>", "<eop>"  # around the size of a grid
_FOLDERS = ("processor", "GLM-Image/processor")


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a GLM-4 language model whose head has fewer rows than its vocabulary: those of images alone."""
    root = language_root(tensors, (_ROOT,))
    if root is None or _HEAD not in tensors or f"{root}layers.0.post_mlp_layernorm.weight" not in tensors:
        return False
    return tensors[_HEAD].shape[:1] < tensors[_TABLE].shape[:1]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU.

    Raises CheckpointError if tensors are missing, misshapen or not finite, for positions of another kind, and for an
    unsupported grid.
    """
    path, tensors, meta = checkpoint.path, checkpoint.tensors, checkpoint.own_settings
    settings = text_settings(checkpoint)
    table, head = matrix(tensors, _TABLE, path), matrix(tensors, _HEAD, path)
    codes = checkpoint.settings.get("image_start_token_id", _CODES)
    if type(codes) is not int or not 1 < codes <= len(head):
        raise CheckpointError(
            f"{path.name} has a head of {len(head)} image tokens, but its config.json says that {codes!r} begins an "
            "image, which is the id after the last of them. Download config.json of the released model again."
        )
    default = legal_grid(grid or meta.get("grid", _DEFAULT))
    grids = (legal_grid(meta["grid"]),) if "grid" in meta else _GRIDS
    if default not in grids:
        raise CheckpointError(
            f"{path.name} does not generate {default[0]} x {default[1]} tokens (rows x columns): both sides are "
            f"{grids[0][0]} to {grids[-1][0]}, and the longer one at most {_ASPECT} times the shorter one."
        )
    config = backbone_config(checkpoint, _ROOT, codes, _HEADS, norm_eps=1e-5)
    side = bounded_int("preview_side", meta.get("preview_side", PREVIEW), 1, 64)
    positions = positions_of(settings, config.head_dim, side)

    def preview(size: tuple[int, int]) -> tuple[int, int]:
        return preview_grid(size, side)

    def null(_features: Tensor, _size: tuple[int, int]) -> Tensor:
        raise ValueError("GLM-Image was trained without guidance, so it has no unconditional prompt. Set cfg to 1.")

    tokenizer = open_tokenizer(path, search, stated_ids(checkpoint.settings, codes))
    encoder = TextEncoder(lambda text, size: prompt_ids(tokenizer, text, size, preview(size), codes), default)
    with torch.device("meta"):
        backbone = Backbone(config, operations)
        prefix = TextPrefix(len(table), config.dim, null, operations)
    defaults = SamplingParams(**{"temperature": 0.9, "top_p": 0.75} | meta.get("defaults", {}))
    model = DiscreteModel(
        backbone,
        prefix,
        _NAME,
        default,
        defaults,
        encoder,
        _PIXELS,
        positions=positions,
        grids=grids,
        longest=positive(settings, "max_position_embeddings", 131_072),
        word_ids=range(codes),
        preview=preview,
        guidance=False,
    )
    named = backbone_tensors(tensors, _ROOT, path)
    for name, parts in named.items():
        if ".wqkv." in name:
            q, k, v = parts
            rotated = 2 * sum(positions.sections)
            named[name] = (*apart(q, config.head_dim, rotated), *apart(k, config.head_dim, rotated), v)
    named |= word_tensors(table, head, len(table), range(codes))
    named |= others(tensors, _ROOT, _TABLE, _HEAD, _PARTS)
    model.dtype = dtype
    load_weights(model, named, checkpoint, dtype)
    if _CODEBOOK in tensors:
        vectors = matrix(tensors, _CODEBOOK, path)
        if len(vectors) != codes:
            raise CheckpointError(
                f"{path.name} has a codebook of {len(vectors)} codes, but a model of {codes}. Download it again."
            )
        model.attach_semantics(F.normalize(vectors.float(), dim=-1))
    return model


def positions_of(settings: Mapping[str, Any], head_dim: int, side: int) -> AxisPositions:
    """The positions that config.json describes, or those of the release. Raises CheckpointError for other kinds."""
    rope = settings.get("rope_parameters") or {}
    theta = rope_theta(settings)
    partial, sections = rope.get("partial_rotary_factor", _PARTIAL), rope.get("mrope_section", _SECTIONS)
    whole = (
        isinstance(sections, (list, tuple))
        and len(sections) == 3
        and all(type(section) is int and section > 0 for section in sections)
    )
    if not whole or not isinstance(partial, (int, float)) or 2 * sum(sections) != head_dim * partial:
        raise CheckpointError(
            f"config.json rotates {partial!r} of every head of {head_dim} channels, in sections of {sections!r} pairs "
            "for time, row and column, which do not add up. Download config.json of the released model again."
        )
    return AxisPositions(tuple(sections), theta, side)


def apart(rows: Tensor, head_dim: int, rotated: int) -> tuple[Tensor, ...]:
    """Rows of a query or key projection [H * head_dim, ...] as parts, in the order in which our backbone rotates them.

    Of every head the first ``rotated`` channels turn, i with i + rotated / 2; the backbone turns i with
    i + head_dim / 2. So each half of a head gets half of the channels that turn, then half of the others, whose angles
    are 0. Scores stay the same, as queries and keys are permuted alike.
    """
    quarters = (rotated // 2, rotated // 2, (head_dim - rotated) // 2, (head_dim - rotated) // 2)
    parts = (head.split(quarters) for head in rows.split(head_dim))
    return tuple(part for first, second, third, fourth in parts for part in (first, third, second, fourth))


def prompt_ids(
    tokenizer: Tokenizer, text: str, grid: tuple[int, int], preview: tuple[int, int], begin: int
) -> list[int]:
    """Text, size of the image, size of its preview (rows and columns in tokens), and the id that begins an image.

    Raises CheckpointError for the tokenizer of another model.
    """
    for token in (_OPEN, _CLOSE):
        tokenizer.id(token)
    sizes = "".join(f"{_OPEN}{rows} {cols}{_CLOSE}" for rows, cols in (grid, preview))
    return [*tokenizer.ids(text + sizes), begin]


def stated_ids(settings: Mapping[str, Any], begin: int) -> dict[str, int]:
    """Special tokens -> ids by config.json, as far as it states any. begin: the id that begins an image."""
    found = {f"<|dit_token_{begin}|>": begin, "<|image|>": settings.get("image_token_id")}
    return {token: id for token, id in found.items() if id is not None}


def open_tokenizer(path: Path, search: Sequence[Path], stated: Mapping[str, int] | None = None) -> Tokenizer:
    """The tokenizer in the folder ``processor`` beside the model's folder, or in the model's own. stated: see
    check_ids."""
    return Tokenizer(
        find_tokenizer(path, _FOLDERS, search),
        f"{path.name} reads prompts through its tokenizer, which was not found. Put processor/tokenizer.json of "
        f"zai-org/GLM-Image into {path.parent}.",
        stated,
    )


FAMILY = Family(
    labels=("GLM-Image",),
    decoders={_NAME: ReleasedDecoder(node="GLM-Image Decode")},
    recognise=recognise,
    load=load,
    releases={r"GLM-Image(/vision_language_encoder)?": (Source("zai-org/GLM-Image", "ar_models/GLM-Image"),)},
)
