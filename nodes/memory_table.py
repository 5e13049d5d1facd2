"""What a model needs at every choice of dtype, calculated from its sizes, and whether a device has as much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..model_loaders.storage import Plan
from ..models.conditions import DTYPES, INT8_CACHE, STORAGE
from ..models.discrete_model import DiscreteModel
from ..models.memory import weight_bytes
from .comfy_runtime import memory


class MemoryRow(NamedTuple):
    """dtype: choices of Load AR Checkpoint. weights, cache: bytes on the compute device, of one image with guidance
    (without, if the model has none). verdict: whether they fit; None if the memory of the device is unknown."""

    dtype: str
    weights: int
    cache: int
    verdict: str | None


def memory_table(model: DiscreteModel, auto: torch.dtype, device: torch.device) -> list[MemoryRow]:
    """A row for every choice of dtype, bf16 and fp16 in one. auto: the dtype of choices that only say how weights are
    stored.

    Fits: as dtype "auto" decides it, if nothing else is in the device's memory.
    """
    rows = {}
    for choice in (choice for choice in DTYPES if choice != "auto"):
        dtype, storage = DTYPES[choice] or auto, STORAGE.get(choice)
        weights = weight_bytes(model, dtype, storage)
        int8_cache = choice == INT8_CACHE
        beside = memory.beside_weights(model, dtype, storage, int8_cache)
        cache = model.kv_bytes(1, model.layout(), 0, model.guidance, model.usual_prompt, dtype, int8_cache)
        names, _ = rows.get((weights, cache), ([], None))
        rows[weights, cache] = [*names, choice], verdict(device, Plan(dtype, storage, weights, beside))
    return [MemoryRow(", ".join(names), weights, cache, fit) for (weights, cache), (names, fit) in rows.items()]


def verdict(device: torch.device, plan: Plan) -> str | None:
    """Whether weights, and what a run needs beside them, fit in the total memory of a device."""
    total = memory.total_memory(device)
    if math.isinf(total):
        return None
    if plan.bytes_needed <= total:
        return "fits"
    return "does not fit" if device.type == "cpu" or plan.beside > total else "fits with streamed weights"


def memory_lines(rows: Iterable[MemoryRow], device: torch.device, guided: bool) -> list[str]:
    """The table as text."""
    total = memory.total_memory(device)
    has = "" if math.isinf(total) else f" of {in_units(int(total))}"
    return [
        f"memory by dtype on {device}{has} (weights + KV cache of one image{' with guidance' * guided}, calculated):",
        *(
            f"  {row.dtype}: {in_units(row.weights)} + {in_units(row.cache)} = {in_units(row.weights + row.cache)}"
            + (f", {row.verdict}" if row.verdict else "")
            for row in rows
        ),
    ]


def in_units(number: int) -> str:
    """A number of bytes in KiB, MiB or GiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= step:
            return f"{number / step:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"
