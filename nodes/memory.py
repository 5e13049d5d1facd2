"""What ComfyUI does not tell, or tells wrongly, of a device's memory."""

from __future__ import annotations

import math

import comfy.model_management as mm
import torch

# Apple's GPUs, DirectML, a CPU on Linux and one on Windows say it in plain RuntimeErrors.
_FULL = ("out of memory", "not enough GPU video memory", "can't allocate memory", "not enough memory: you tried")


def out_of_memory(error: BaseException) -> bool:
    """Has a device, or the CPU, no memory left? Newer ComfyUIs know more errors, and what to do about them."""
    known = mm.is_oom(error) if hasattr(mm, "is_oom") else isinstance(error, mm.OOM_EXCEPTION)
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL))


def total_memory(device: torch.device) -> float:
    """Bytes of a device's memory; infinite where nobody knows: ComfyUI takes 1 GiB for any GPU under DirectML."""
    return math.inf if getattr(mm, "directml_enabled", False) else mm.get_total_memory(device)
