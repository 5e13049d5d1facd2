"""The names of precisions; and what besides the settings may change the image of a seed: precision, device, version."""

from __future__ import annotations

import torch

from .continuous_model import ContinuousBase
from .discrete_model import DiscreteModel
from .networks.quantised import NarrowLinear

VERSION = "0.1.0"  # of this pack, as in pyproject.toml
INT8_CACHE = "int8 (storage and KV cache)"
STORAGE = {
    "fp8 (storage)": torch.float8_e4m3fn,
    "int8 (storage)": torch.int8,
    INT8_CACHE: torch.int8,
    "int4 (storage)": torch.uint4,
}
DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, **dict.fromkeys(STORAGE)}


def conditions(model: DiscreteModel | ContinuousBase) -> dict[str, str]:
    """Under what a model runs, for a run's record."""
    return {"dtype": precision(model), "device": device_name(model.device), "pack": VERSION}


def precision(model: DiscreteModel | ContinuousBase) -> str:
    """What a model computes in and, where that differs, how its large matrices are stored: "bf16, int8 (storage)"."""
    computed = next((name for name, dtype in DTYPES.items() if dtype == model.dtype), str(model.dtype))
    narrow = {layer.format for layer in model.modules() if isinstance(layer, NarrowLinear)}
    if not narrow:
        return computed
    if model.int8_cache:
        return f"{computed}, {INT8_CACHE}"
    stored = ", ".join(sorted(narrow)).replace("float8_e4m3fn", "fp8")
    return f"{computed}, {stored} (storage)"


def device_name(device: torch.device) -> str:
    """Its kind, and the name of a GPU: another one rounds in other ways."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
