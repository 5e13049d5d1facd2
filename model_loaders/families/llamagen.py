"""LlamaGen (Sun et al., arXiv:2406.06525), class- and text-conditional, and the pack's models of the same layout.

Accepts the released .pt files, safetensors, and the Llama-style names of the Hugging Face conversions. Everything is
read from tensor shapes, except the number of heads (fused attention weights do not show it) and the grid (no
weight depends on it): those come from our metadata, the config.json of a conversion, the released sizes, and
the file name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from ...limits.limits import bounded_int
from ...models.discrete_model import DiscreteModel
from ...models.networks.backbone import Backbone, BackboneConfig, join_gates
from ...models.networks.positions import GridPositions
from ...models.networks.prefix import CaptionPrefix, ClassPrefix
from ...models.sizes import legal_grid
from ...models.text.prompt_encoders import ClassEncoder, MissingEncoder, PromptEncoder, WordEncoder
from ...samplers.contract import SamplingParams
from ..declarations import Download, Family, ReleasedDecoder
from ..files.checkpoint import Checkpoint, title
from ..files.errors import CheckpointError
from ..files.names import count, meaning, rename
from ..files.weights import Weights, load_weights
from ..llama import layer_tensors, positive
from ..text import t5

_HEADS = {  # (dim, layers) -> heads of the official sizes
    (768, 12): 12,
    (1024, 24): 16,
    (1280, 36): 20,
    (1536, 48): 24,
    (2560, 48): 40,
    (2048, 22): 32,
    (3200, 24): 32,
    (4096, 32): 32,
}
_SIDES = {  # whole words of released names -> tokens per side
    "256": 16,
    "384": 24,
    "512": 32,
    "stage1": 16,
    "stage2": 32,
    "llamagent2i": 16,
    "llamagent2i2": 32,
}
PARTS = {"cls_embedding.": "prefix.", "": "backbone."}  # of a DiscreteModel: released -> ours
_HUGGING_FACE = {"model.embed_tokens.": "tok_embeddings.", "lm_head.": "output.", "model.": "", "": ""}  # -> released


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a LlamaGen transformer, under either naming."""
    names = {name.removeprefix("model.") for name in tensors}
    embedded = "tok_embeddings.weight" in names or "embed_tokens.weight" in names
    return embedded and any(name.startswith("cls_embedding.") for name in names)


def official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Weights]:
    """The tensors outside the layers, and the layers, under LlamaGen's names, also of a file with Llama's."""
    tensors = checkpoint.tensors
    root = "" if "tok_embeddings.weight" in tensors else "model."
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{root}layers.")}
    outside = {name: tensor for name, tensor in tensors.items() if name not in layers}
    if root:
        return rename(outside, _HUGGING_FACE), layer_tensors(tensors, root, checkpoint.path)
    return outside, layers


def gpt_config(outside: Mapping[str, Tensor], layers: Weights, checkpoint: Checkpoint) -> BackboneConfig:
    """Sizes from shapes. Raises CheckpointError for a size whose number of heads is unknown."""
    path, settings = checkpoint.path, checkpoint.settings
    vocab, dim = outside["tok_embeddings.weight"].shape
    depth = count(layers, "layers.")
    gate = layers.get("layers.0.feed_forward.w1.weight")
    if gate is None:
        raise CheckpointError(f"{path.name} has no transformer layers. It is incomplete: download it again.")
    heads = checkpoint.metadata.get("heads") or settings.get("num_attention_heads") or _HEADS.get((dim, depth))
    if heads is None or dim % (4 * bounded_int("heads", heads, 1, dim)):  # positions rotate channels in groups of four
        raise CheckpointError(
            f"{path.name} has width {dim} and {depth} layers, which is not a released LlamaGen size, so its number of "
            'attention heads is unknown. Add safetensors metadata specar = {"heads": ...}.'
        )
    return BackboneConfig(dim, depth, heads, len(gate), vocab, positive(settings, "rms_norm_eps", 1e-5))


def own_grid(checkpoint: Checkpoint) -> tuple[int, int]:
    """The token grid by metadata, by the config.json of a conversion (``block_size`` tokens), or by the name of the
    file or Hugging Face folder.

    Raises CheckpointError if all are missing, or the name contains two sizes.
    """
    path, tokens = checkpoint.path, checkpoint.settings.get("block_size", 0)
    if "grid" in checkpoint.metadata:
        return legal_grid(checkpoint.metadata["grid"])
    if tokens and isqrt(tokens) ** 2 == tokens:
        return isqrt(tokens), isqrt(tokens)
    if side := meaning(title(path), _SIDES):
        return side, side
    raise CheckpointError(
        f"The name {title(path)} does not show one grid: set it (16 for 256, 24 for 384, 32 for 512 pixels), or keep "
        f"the released name of {path.name}, which contains the size as a number of its own."
    )


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Build the model on the CPU. Raises CheckpointError if tensors are missing, unknown, misshapen or not finite."""
    path, meta = checkpoint.path, checkpoint.metadata
    outside, layers = official_names(checkpoint)
    config = gpt_config(outside, layers, checkpoint)
    grid = legal_grid(grid) if grid else own_grid(checkpoint)
    prefix: nn.Module
    if "cls_embedding.cap_proj.fc1.weight" in outside:
        uncond = outside.get("cls_embedding.uncond_embedding")
        if uncond is None or uncond.ndim != 2:
            raise CheckpointError(
                f"{path.name} lacks cls_embedding.uncond_embedding, which guidance needs. Download it again."
            )
        slots, width = uncond.shape
        family, defaults = "llamagen-t2i", {"cfg": 7.5, "top_k": min(1000, config.vocab)}
        encoder = caption_encoder(path, meta, slots, width, search)
        with torch.device("meta"):
            prefix = CaptionPrefix(width, slots, config.dim, operations)
    elif "cls_embedding.embedding_table.weight" in outside:
        classes = len(outside["cls_embedding.embedding_table.weight"]) - 1
        family, defaults = "llamagen-c2i", {"cfg": 4.0, "top_k": min(2000, config.vocab)}
        encoder = ClassEncoder(classes, class_names(classes))
        with torch.device("meta"):
            prefix = ClassPrefix(classes, config.dim, operations)
    else:
        raise CheckpointError(
            f"{path.name} has neither caption nor class embeddings. It is incomplete: download it again."
        )
    with torch.device("meta"):
        backbone = Backbone(config, operations)
    params = SamplingParams(**meta.get("defaults", defaults))
    model = DiscreteModel(
        backbone,
        prefix,
        family,
        grid,
        params,
        encoder,
        meta.get("pixels_per_token", 16),
        positions=GridPositions(prompt_keys=meta.get("prompt_keys") is True),
    )
    model.dtype = dtype
    return load_weights(model, join_gates(rename(outside | {**layers}, PARTS)), checkpoint, dtype)


def caption_encoder(path: Path, meta: dict, slots: int, width: int, search: Sequence[Path]) -> PromptEncoder:
    """The word table beside one of the pack's models, or flan-t5-xl from the model's folder or the search folders."""
    words = path.parent / "text_encoder.safetensors"
    if "caption_slots" in meta and words.is_file():
        return WordEncoder.open(words, slots)
    return t5.find_t5(path, slots, width, search) or MissingEncoder(
        f"{path.name} reads prompts through flan-t5-xl, which was not found. Put the folder flan-t5-xl (config.json, "
        "tokenizer.json, the weights) or its encoder as one file with that name into models/text_encoders."
    )


def class_names(classes: int) -> list[str] | None:
    """ImageNet's 1000 class names, as torchvision (part of every ComfyUI) lists them."""
    if classes != 1000:
        return None
    try:
        from torchvision.models import ResNet18_Weights
    except (ImportError, RuntimeError):  # RuntimeError: torchvision built for another torch
        return None
    return list(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])


_REPOSITORY, _TEXT_REPOSITORY = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
FAMILY = Family(
    labels=("LlamaGen",),
    decoders={
        "llamagen-t2i": ReleasedDecoder(
            ("vq_ds16_t2i", "vq-ds16-t2i/model"), f"vq_ds16_t2i.pt (repository {_TEXT_REPOSITORY})"
        ),
        "llamagen-c2i": ReleasedDecoder(
            ("vq_ds16_c2i", "vq-ds16-c2i/model"), f"vq_ds16_c2i.pt (repository {_REPOSITORY})"
        ),
    },
    recognise=recognise,
    load=load,
    releases={
        r"c2i_\w+\.pt": (Download(_REPOSITORY, "ar_models", r"\g<0>"), Download(_REPOSITORY, "vae", "vq_ds16_c2i.pt")),
        r"t2i_XL_stage\w+\.pt": (
            Download(_TEXT_REPOSITORY, "ar_models", r"\g<0>"),
            Download(_TEXT_REPOSITORY, "vae", "vq_ds16_t2i.pt"),
            Download(
                "google/flan-t5-xl",
                "text_encoders/flan-t5-xl",
                "config.json, tokenizer.json, both *.safetensors and their index",
            ),
        ),
        r"vq_ds16_c2i\.pt": (Download(_REPOSITORY, "vae", r"\g<0>"),),
        r"vq_ds16_t2i\.pt": (Download(_TEXT_REPOSITORY, "vae", r"\g<0>"),),
        r"llamagen2?_drafter": (Download(r"jadohu/\g<0>", r"ar_drafters/\g<0>"),),
    },
)
