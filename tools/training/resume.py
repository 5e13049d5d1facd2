"""Exported weights under the names of the training modules, so that another run can start from them."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ...model_loaders.families import llamagen, mar
from ...model_loaders.files.checkpoint import open_checkpoint
from ...model_loaders.files.names import renamed
from ...models.backbone import join_gates
from .captions import Captions


def tensors_of(file: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in open_checkpoint(file).tensors.items()}


def autoregressive(folder: Path, captions: Captions) -> dict[str, Tensor]:
    """Of ``TextToImage``; without the word embedding if the exported model has another vocabulary."""
    joined = join_gates(tensors_of(folder / "model.safetensors"))
    whole = {name: torch.cat(part) if isinstance(part, tuple) else part for name, part in joined.items()}
    null = whole.pop("cls_embedding.uncond_embedding")
    state = {"null_caption": null} | renamed(whole, llamagen.PARTS)
    encoder = open_checkpoint(folder / "text_encoder.safetensors")
    if encoder.metadata["words"] == captions.words:
        state["words.weight"] = encoder.tensors["word_embeddings.weight"].float()
    return state


def masked(file: Path) -> dict[str, Tensor]:
    """Of ``MaskedTextToImage``; its ``guess`` is not exported."""
    return renamed(tensors_of(file), mar.PARTS)


def start(model: nn.Module, weights: dict[str, Tensor] | None) -> None:
    """Loads weights into the model; missing ones keep their values. Raises RuntimeError if they do not fit."""
    if weights is not None:
        model.load_state_dict({**model.state_dict(), **weights})
