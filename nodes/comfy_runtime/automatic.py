"""dtype "auto" on a GPU: storage of weights by ComfyUI's memory. (The rule: model_loaders/storage.py.)"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from ...device import dispatch
from ...model_loaders.storage import Plan, choose_storage, explain, storages
from ...models.discrete_model import DiscreteModel
from ...models.memory import weight_bytes
from .memory import beside_weights, bytes_available

log = logging.getLogger(__name__)


@dataclass
class Automatic:
    """Chooses the storage of a model, on the meta device, for ``load_model``. own: that of its file (None: wide).

    why: the choice in words; empty if there was none: on CPUs and Apple's GPUs, which share the memory of the system,
    and for models of continuous tokens.
    """

    name: str
    device: torch.device
    own: torch.dtype | None
    why: str = ""

    def __call__(self, model: nn.Module) -> torch.dtype | None:
        if self.device.type in ("cpu", "mps") or not isinstance(model, DiscreteModel):
            return self.own
        reads_narrow = dispatch.runs_triton(self.device)
        plans = [
            Plan(model.dtype, each, weight_bytes(model, model.dtype, each), beside_weights(model, model.dtype, each))
            for each in storages(self.own, reads_narrow)
        ]
        free = bytes_available(self.device, plans[0].bytes_needed)
        chosen = choose_storage(plans, free, reads_narrow)
        self.why = explain(plans, chosen, free, reads_narrow)
        log.info("%s: dtype %s.", self.name, self.why)
        return chosen.storage
