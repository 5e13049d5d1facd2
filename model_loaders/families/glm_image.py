"""GLM-Image (zai-org/GLM-Image): its autoregressive stage, a GLM-4 language model that generates the codes of a small
preview, then those of the image, 32 pixels each.

The codes describe what an image shows; a diffusion transformer, which also reads the prompt, turns them into pixels
(see decoders/glm_image.py). Reads the folder ``vision_language_encoder`` of the release. Of the encoder of source
images in the same files (see glm_image_sources.py) only the codebook is read, by which rules compare codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...limits.limits import bounded_int
from ...models.discrete_model import DiscreteModel
from ...models.networks.glm_image import PREVIEW, AxisPositions, preview_grid
from ...models.sizes import Grid, choose_grid, legal_grid
from ...models.text.prompt_encoders import ImagePrompts, Images, TokenEncoder
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.weights import Weights
from ..llama import backbone_config, language_root, matrix, positive, rope_theta, text_settings
from .glm_image_sources import FOLDERS, MOST, load_encoder, open_scaling
from .language_models import Ids, Names, build_language_model

_NAME = "glm-image"
_NAMES = Names("model.language_model.", unread=("model.visual.", "model.vqmodel."))  # the encoder of source images
_CODEBOOK = "model.vqmodel.quantize.embedding.weight"  # compared by direction alone
_HEADS = {4096: 32}  # width -> heads
_CODES = 16_384  # their ids are the first of the vocabulary; the next one begins an image
_SIDES, _ASPECT = range(16, 65), 4  # tokens per side: 512 to 2048 pixels
_GRIDS = tuple((h, w) for h in _SIDES for w in _SIDES if max(h, w) <= _ASPECT * min(h, w))
_DEFAULT = (32, 32)
_PIXELS = 32  # per side of a token
_PARTIAL, _SECTIONS = 0.5, (8, 12, 12)  # the rotated part of a head, and its pairs of channels by axis
_OPEN, _CLOSE = "<sop>", "<eop>"  # around the size of a grid


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a GLM-4 language model whose head has fewer rows than its vocabulary: those of images alone."""
    root = language_root(tensors, (_NAMES.root,))
    if root is None or _NAMES.head not in tensors or f"{root}layers.0.post_mlp_layernorm.weight" not in tensors:
        return False
    return tensors[_NAMES.head].shape[:1] < tensors[_NAMES.table].shape[:1]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU.

    Raises CheckpointError if tensors are missing, misshapen or not finite, for positions of another kind, and for an
    unsupported grid.
    """
    path, meta, settings = checkpoint.path, checkpoint.own_settings, text_settings(checkpoint)
    table, head = _NAMES.matrices(checkpoint)
    codes = checkpoint.settings.get("image_start_token_id", _CODES)
    if type(codes) is not int or not 1 < codes <= len(head):
        raise CheckpointError(
            f"{path.name} has a head of {len(head)} image tokens, but its config.json says that {codes!r} begins an "
            "image, which is the id after the last of them. Download config.json of the released model again."
        )
    grids = (legal_grid(meta["grid"]),) if "grid" in meta else _GRIDS
    default = choose_grid(path, grid, meta.get("grid", _DEFAULT), grids)
    side = bounded_int("preview_side", meta.get("preview_side", PREVIEW), 1, 64)
    config = backbone_config(checkpoint, _NAMES.root, codes, _HEADS, norm_eps=1e-5)
    positions = positions_of(settings, config.head_dim, side)

    def preview(size: tuple[int, int]) -> tuple[int, int]:
        return preview_grid(size, side)

    def null(_features: Tensor, _size: tuple[int, int]) -> Tensor:
        raise ValueError("GLM-Image was trained without guidance, so it has no unconditional prompt. Set cfg to 1.")

    tokenizer = open_tokenizer(path, search, stated_ids(checkpoint.settings, codes))

    def write(text: str, size: Grid, images: Images = ()) -> list[int]:
        return prompt_ids(tokenizer, text, (size,) if images else (size, preview(size)), codes, images)

    scaling = open_scaling(path, search)
    images = ImagePrompts(MOST, codes, scaling.scale, write, seen=scaling.scale_to_encode)
    model = build_language_model(
        checkpoint,
        dtype,
        operations,
        _NAMES,
        Ids(range(codes), len(table)),
        config,
        null,
        rearranged=partial(apart, head_dim=config.head_dim, rotated=2 * sum(positions.sections)),
        family=_NAME,
        grid=default,
        grids=grids,
        defaults=SamplingParams(**{"temperature": 0.9, "top_p": 0.75} | meta.get("defaults", {})),
        prompt_encoder=TokenEncoder(tokenizer, write, default, images=images),
        pixels_per_token=_PIXELS,
        positions=positions,
        longest=positive(settings, "max_position_embeddings", 131_072),
        preview=preview,
        guidance=False,
    )
    if _CODEBOOK in checkpoint.tensors:
        vectors = matrix(checkpoint.tensors, _CODEBOOK, path)
        if len(vectors) != codes:
            raise CheckpointError(
                f"{path.name} has a codebook of {len(vectors)} codes, but a model of {codes}. Download it again."
            )
        model.attach_codebook(F.normalize(vectors.float(), dim=-1), id_latents=True)
    return model


def positions_of(settings: Mapping[str, Any], head_dim: int, side: int) -> AxisPositions:
    """The positions that config.json describes, or those of the release. Raises CheckpointError for other kinds."""
    rope = settings.get("rope_parameters") or {}
    theta = rope_theta(settings)
    share, sections = rope.get("partial_rotary_factor", _PARTIAL), rope.get("mrope_section", _SECTIONS)
    whole = (
        isinstance(sections, (list, tuple))
        and len(sections) == 3
        and all(type(section) is int and section > 0 for section in sections)
    )
    if not whole or not isinstance(share, (int, float)) or 2 * sum(sections) != head_dim * share:
        raise CheckpointError(
            f"config.json rotates {share!r} of every head of {head_dim} channels, in sections of {sections!r} pairs "
            "for time, row and column, which do not add up. Download config.json of the released model again."
        )
    return AxisPositions(tuple(sections), theta, side)


def apart(layers: Weights, head_dim: int, rotated: int) -> Weights:
    """The layers with the rows of query and key projections [H * head_dim, ...] as parts, in the order in which our
    backbone rotates them.

    Of every head the first ``rotated`` channels turn, i with i + rotated / 2; the backbone turns i with
    i + head_dim / 2. So each half of a head gets half of the channels that turn, then half of the others, whose angles
    are 0. Scores stay the same, as queries and keys are permuted alike.
    """
    quarters = (rotated // 2, rotated // 2, (head_dim - rotated) // 2, (head_dim - rotated) // 2)

    def parts(rows: Tensor) -> tuple[Tensor, ...]:
        heads = (head.split(quarters) for head in rows.split(head_dim))
        return tuple(part for first, second, third, fourth in heads for part in (first, third, second, fourth))

    return {
        name: (*parts(rows[0]), *parts(rows[1]), rows[2]) if ".wqkv." in name else rows for name, rows in layers.items()
    }


def prompt_ids(tokenizer: Tokenizer, text: str, grids: Sequence[Grid], begin: int, images: Images = ()) -> list[int]:
    """The images [h, w] (int64), each between the id that begins one and the next id, text, size (rows and columns in
    tokens) of the image and of its preview if there is one, and the id that begins an image.

    Raises CheckpointError for the tokenizer of another model.
    """
    for token in (_OPEN, _CLOSE):
        tokenizer.id(token)
    sizes = "".join(f"{_OPEN}{rows} {cols}{_CLOSE}" for rows, cols in grids)
    sources = [id for image in images for id in (begin, *image.flatten().tolist(), begin + 1)]
    return [*sources, *tokenizer.ids(text + sizes), begin]


def stated_ids(settings: Mapping[str, Any], begin: int) -> dict[str, int]:
    """Special tokens -> ids by config.json, as far as it states any. begin: the id that begins an image."""
    found = {
        f"<|dit_token_{begin}|>": begin,
        f"<|dit_token_{begin + 1}|>": settings.get("image_end_token_id"),
        "<|image|>": settings.get("image_token_id"),
    }
    return {token: id for token, id in found.items() if id is not None}


def open_tokenizer(path: Path, search: Sequence[Path], stated: Mapping[str, int] | None = None) -> Tokenizer:
    """The tokenizer in the folder ``processor`` beside the model's folder, or in the model's own. stated: see
    check_ids."""
    return Tokenizer(
        find_tokenizer(path, FOLDERS, search),
        f"{path.name} reads prompts through its tokenizer, which was not found. Put processor/tokenizer.json of "
        f"zai-org/GLM-Image into {path.parent}.",
        stated,
    )


FAMILY = Family(
    labels=("GLM-Image",),
    decoders={_NAME: ReleasedDecoder(node="GLM-Image Decode")},
    recognise=recognise,
    load=load,
    releases={r"GLM-Image(/vision_language_encoder)?": (Download("zai-org/GLM-Image", "ar_models/GLM-Image"),)},
    image_prompt_models=("GLM-Image",),
    encoder=load_encoder,
)
