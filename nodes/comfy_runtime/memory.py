"""What fits on a device; and what ComfyUI does not tell, or tells wrongly, of its memory."""

from __future__ import annotations

import math

import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher

from ...kernels.linear import STORED

# Apple's GPUs, DirectML, a CPU on Linux and one on Windows say it in plain RuntimeErrors.
_FULL = ("out of memory", "not enough GPU video memory", "can't allocate memory", "not enough memory: you tried")


def out_of_memory(error: BaseException) -> bool:
    """Has a device, or the CPU, no memory left? Newer ComfyUIs know more errors, and what to do about them."""
    known = mm.is_oom(error) if hasattr(mm, "is_oom") else isinstance(error, mm.OOM_EXCEPTION)
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL))


def total_memory(device: torch.device) -> float:
    """Bytes of a device's memory; infinite where nobody knows: ComfyUI takes 1 GiB for any GPU under DirectML."""
    return math.inf if getattr(mm, "directml_enabled", False) else mm.get_total_memory(device)


def fits(patchers: list[ModelPatcher], memory: int) -> bool:
    """Is there room for these models and ``memory`` bytes beside what is loaded?"""
    missing = sum(patcher.model_size() - patcher.loaded_size() for patcher in patchers)
    need = 1.1 * missing + memory + mm.minimum_inference_memory()  # 1.1: as ComfyUI reckons
    return free_memory(patchers[0]) >= need


def free_memory(patcher: ModelPatcher) -> int:
    """Free bytes on a patcher's device. What models under dynamic VRAM hold there counts as free: ComfyUI takes it from
    them on demand, and says how much that is where it has dynamic VRAM."""
    return getattr(patcher, "get_free_memory", mm.get_free_memory)(patcher.load_device)


def cast_room(model: torch.nn.Module) -> int:
    """Bytes of the two largest matrices that are kept in one byte per number, in the dtype in which they are used: the
    one in use, and the next."""
    stored = (weight.numel() for weight in model.parameters() if weight.dtype in STORED)
    return 2 * max(stored, default=0) * model.dtype.itemsize
