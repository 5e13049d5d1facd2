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
from safetensors.torch import save_file
from torch import Tensor

from .tiny import fill
from .tiny_family import Files, Tiny

DIM, HEADS, HIDDEN, CLASSES = 32, 4, 85, 1000


def xar_shapes(
    dim: int = DIM, blocks: int = 2, hidden: int = HIDDEN, buffers: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released xAR file with ``blocks`` in either half; its ``buffers`` with 64 channels a
    head."""
    shapes = {
        "class_emb.weight": (CLASSES + 1, dim),
        "time_embed.mlp.0.weight": (dim, 256),
        "time_embed.mlp.0.bias": (dim,),
        "time_embed.mlp.2.weight": (dim, dim),
        "time_embed.mlp.2.bias": (dim,),
        "z_proj.weight": (dim, 16),
        "z_proj.bias": (dim,),
        "z_proj_ln.weight": (dim,),
        "encoder_norm.weight": (dim,),
        "decoder_norm.weight": (dim,),
        "decoder_embed.weight": (dim, dim),
        "decoder_embed.bias": (dim,),
        "pred.weight": (16, dim),
        "pred.bias": (16,),
        "encoder_pos_embed_learned": (1, 256, dim),
        "decoder_pos_embed_learned": (1, 256, dim),
    }
    linears = {
        "attn.qkv": (3 * dim, dim),
        "attn.proj": (dim, dim),
        "mlp.fc1_g": (hidden, dim),
        "mlp.fc1_x": (hidden, dim),
        "mlp.fc2": (dim, hidden),
        "ada_lin.1": (6 * dim, dim),
    }
    for block in (f"{part}_blocks.{i}" for part in ("encoder", "decoder") for i in range(blocks)):
        for name, (rows, columns) in linears.items():
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
        if buffers:
            shapes |= {
                f"{block}.attn.rope.freqs": (16,),
                f"{block}.attn.rope.freqs_cos": (256, 64),
                f"{block}.attn.rope.freqs_sin": (256, 64),
            }
    return shapes | ({"mask": (1, 1, 256, 256)} if buffers else {})


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
