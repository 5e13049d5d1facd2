"""Memory management of weights whose addresses are used by captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import comfy.model_management as mm
from comfy.model_patcher import ModelPatcher

from ...device import graphs
from ...device.cpu import unpack


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
