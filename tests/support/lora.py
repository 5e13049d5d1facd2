"""LoRAs in PEFT's layout, and models into which they are merged by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from safetensors.torch import save_file
from torch import Tensor

RANK = 4


def linear_layers(file: Path) -> list[str]:
    """The modules in the layers of a model's backbone whose weights are matrices."""
    tensors = open_checkpoint(file).tensors.items()
    found = [name for name, each in tensors if ("layers." in name or "blocks." in name) and each.ndim == 2]
    return [name.removesuffix(".weight") for name in found if name.endswith(".weight") and "visual" not in name]


def factors(module: str, shape: Sequence[int], rank: int = RANK) -> tuple[Tensor, Tensor]:
    """A [r, K] and B [N, r] of a module, the same in every run: eighths, whose products fp32 holds exactly."""
    generator = torch.Generator().manual_seed(len(module))
    a, b = (torch.randint(-3, 4, size, generator=generator) / 8 for size in ((rank, shape[1]), (shape[0], rank)))
    return a, b


def write_lora(folder: Path, file: Path, modules: Sequence[str], names: Mapping[str, str] = {}, **config: Any) -> Path:  # noqa: B006
    """adapter_config.json and adapter_model.safetensors for modules of a model's file. names: what the adapter calls
    them, where it differs."""
    tensors, weights = open_checkpoint(file).tensors, {}
    for module in modules:
        a, b = factors(module, tensors[f"{module}.weight"].shape)
        prefix = f"base_model.model.{names.get(module, module)}"
        weights |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "modules_to_save": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def merged(tensors: Mapping[str, Tensor], modules: Sequence[str], scale: float) -> dict[str, Tensor]:
    """The tensors with scale * B A added to the modules' weights."""
    found = dict(tensors)
    for module in modules:
        a, b = factors(module, tensors[f"{module}.weight"].shape)
        found[f"{module}.weight"] = tensors[f"{module}.weight"] + scale * (b @ a)
    return found
