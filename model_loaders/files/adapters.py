"""LoRA adapters (Hu et al., arXiv:2106.09685, section 4.1) in PEFT's files, merged into the matrices of a checkpoint.

A folder holds adapter_config.json, which states lora_alpha, and adapter_model.safetensors with two matrices for every
layer that it changes: lora_A.weight [r, K] and lora_B.weight [N, r]. The layer's W [N, K] becomes
W + strength * lora_alpha / r * B A (with use_rslora: lora_alpha / sqrt(r)), computed in fp32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint, open_checkpoint, read_settings, weight_file
from .errors import CheckpointError
from .quantised import Format, LazyMatrix
from .unsupported import ADAPTERS

CONFIG = "adapter_config.json"
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_TAIL = 5  # parts of a name from "layers" on: layers.0.self_attn.q_proj.weight
_ELSEWHERE = "Merge it with PEFT (merge_and_unload(), then save_pretrained) and load the result as a checkpoint."
_PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None}


def with_adapter(checkpoint: Checkpoint, path: Path, strength: float) -> Checkpoint:
    """The checkpoint with the matrices that an adapter (a file, or the folder of one) changes.

    Raises CheckpointError for files that are damaged, of another kind of adapter, or trained for another model, and
    ValueError for a strength that is no finite number.
    """
    if not isfinite(strength):
        raise ValueError(f"strength is {strength}, but must be a finite number.")
    file = weight_file(path, ADAPTERS[:2])
    settings = _settings(file)
    tensors, tails = dict(checkpoint.tensors), _by_tail(checkpoint.tensors)
    unknown = []
    for module, (down, up) in _factors(file).items():
        exact = f"{module}.weight"
        names = [exact] if exact in tensors else tails[tuple(exact.split(".")[-_TAIL:])]
        if len(names) != 1:
            unknown.append(module)
            continue
        base = tensors[names[0]]
        if base.ndim != 2 or base.shape != (len(up), down.shape[1]):
            raise CheckpointError(
                f"{file} changes {module} by a matrix of the shape {[len(up), down.shape[1]]}, which is "
                f"{[*base.shape]} in {checkpoint.path.name}: it was trained for another model."
            )
        rank = sqrt(len(down)) if settings.get("use_rslora") else len(down)
        scaled = strength * _alpha(module, settings, file) / rank * up.float()
        tensors[names[0]] = LazyMatrix((base, scaled), Format(down.shape[1], partial(_merged, down.float())))
    if unknown:
        raise CheckpointError(
            f"{file} changes {len(unknown)} layers that {checkpoint.path.name} does not have, for example "
            f"{unknown[0]}: it was trained for another model."
        )
    return replace(checkpoint, tensors=tensors)


def _merged(down: Tensor, base: Tensor, up: Tensor) -> Tensor:
    """Rows of base + up @ down, fp32."""
    return base.float() + up @ down


def _settings(file: Path) -> dict[str, Any]:
    """The adapter_config.json beside an adapter's weights. Raises CheckpointError without one, and for an adapter that
    is more than products of two matrices."""
    settings = read_settings(file.parent / CONFIG)
    if not settings:
        raise CheckpointError(
            f"{CONFIG}, which states how strong an adapter is, is missing beside {file}. Keep both files in a folder "
            "of their own, as PEFT saves them."
        )
    for name, plain in _PLAIN.items():
        if (found := settings.get(name, plain)) != plain and found:
            raise CheckpointError(
                f"{file.parent / CONFIG} says {name} {found!r:.60}, which is not supported here. {_ELSEWHERE}"
            )
    return settings


def _factors(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The two factors, A [r, K] and B [N, r], of every layer that a file changes. Raises CheckpointError for other
    tensors."""
    halves: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in open_checkpoint(file, adapter=True).tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(
                f"{file} holds {name[:100]} with the shape {[*tensor.shape]}, but only finite matrices lora_A and "
                f"lora_B of linear layers can be merged. {_ELSEWHERE}"
            )
        halves[match[1]][match[2]] = tensor
    for module, pair in halves.items():
        if len(pair) < 2 or len(pair["A"]) != pair["B"].shape[1] or not len(pair["A"]):
            raise CheckpointError(f"{file} lacks a half of {module}, or they do not fit. Download it again.")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def _by_tail(tensors: Mapping[str, Tensor]) -> Mapping[tuple[str, ...], list[str]]:
    """Names of tensors by their last parts: an adapter may have been trained on a part of the model, or under
    another name of it."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in tensors:
        found[tuple(name.split(".")[-_TAIL:])].append(name)
    return found


def _alpha(module: str, settings: Mapping[str, Any], file: Path) -> float:
    """lora_alpha of a layer: alpha_pattern has exceptions, by the end of its name."""
    patterns = settings.get("alpha_pattern")
    exceptions = patterns if isinstance(patterns, dict) else {}
    if unclear := next((end for end in exceptions if not re.fullmatch(r"[\w.]+", end)), None):
        raise CheckpointError(
            f"{file.parent / CONFIG} has the alpha_pattern {unclear!r:.60}, but only ends of names are supported. "
            f"{_ELSEWHERE}"
        )
    ends = (value for end, value in exceptions.items() if f".{module}".endswith(f".{end}"))
    alpha = next(ends, settings.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not isfinite(alpha):
        raise CheckpointError(f"{file.parent / CONFIG} says lora_alpha {alpha!r:.60}, which must be a number.")
    return alpha
