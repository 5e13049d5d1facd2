"""The Chameleon family (arXiv:2405.09818) as Hugging Face folders: Lumina-mGPT (arXiv:2408.02657), Lumina-mGPT 2.0
(arXiv:2507.17801) and Anole (arXiv:2407.06135).

Image tokens are part of the language model's vocabulary. Lumina-mGPT was fine-tuned from a conversion whose query and
key norms have one row for all heads; tokens before an image state its size, and a special token ends every row.
Lumina-mGPT 2.0 was trained from scratch with the same layers and the same layout of an image, but Qwen's words and the
codes of MoVQGAN, of 8 pixels a side. Anole keeps Chameleon's one row per head, and generates 512 x 512 pixels without
special tokens between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.image_reader import TokenReader
from ...models.networks.positions import SequencePositions
from ...models.pictures import scale_to_cover
from ...models.sizes import choose_grid, legal_grid
from ...models.text.prompt_encoders import ImagePrompts, Images, TokenEncoder, features_of
from ...models.text.tokenizer import Tokenizer
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import meaning
from ..llama import backbone_config, language_root, positive, rope_theta
from ..text.chameleon_prompts import (
    BEGIN,
    BOS,
    CELL,
    END,
    ROW_END,
    TURN_END,
    Vocabulary,
    anole_null,
    anole_prompt,
    lumina2_prompt,
    lumina_image_prompt,
    lumina_opening,
    lumina_prompt,
    lumina_question,
    lumina_tokens,
    open_tokenizer,
)
from .language_models import Ids, Names, build_language_model, token_reader

_PATCH = 16  # side in pixels of a token of Chameleon's VQGAN
_VQ = "model.vqmodel."
_NAMES = Names("model.", unread=(_VQ,))
_NORM = "model.layers.0.self_attn.q_norm.weight"
_ORIGINAL = "layers.0.attention.q_normalization.weight"  # of a consolidated.pth
_HEADS = {4096: 32}  # width -> heads
_TOKENIZERS = ("Lumina-mGPT-7B-768", "Anole-7b-v0.1-hf", "chameleon-7b")  # released with the same tokenizer
_TOKENIZERS2 = ("Lumina-mGPT-2.0", "Lumina-mGPT-2.0-Omni")
_SIZES = {"512": 512, "768": 768, "1024": 1024}  # numbers in released names of Lumina-mGPT -> pixels per side
_WORDS_TOP_K = 10  # where words are sampled
_IMAGE_TOP_K = 200  # of an image that is made of another, which is not guided
_SIDE2 = 768  # pixels per side of the square images of Lumina-mGPT 2.0


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a model of the Chameleon family, in Hugging Face's or Meta's naming."""
    hugging_face = language_root(tensors, (_NAMES.root,), "q_norm.weight") is not None
    return _ORIGINAL in tensors or (hugging_face and tensors[_NORM].ndim == 2)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU. Raises CheckpointError for tensors that are missing, misshapen or not finite, and for
    models that do not generate images."""
    path, settings = checkpoint.path, checkpoint.settings
    check_supported(checkpoint)
    embeddings, head = _NAMES.matrices(checkpoint)
    words = Vocabulary.of(settings, len(embeddings), path)
    if not head[words.images.start : words.images.stop].any():
        raise CheckpointError(
            f"The head of {path.name} is zero for all image tokens: it is the initial state "
            "of a training and cannot generate images. Use a released model."
        )
    if words.patch != _PATCH:
        kind = lumina2(checkpoint, words, search)
    elif len(checkpoint.tensors[_NORM]) == 1:
        kind = lumina(checkpoint, words, grid, search)
    else:
        kind = anole(checkpoint, words, search)
    config = backbone_config(checkpoint, _NAMES.root, words.codes + len(kind.specials), _HEADS, norm_eps=1e-5)
    if config.head_norms not in (1, config.heads):
        raise CheckpointError(
            f"{path.name} normalises its {config.heads} heads in {config.head_norms} groups, as models of 34B do. "
            "Only those of 7B are supported."
        )
    defaults = {"cfg": kind.cfg, "top_k": min(kind.top_k, words.codes)}
    return build_language_model(
        checkpoint,
        dtype,
        operations,
        _NAMES,
        Ids(words.images, len(embeddings), kind.specials, row_ends=len(kind.specials) > 1),
        config,
        lambda features, size: features_of(kind.null(size)),
        family=kind.family,
        grid=choose_grid(path, grid, kind.grid, kind.grids),
        grids=kind.grids,
        defaults=SamplingParams(**checkpoint.own_settings.get("defaults", defaults)),
        prompt_encoder=kind.encoder,
        pixels_per_token=words.patch,
        positions=SequencePositions(rope_theta(settings)),
        longest=longest(settings, kind.grids),
    )


@dataclass(frozen=True)
class Kind:
    """The differences between the models. specials: ids of the tokens that end a row (if any) and the image; null:
    grid -> ids of the unconditional prompt; cfg and top_k: the authors'."""

    family: str
    grid: tuple[int, int]
    grids: Sequence[tuple[int, int]]
    specials: Sequence[int]
    encoder: TokenEncoder
    null: Callable[[tuple[int, int]], list[int]]
    cfg: float = 3.0
    top_k: int = 2000


def lumina(checkpoint: Checkpoint, words: Vocabulary, grid: tuple[int, int] | None, search: Sequence[Path]) -> Kind:
    """Lumina-mGPT, any of the sizes it was trained on. Raises CheckpointError if the size is unknown."""
    side = target_size(checkpoint.path, checkpoint.own_settings, grid) // words.patch
    grids = size_table(side)
    tokenizer = lumina_tokenizer(checkpoint, words, grids, search)
    write = partial(lumina_prompt, words, tokenizer)
    return Kind(
        "lumina-mgpt",
        (side, side),
        grids,
        (words[ROW_END], words[END]),
        TokenEncoder(tokenizer, write, (side, side), images=omni(checkpoint, words, tokenizer, grids)),
        partial(lumina_opening, words),
    )


def lumina_tokenizer(
    checkpoint: Checkpoint, words: Vocabulary, grids: Sequence[tuple[int, int]], search: Sequence[Path]
) -> Tokenizer:
    """The tokenizer of Lumina-mGPT for images of these grids."""
    source = "Alpha-VLLM/Lumina-mGPT-7B-768 (the only one of its repositories that has it)"
    tokens = (BOS, TURN_END, *lumina_tokens(words, grids))
    return open_tokenizer("Lumina-mGPT", source, words, tokens, checkpoint.path, _TOKENIZERS, search)


def lumina_reader(checkpoint: Checkpoint, model: DiscreteModel, search: Sequence[Path], operations=nn) -> TokenReader:
    """How Lumina-mGPT answers questions about an image: it is cropped as for an edit, and stands after the question.

    Raises CheckpointError as ``load`` does.
    """
    size = len(_NAMES.matrices(checkpoint)[1])
    words = Vocabulary.of(checkpoint.settings, size, checkpoint.path)
    tokenizer = lumina_tokenizer(checkpoint, words, model.grids, search)

    def write(question: str, image: Tensor) -> list[int]:
        return lumina_question(words, tokenizer, question, [image])

    crop = partial(crop_to_grid, grids=model.grids)
    sampled = SamplingParams(top_k=_WORDS_TOP_K)
    return token_reader(checkpoint, model, _NAMES, size, operations, tokenizer, crop, write, TURN_END, sampled)


def omni(
    checkpoint: Checkpoint, words: Vocabulary, tokenizer: Tokenizer, grids: Sequence[tuple[int, int]]
) -> ImagePrompts | None:
    """How the Lumina-mGPT that was trained on tasks with images, which only its name tells, reads one."""

    def write(text: str, grid: tuple[int, int], images: Images) -> list[int]:
        return lumina_image_prompt(words, tokenizer, text, grid, images)

    if not meaning(title(checkpoint.path), {"omni": True}):
        return None
    params = {"cfg": 1.0, "top_k": min(_IMAGE_TOP_K, words.codes)} | checkpoint.own_settings.get("defaults", {})
    return ImagePrompts(1, words.codes, partial(crop_to_grid, grids=grids), write, params=params)


def lumina2(checkpoint: Checkpoint, words: Vocabulary, search: Sequence[Path]) -> Kind:
    """Lumina-mGPT 2.0. All of its released models generate images of the area of 768 x 768 pixels."""
    meta, source = checkpoint.own_settings, "Alpha-VLLM/Lumina-mGPT-2.0"
    side = max(legal_grid(meta["grid"])) if "grid" in meta else _SIDE2 // words.patch
    grids = size_table(side, words.patch)
    tokens = tuple(lumina_tokens(words, grids))  # without the end of a turn, which may be several
    tokenizer = open_tokenizer("Lumina-mGPT 2.0", source, words, tokens, checkpoint.path, _TOKENIZERS2, search)
    return Kind(
        "lumina-mgpt-2",
        (side, side),
        grids,
        (words[ROW_END], words[END]),
        TokenEncoder(tokenizer, partial(lumina2_prompt, words, tokenizer), (side, side)),
        partial(lumina_opening, words),
        cfg=4.0,
        top_k=4096,
    )


def anole(checkpoint: Checkpoint, words: Vocabulary, search: Sequence[Path]) -> Kind:
    """Anole, which generates one size."""
    grid, source = anole_grid(checkpoint.settings, checkpoint.own_settings), "leloy/Anole-7b-v0.1-hf"
    tokens = (BOS, TURN_END, BEGIN, END)
    tokenizer = open_tokenizer("Anole", source, words, tokens, checkpoint.path, _TOKENIZERS, search)
    write = partial(anole_prompt, words, tokenizer)
    encoder = TokenEncoder(tokenizer, write, grid)
    return Kind("anole", grid, [grid], (words[END],), encoder, partial(anole_null, words))


def check_supported(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for related models that are not supported or do not generate images."""
    path, tensors, settings = checkpoint.path, checkpoint.tensors, checkpoint.settings
    if _ORIGINAL in tensors:
        raise CheckpointError(
            f"{path.name} is in Meta's layout of Chameleon. Use the Hugging Face folder of the model instead: for "
            "Anole that is leloy/Anole-7b-v0.1-hf (transformers' script convert_chameleon_weights_to_hf.py converts "
            "others)."
        )
    if settings.get("swin_norm"):
        raise CheckpointError(
            f"{title(path)} normalises after its blocks (swin_norm), as models of 34B do. Only "
            "those of 7B are supported."
        )
    masked = settings.get("mask_image_logits")
    if masked:
        raise CheckpointError(
            f"{title(path)} is Meta's Chameleon, or a similar model: it reads images, but its image output was "
            "switched off before its release. Use leloy/Anole-7b-v0.1-hf or Alpha-VLLM/Lumina-mGPT-7B-768."
        )
    parts = {part for part in ("encoder", "decoder") if any(n.startswith(f"{_VQ}{part}.") for n in tensors)}
    if parts == {"encoder"} and len(tensors.get(_NORM, ())) != 1 and masked is None:
        raise CheckpointError(
            f"{title(path)} is either Meta's Chameleon, whose image output was switched off before its release, or "
            "Anole as transformers saves it, without its image decoder: the remaining tensors are the same. If it is "
            f'Anole, write "mask_image_logits": false into its config.json and put {_DECODER.home} beside it; if not, '
            "use leloy/Anole-7b-v0.1-hf."
        )


# Sizes


def size_table(side: int, patch: int = _PATCH) -> list[tuple[int, int]]:
    """Grids (rows, columns) of the sizes that a Lumina-mGPT was trained on. side: tokens per side of its square images;
    patch: pixels per side of a token.

    For every width in cells of 32 pixels, the heights that come closest to the square's area without exceeding it, up
    to an aspect ratio of 4.
    """
    scale = CELL // patch
    area = (side // scale) ** 2
    return [
        (high * scale, wide * scale)
        for wide in range(area, 0, -1)
        for high in range(max(1, area // (wide + 1)), area // wide + 1)
        if max(wide, high) <= 4 * min(wide, high)
    ]


def crop_to_grid(image: Tensor, patch: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """An image [H, W, 3] in 0..1, scaled and cropped to that of ``grids`` which has its proportions best. Of what is
    too long the middle is kept; the authors' code, made for training, keeps a random part."""
    height, width = image.shape[:2]

    def fit(grid: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        ratios = grid[1] * patch / width, grid[0] * patch / height
        return min(ratios) / max(ratios), (grid[1], grid[0])

    rows, cols = max(grids, key=fit)
    return scale_to_cover(image, rows * patch, cols * patch)


def target_size(path: Path, metadata: Mapping[str, Any], grid: tuple[int, int] | None) -> int:
    """Pixels per side that a Lumina-mGPT checkpoint was trained for: by metadata, the model's name, or a square grid.

    Raises CheckpointError if all are missing; neither weights nor config.json contain it.
    """
    if "grid" in metadata:
        return max(legal_grid(metadata["grid"])) * _PATCH
    name = title(path)
    pixels = meaning(name, _SIZES)
    if pixels is None and grid and grid[0] == grid[1] and grid[0] % 2 == 0:
        return grid[0] * _PATCH
    if pixels is None:
        raise CheckpointError(
            f"The name {name} does not show which size this Lumina-mGPT was trained for. Keep the released name of its "
            "folder, which contains one of 512, 768 or 1024, or set grid to 32, 48 or 64 (tokens per side)."
        )
    return pixels


def anole_grid(settings: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[int, int]:
    """The grid of an Anole: that of its image tokenizer's resolution; default 32 x 32."""
    if "grid" in metadata:
        return legal_grid(metadata["grid"])
    vq = settings.get("vq_config") or {}
    levels = vq.get("channel_multiplier") or vq.get("ch_mult") or (1, 1, 2, 2, 4)
    side = vq.get("resolution", 512) >> (len(levels) - 1)
    return legal_grid((side, side))


def longest(settings: Mapping[str, Any], grids: Sequence[tuple[int, int]]) -> int | None:
    """Maximum tokens of prompt and image by config.json; None if that is less than an image, as in configs that were
    copied from smaller models."""
    most = positive(settings, "max_position_embeddings", None)
    return int(most) if most and most > max(rows * (cols + 1) for rows, cols in grids) else None


_VQGAN = "leloy/Anole-7b-v0.1-vqvae-hf"
_DECODER = ReleasedDecoder(
    ("chameleon_vqgan", "vqgan", "Anole-7b-v0.1-vqvae-hf/model"),
    f"the folder Anole-7b-v0.1-vqvae-hf (repository {_VQGAN})",
)
_DECODER_SOURCE = Download(_VQGAN, "vae/Anole-7b-v0.1-vqvae-hf", "model.safetensors")
_MOVQGAN = "ai-forever/MoVQGAN"
_DECODER2 = ReleasedDecoder(("movqgan_270M",), f"movqgan_270M.ckpt (repository {_MOVQGAN})")
FAMILY = Family(
    labels=("Lumina-mGPT", "Lumina-mGPT 2.0", "Anole"),
    decoders={"lumina-mgpt": _DECODER, "lumina-mgpt-2": _DECODER2, "anole": _DECODER},
    recognise=recognise,
    load=load,
    releases={
        r"Lumina-mGPT-7B-768": (Download(r"Alpha-VLLM/\g<0>", r"ar_models/\g<0>"), _DECODER_SOURCE),
        r"Lumina-mGPT-7B-(512|1024|768-Omni)": (
            Download(r"Alpha-VLLM/\g<0>", r"ar_models/\g<0>"),
            Download("Alpha-VLLM/Lumina-mGPT-7B-768", r"ar_models/\g<0>", "tokenizer.json"),
            _DECODER_SOURCE,
        ),
        r"Lumina-mGPT-2\.0(-Omni)?": (
            Download(r"Alpha-VLLM/\g<0>", r"ar_models/\g<0>"),
            Download(_MOVQGAN, "vae", "movqgan_270M.ckpt"),
        ),
        r"Anole-7b-v0\.1-hf": (Download(r"leloy/\g<0>", r"ar_models/\g<0>"),),
        r"anole_drafter": (Download(r"jadohu/\g<0>", r"ar_drafters/\g<0>"),),
    },
    image_prompt_models=("Lumina-mGPT-7B-768-Omni",),
    readers={"lumina-mgpt": lumina_reader},
    caption_models=("Lumina-mGPT",),
)
