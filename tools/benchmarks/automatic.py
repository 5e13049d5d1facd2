"""Which storage dtype "auto" chooses by the memory of a card: calculated from the sizes of models, nothing is run."""

from __future__ import annotations

import torch
from comfyui_specar.model_loaders.storage import Plan, choose_storage, storages
from comfyui_specar.models.memory import weight_bytes
from comfyui_specar.models.networks.quantised import largest_matrix
from comfyui_specar.samplers.engine.memory import image_bytes

from . import sizes
from .report import grid

GIB = 2**30
CARDS = 6, 8, 12, 16, 24, 32, 80  # GiB
TAKEN = 1.0 * GIB  # of a card's memory before ComfyUI loads a model: desktop, driver, CUDA's context (assumed)
RESERVED = 0.4 * GIB  # that ComfyUI leaves free beside a run on Linux
LEAST = 1.2 * GIB  # that it leaves free of weights in any case
MODELS = {
    "llamagen-xl": "LlamaGen-XL",
    "janus-pro-1b": "Janus-Pro-1B",
    "janus-pro-7b": "Janus-Pro-7B",
    "lumina-mgpt-7b": "Lumina-mGPT-7B, 768 pixels",
    "emu3-8b": "Emu3-8B, 720 pixels",
}


def plans(size: str) -> list[Plan]:
    """The plans to store a released model that is computed in bf16, widest first."""
    dtype = torch.bfloat16
    model = sizes.build(sizes.SIZES[size], dtype, torch.device("meta"))
    return [
        Plan(
            dtype,
            storage,
            weight_bytes(model, dtype, storage),
            max(LEAST, image_bytes(model, dtype, largest_matrix(model) if storage else 0) + RESERVED),
        )
        for storage in storages(None, True)
    ]


def cell(plans: list[Plan], free: float, reads_narrow: bool) -> str:
    """The choice, and what is copied in every forward pass."""
    plan = choose_storage(plans, free, reads_narrow)
    streamed = plan.bytes_streamed(free)
    return plan.name.removesuffix(" (storage)") + (f", {streamed / GIB:.1f} GiB streamed" if streamed else "")


def table() -> str:
    """A row for every model and a column for every card; in brackets the choice without Triton, where it is another."""
    rows = []
    for size, name in MODELS.items():
        found, row = plans(size), [name]
        for card in CARDS:
            with_it, without = (cell(found, card * GIB - TAKEN, reads) for reads in (True, False))
            row.append(with_it if without == with_it else f"{with_it} ({without})")
        rows.append(row)
    return grid(["model", *(f"{card} GB" for card in CARDS)], rows)
