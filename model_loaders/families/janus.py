"""Janus-Pro (Chen et al., arXiv:2501.17811) as DeepSeek released it, and in transformers' naming.

Only what generates images is read: the language model, and the embedding and the head of its image tokens. vq.py reads
the image decoder and, when an image is to be described, janus_reading.py the vision encoder and the text head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.discrete_model import DiscreteModel
from ...models.image_reader import ImageReader
from ...models.networks.backbone import Backbone
from ...models.networks.janus import CodeEmbedding, CodeHead
from ...models.networks.positions import SequencePositions
from ...models.networks.prefix import TextPrefix
from ...models.sizes import choose_grid, legal_grid
from ...models.text.prompt_encoders import TokenEncoder
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint, read_settings, title
from ..files.errors import CheckpointError
from ..files.names import meaning, rename
from ..files.weights import load_weights
from ..llama import backbone_config, backbone_tensors, positive, rope_theta, text_settings, unpad
from .janus_reading import load_patch_reader

_RELEASED = {2048: ("Janus-Pro-1B", 16), 4096: ("Janus-Pro-7B", 32)}  # width -> folder, heads
_ROOTS = ("language_model.model.", "model.language_model.")  # of the language model: original, transformers
_PARTS = {  # ours -> original, transformers
    "prefix.embedding": ("language_model.model.embed_tokens", "model.language_model.embed_tokens"),
    "backbone.tok_embeddings.table": ("gen_embed", "model.generation_embeddings"),
    "backbone.tok_embeddings.fc1": ("gen_aligner.layers.0", "model.generation_aligner.fc1"),
    "backbone.tok_embeddings.fc2": ("gen_aligner.layers.2", "model.generation_aligner.hidden_layers.0"),
    "backbone.output.fc1": ("gen_head.output_mlp_projector", "model.generation_head.proj_out"),
    "backbone.output.fc2": ("gen_head.vision_head", "model.generation_head.vision_head"),
}
_AROUND = {  # the modules of these parts, for tensors that they lack here
    "gen_embed.": "backbone.tok_embeddings.",
    "model.generation_embeddings.": "backbone.tok_embeddings.",
    "gen_aligner.": "backbone.tok_embeddings.",
    "model.generation_aligner.": "backbone.tok_embeddings.",
    "gen_head.": "backbone.output.",
    "model.generation_head.": "backbone.output.",
    "language_model.model.": "backbone.",
    "model.language_model.": "backbone.",
}
_SKIPPED = (
    "vision_model.",
    "aligner.",
    "gen_vision_model.",
    "language_model.lm_head.",
    "model.vision_model.",
    "model.aligner.",
    "model.vqmodel.",
    "lm_head.",
)
_BOS, _IMAGE_BEGIN, _IMAGE_END = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<end_of_image>"
_PLACEHOLDER = "<image_placeholder>"
_SYSTEM = (  # of every conversation about an image, in training, too
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_PAD = "<｜▁pad▁｜>"
_ROLES = ("<|User|>", "<|Assistant|>")
_OTHER_ROLES = {"t2ir1": ("User", "Assistant")}  # name of a fine-tune's folder -> how its code calls the two


def recognise(tensors: Collection[str]) -> bool:
    """Whether this is a Janus, under either naming, or a related model that only reads images."""
    marks = {
        _ROOTS[0]: ("gen_embed.", "gen_head.", "aligner."),
        _ROOTS[1]: ("model.generation_embeddings.", "model.generation_head.", "model.aligner."),
    }
    return any(
        f"{root}embed_tokens.weight" in tensors and any(name.startswith(marks[root]) for name in tensors)
        for root in _ROOTS
    )


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU. Raises CheckpointError for tensors that are missing, unknown, misshapen or not
    finite, for models that do not generate images, and for a grid that it was not trained on."""
    path, meta, settings = checkpoint.path, checkpoint.own_settings, text_settings(checkpoint)
    own = own_grid(checkpoint)
    choose_grid(path, grid, own, [own])
    named, root = tensors_of(checkpoint)
    sizes = {name: tensor.shape for name, tensor in named.items() if not isinstance(tensor, tuple)}
    codes, code_dim = sizes["backbone.tok_embeddings.table.weight"]
    inner = sizes["backbone.output.fc1.weight"][0]
    words = sizes["prefix.embedding.weight"][0]
    config = backbone_config(checkpoint, root, codes, {dim: heads for dim, (_, heads) in _RELEASED.items()}, 1e-6)
    tokenizer = open_tokenizer(checkpoint, config.dim, words, search)
    with torch.device("meta"):
        backbone = Backbone(config, operations)
        backbone.tok_embeddings = CodeEmbedding(codes, code_dim, config.dim, operations)
        backbone.output = CodeHead(config.dim, inner, codes, operations)
        prefix = TextPrefix(words, config.dim, partial(without_words, tokenizer), operations)
    roles = meaning(title(path), _OTHER_ROLES) or _ROLES
    model = DiscreteModel(
        backbone,
        prefix,
        "janus-pro",
        own,
        SamplingParams(**meta.get("defaults", {"cfg": 5.0})),
        TokenEncoder(tokenizer, partial(prompt_ids, tokenizer, roles), own),
        meta.get("pixels_per_token", 16),
        positions=SequencePositions(rope_theta(settings)),
        longest=int(positive(settings, "max_position_embeddings", 16384)),
    )
    model.dtype = dtype
    return load_weights(model, unpad(named, config), checkpoint, dtype)


def open_tokenizer(checkpoint: Checkpoint, dim: int, words: int, search: Sequence[Path]) -> Tokenizer:
    """The tokenizer of a model of width ``dim`` with ``words`` rows for text."""
    folder, path = _RELEASED.get(dim, ("Janus-Pro",))[0], checkpoint.path
    missing = (
        f"{folder} reads prompts through tokenizer.json, which was not found. Put that of deepseek-ai/{folder} "
        f"into the folder {path.parent}."
    )
    return Tokenizer(find_tokenizer(path, (folder,), search), missing, stated_ids(checkpoint), words)


def reader(checkpoint: Checkpoint, model: DiscreteModel, search: Sequence[Path], operations=nn) -> ImageReader:
    """The part of the files of ``model`` that reads images. Raises CheckpointError as ``load`` does."""
    words = model.backbone.config.dim, model.prefix.words
    tokenizer = open_tokenizer(checkpoint, *words, search)
    return load_patch_reader(checkpoint, model, tokenizer, partial(question_ids, tokenizer), operations)


def tensors_of(checkpoint: Checkpoint) -> tuple[dict[str, Tensor | tuple[Tensor, ...]], str]:
    """The tensors that generate images, under the names of a DiscreteModel, and the prefix of the language model.

    Raises CheckpointError if some are missing.
    """
    path, tensors = checkpoint.path, checkpoint.tensors
    layout = int(f"{_ROOTS[1]}embed_tokens.weight" in tensors)
    root, names = _ROOTS[layout], {theirs[layout]: ours for ours, theirs in _PARTS.items()}
    missing = [f"{part}.weight" for part in names if f"{part}.weight" not in tensors]
    if len(missing) >= len(_PARTS) - 1:  # all but the text embedding
        raise CheckpointError(
            f"{path.parent.name} ({path.name}) only reads images: it has no {', no '.join(missing[:2])}. "
            "Use deepseek-ai/Janus-Pro-1B or -7B, which also generate."
        )
    if missing:
        raise CheckpointError(f"{path.name} lacks {', '.join(missing[:3])}. It is incomplete: download it again.")
    named = backbone_tensors(tensors, root, path)
    for name, tensor in tensors.items():
        if not name.startswith((f"{root}layers.", f"{root}norm.", *_SKIPPED)):
            part, _, kind = name.rpartition(".")
            named |= {f"{names[part]}.{kind}": tensor} if part in names else rename({name: tensor}, _AROUND | {"": ""})
    return named, root


def own_grid(checkpoint: Checkpoint) -> tuple[int, int]:
    """The grid of a Janus: square, with the number of image tokens of its vision tower or processor; default 24 x 24.

    Raises CheckpointError if that is not a square number.
    """
    if "grid" in checkpoint.own_settings:
        return legal_grid(checkpoint.own_settings["grid"])
    settings = checkpoint.settings
    beside = read_settings(checkpoint.path.parent / "processor_config.json") if settings else {}
    count = (beside | (settings.get("vision_config") or {})).get("num_image_tokens", 576)
    side = isqrt(count) if isinstance(count, int) and count > 0 else 0
    if not side or side * side != count:
        raise CheckpointError(
            f"The config of {checkpoint.path.parent.name} has {count} tokens per image, which is not a square number. "
            "Download config.json and processor_config.json again."
        )
    return legal_grid((side, side))


def stated_ids(checkpoint: Checkpoint) -> dict[str, int]:
    """Special tokens -> ids by transformers' config.json and generation_config.json, as far as there are any. In
    DeepSeek's layout they state none: what a training saved there are Llama's."""
    settings = checkpoint.settings
    own = settings.get("model_type") == "janus"
    beside = read_settings(checkpoint.path.parent / "generation_config.json") if own else {}
    found = {
        _PLACEHOLDER: settings.get("image_token_id"),
        _BOS: beside.get("bos_token_id"),
        _PAD: beside.get("pad_token_id"),
        _IMAGE_BEGIN: (beside.get("generation_kwargs") or {}).get("boi_token_id"),
    }
    return {token: id for token, id in found.items() if id is not None}


def prompt_ids(tokenizer: Tokenizer, roles: tuple[str, str], text: str, _grid: tuple[int, int]) -> list[int]:
    """A conversation in which the user asks for ``text`` and the assistant starts an image. roles: their names.

    Raises CheckpointError for the tokenizer of another model.
    """
    (user, assistant), said = roles, text.strip()
    asked = f"{user}: {said}\n\n{assistant}:" if said else f"{user}:{assistant}:"
    return [tokenizer.id(_BOS), *tokenizer.ids(asked), tokenizer.id(_IMAGE_BEGIN)]


def question_ids(tokenizer: Tokenizer, question: str, patches: int) -> tuple[list[int], int]:
    """The conversation in which the user shows an image and asks, and the assistant begins to answer: ids, ``patches``
    of which stand for the image, and the place of the first of these.

    As VLChatProcessor of https://github.com/deepseek-ai/Janus writes it. Raises CheckpointError for the tokenizer of
    another model.
    """
    message = f"{_PLACEHOLDER}\n{question}".strip()
    ids = [tokenizer.id(_BOS), *tokenizer.ids(f"{_SYSTEM}\n\n<|User|>: {message}\n\n<|Assistant|>:")]
    patch = tokenizer.id(_PLACEHOLDER)
    place = ids.index(patch)  # the question comes after it
    image: Sequence[int] = [tokenizer.id(_IMAGE_BEGIN), *[patch] * patches, tokenizer.id(_IMAGE_END)]
    return [*ids[:place], *image, *ids[place + 1 :]], place + 1


def without_words(tokenizer: Tokenizer, features: Tensor, _grid: tuple[int, int]) -> Tensor:
    """The prompt [B, n, 1] with padding in place of all but its first and last token: Janus' unconditional prompt."""
    padded = torch.full_like(features, tokenizer.id(_PAD))
    padded[:, [0, -1]] = features[:, [0, -1]]
    return padded


FAMILY = Family(
    ("Janus-Pro",),
    {"janus-pro": ReleasedDecoder()},
    recognise,
    load,
    readers={"janus-pro": reader},
    caption_models=("Janus-Pro",),
    aliases=(*_PARTS.values(), ("aligner.layers.0", "aligner.fc1"), ("aligner.layers.2", "aligner.hidden_layers.0")),
    releases={r"Janus-Pro-[17]B": (Download(r"deepseek-community/\g<0>", r"ar_models/\g<0>"),)},
)
