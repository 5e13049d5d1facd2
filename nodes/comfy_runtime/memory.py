"""Memory of devices, where ComfyUI does not report it, or reports it wrongly, and of models whose weights captured CUDA
graphs use."""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Sequence
from typing import Any

import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...device import graphs
from ...device.cpu import unpack
from ...kernels.linear import has_groups, stored_as
from ...model_loaders.storage import MARGIN
from ...models.discrete_model import DiscreteModel
from ...models.networks.quantised import largest_matrix
from ...samplers.engine.memory import image_bytes

# Apple's GPUs, DirectML, a CPU on Linux and one on Windows raise plain RuntimeErrors for it.
_FULL = ("out of memory", "not enough GPU video memory", "can't allocate memory", "not enough memory: you tried")


class Patcher(ModelPatcher):
    """Drops the sessions of a model (graphs, caches) before weights are moved or unloaded.

    sessions: sessions of the model, or of a drafter's target.
    """

    def __init__(self, *args: Any, sessions: dict[Hashable, Any] | None = None, **options: Any):
        super().__init__(*args, **options)
        self.sessions = {} if sessions is None else sessions

    def clone(self, *args: Any, **options: Any) -> Patcher:
        """A clone shares the weights and the sessions."""
        clone = super().clone(*args, **options)
        clone.sessions = self.sessions
        return clone

    def release(self) -> int:
        """Drop the sessions. Returns how many bytes of the device's memory that freed."""
        if not self.sessions:
            return 0
        before = mm.get_free_memory(self.load_device)
        self.sessions.clear()
        graphs.return_memory(self.load_device)
        mm.soft_empty_cache()
        return max(0, mm.get_free_memory(self.load_device) - before)

    def load(self, *args: Any, **options: Any) -> Any:
        """ComfyUI calls it only if weights are missing on the device."""
        self.release()
        unpack(self.model)  # what a drafter reads of its target is computed before the weights move
        return super().load(*args, **options)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        """ComfyUI also calls it, without moving any weights, before every run of a model that is already loaded."""
        if unpatch_weights:
            self.release()
        return super().unpatch_model(device_to, unpatch_weights)

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, **options: Any) -> int:
        """Weights stay loaded if dropping the sessions freed enough."""
        freed = self.release()
        if freed and freed >= memory_to_free:
            return freed
        return freed + super().partially_unload(device_to, memory_to_free - freed, **options)

    def __del__(self):
        self.sessions.clear()  # graphs refer to the model that keeps them
        super().__del__()


def load_models_gpu(patchers: Sequence[ModelPatcher], **options: Any) -> None:
    """ComfyUI's function of this name. Models of a prompt that failed are garbage in a cycle, as ComfyUI's frames keep
    their traceback. If they were collected while it goes through its list of models, it would read beyond the end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        mm.load_models_gpu(patchers, **options)
    finally:
        if collecting:
            gc.enable()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the CPU, is out of memory. Newer ComfyUI versions detect more errors."""
    known = mm.is_oom(error) if hasattr(mm, "is_oom") else isinstance(error, mm.OOM_EXCEPTION)
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in _FULL))


def total_memory(device: torch.device) -> float:
    """Bytes of a device's memory; infinite if unknown: ComfyUI assumes 1 GiB for any GPU under DirectML."""
    return math.inf if getattr(mm, "directml_enabled", False) else mm.get_total_memory(device)


def fit_in_memory(patchers: list[ModelPatcher], memory: int) -> bool:
    """Whether these models and ``memory`` bytes fit in addition to what is loaded."""
    missing = sum(patcher.model_size() - patcher.loaded_size() for patcher in patchers)
    return free_memory(patchers[0]) >= bytes_needed(missing, memory)


def bytes_needed(weights: int, memory: int) -> float:
    """Bytes that must be free for ComfyUI to load these weights, with ``memory`` bytes for the run, without unloading
    other models or dropping kept sessions."""
    return MARGIN * weights + memory + mm.minimum_inference_memory()


def beside_weights(
    model: DiscreteModel, dtype: torch.dtype, storage: torch.dtype | None, int8_cache: bool = False
) -> float:
    """Bytes that ComfyUI keeps free of weights for one image of a model that is loaded so (see ``load_model``): those
    of the run and a reserve, or its minimum, as in its ``load_models_gpu``."""
    run = image_bytes(model, dtype, largest_matrix(model) if storage else 0, int8_cache)
    return max(mm.minimum_inference_memory(), run + mm.extra_reserved_memory())


def bytes_available(device: torch.device, wanted: float) -> float:
    """Bytes that a model can take on a device: those that are free, and those of weights that ComfyUI unloads for it.
    Infinite if unknown, as in ``total_memory``.

    What runs keep with our models (caches, captured steps) is no obstacle, but its size is not known. If less than
    ``wanted`` bytes are there with it, it is dropped first.
    """
    if math.isinf(total_memory(device)):
        return math.inf
    loaded = [patcher for patcher in mm.loaded_models() if patcher is not None and patcher.load_device == device]
    weights = sum(patcher.loaded_size() for patcher in loaded)
    if mm.get_free_memory(device) + weights < wanted:
        for patcher in loaded:
            if isinstance(patcher, Patcher):
                patcher.release()
    return mm.get_free_memory(device) + weights


def free_memory(patcher: ModelPatcher) -> int:
    """Free bytes on a patcher's device. Memory of models under dynamic VRAM counts as free, because ComfyUI
    reclaims it on demand; it reports how much that is if dynamic VRAM is enabled."""
    return getattr(patcher, "get_free_memory", mm.get_free_memory)(patcher.load_device)


def cast_room(model: torch.nn.Module) -> int:
    """Bytes of the two largest narrow matrices in the compute dtype: the one in use, and the next."""
    stored = (weight.numel() * (2 if has_groups(weight) else 1) for weight in model.parameters() if stored_as(weight))
    return 2 * max(stored, default=0) * model.dtype.itemsize


def to_output_device(tensor: Tensor) -> Tensor:
    """A tensor on the device that ComfyUI uses for outputs of nodes."""
    return tensor.to(mm.intermediate_device())
