"""An xAR-shaped model small enough for a test; any program can rebuild its weights from a tensor's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from comfyui_specar.model_loaders.families import xar
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.models.networks.xar import XAR, XARConfig
from safetensors.torch import save_file
from torch import Tensor

from .tiny import fill, named_shapes
from .tiny_family import Files, Tiny

DIM, HEADS, HIDDEN = 32, 4, 85


def xar_shapes(dim: int = DIM, blocks: int = 2, hidden: int = HIDDEN, heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released xAR file with ``blocks`` in either half, without its buffers."""
    return named_shapes(lambda: {"": XAR(XARConfig(dim, blocks, blocks, heads, hidden))})


def xar_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """As ``fill``, but the tables of classes and positions are standard normal."""
    return fill(f"embedding {name}" if name == "class_emb.weight" or name.endswith("_learned") else name, shape)


def xar_weights(**sizes: int) -> dict[str, Tensor]:
    return {name: xar_weight(name, shape) for name, shape in xar_shapes(**sizes).items()}


def write(folder: Path, sizes: Mapping[str, int] = MappingProxyType({}), **metadata) -> Path:
    """A safetensors file of the tiny model, with the metadata that its size needs. sizes: see ``xar_shapes``."""
    header = {"specar": json.dumps({"heads": HEADS} | metadata)}
    save_file(xar_weights(**sizes), str(folder / "xar.safetensors"), metadata=header)
    return folder / "xar.safetensors"


def tiny_xar(folder: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> xar.CellModel:
    """The tiny model, written to ``folder`` and loaded from there."""
    return xar.load(open_checkpoint(write(folder, sizes)), dtype, None, ())


TINY = {"xar": Tiny(partial(write, sizes={"blocks": 1}))}
FILES = {"xAR": Files(partial(write, sizes={"blocks": 1}, defaults={"steps": 3}), "xar.safetensors", "3")}
