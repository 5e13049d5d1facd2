"""dtype "auto" on a GPU: in which format the weights of a model of token ids are stored, by memory.

What is computed in stays bf16 (fp16, fp32): only the storage of the large matrices is chosen, before any is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..models.conditions import DTYPES, STORAGE

MARGIN = 1.1  # of weights, as in ComfyUI: a few that do not fit cost much, as captured CUDA graphs need all of them
LINK = 16  # bytes of a GPU's memory that are read in the time of one over PCIe
_NAMES = {stored: name for name, stored in reversed(STORAGE.items())} | {
    dtype: name for name, dtype in DTYPES.items() if dtype
}


@dataclass(frozen=True)
class Plan:
    """How a model is stored. storage: see ``load_model`` (None: everything in ``dtype``, in which it computes).
    weights: their bytes on the GPU; beside: bytes that a run needs beside them."""

    dtype: torch.dtype
    storage: torch.dtype | None
    weights: int
    beside: float

    @property
    def name(self) -> str:
        """As in Load AR Checkpoint."""
        return _NAMES[self.storage or self.dtype]

    @property
    def bytes_needed(self) -> float:
        """Bytes that must be free for all weights to be on the GPU during a run, with a margin."""
        return MARGIN * self.weights + self.beside

    def bytes_streamed(self, free: float) -> float:
        """Bytes of the weights that every forward pass copies from main memory if ``free`` bytes are free."""
        return min(self.weights, max(0.0, self.weights + self.beside - free))

    def bytes_moved(self) -> float:
        """Bytes of the GPU's memory that a forward pass without Triton kernels reads and writes for the weights.

        Wide weights are read once. A narrow matrix is widened first (see kernels/linear.py). With b bytes per wide
        number, a number costs in int8: 1 + b for the conversion, 2 b for the scale, b for the product; in fp8 the same
        without the scale; in int4: 4 for its halves, 1 + b for the conversion, 2 b for step and minimum, b for the
        product.
        """
        wide = self.dtype.itemsize
        per_byte = {torch.int8: 1 + 4 * wide, torch.float8_e4m3fn: 1 + 2 * wide, torch.uint4: (5 + 4 * wide) / 0.5625}
        return self.weights * per_byte.get(self.storage, 1)


def choose_storage(plans: Sequence[Plan], free: float, reads_narrow: bool) -> Plan:
    """The plan to store a model on a GPU with ``free`` bytes of memory.

    plans: of one model, widest first. reads_narrow: are there Triton kernels, which read narrow weights as they are?

    With them, it is the widest plan that fits (``bytes_needed``). If none fits, it is the narrowest: it copies fewest
    bytes over PCIe per pass, which takes most of the time (7 GB at 25 GB/s: 0.3 s), and the GPU reads fewest, too.

    Without them, narrow weights are widened in every pass, so it is the plan whose passes take least time, in bytes of
    the GPU's memory: ``bytes_moved`` and LINK times ``bytes_streamed``. Wide weights that fit always win. Those of N
    numbers in bf16, 2 N bytes, lose to int8 that fits (9 N moved) if 2 N + LINK x streamed > 9 N: if more than 7/16 N
    bytes are streamed, 22 % of them. LINK: at 70 % of the memory's bandwidth and 90 % of PCIe's, it is 11 (RTX 3060),
    16 (4070), 18 (4060, on 8 lanes) to 31 (4090); the lower half is used, as the wider plan has the smaller error.

    More free memory never leads to a narrower plan: what a wider plan streams more than a narrower one only shrinks.
    """
    if reads_narrow:
        return next((plan for plan in plans if plan.bytes_needed <= free), plans[-1])
    return min(plans, key=lambda plan: plan.bytes_moved() + LINK * plan.bytes_streamed(free))


def storages(own: torch.dtype | None, reads_narrow: bool) -> tuple[torch.dtype | None, ...]:
    """Those to choose from (see ``choose_storage``), widest first, for a file with matrices in ``own`` storage (None:
    wide). One in 8 bits is not rounded to other 8 bits, one in 4 bits to none, and with Triton kernels none is widened.
    """
    narrow = (own,) if own == torch.uint4 else (own or torch.int8, torch.uint4)
    return narrow if own and reads_narrow else (None, *narrow)


def explain(plans: Sequence[Plan], chosen: Plan, free: float, reads_narrow: bool) -> str:
    """The choice in words: "auto: int8 (storage), as bf16 needs 15.2 GiB and 11.1 GiB are free"."""
    if math.isinf(free):
        return f"auto: {chosen.name}; the free memory is not known here"
    streamed, place = chosen.bytes_streamed(free), plans.index(chosen)
    seen = plans[:place] if place and chosen.bytes_needed <= free else plans[: place + 1]
    needs = ", ".join(f"{plan.name} needs {_gib(plan.bytes_needed)}" for plan in seen)
    text = f"auto: {chosen.name}, as {needs} and {_gib(free)} are free"
    if streamed:
        text += f"; {_gib(streamed)} are copied from main memory in every forward pass"
        if not reads_narrow and chosen is not plans[-1]:
            text += ", which takes less time than to widen narrower weights without Triton"
    elif chosen.bytes_needed > free:
        text += ", which is just enough"
    if chosen.storage == torch.uint4 and len(plans) > 1 and plans[-2].storage:  # else the file itself is in 4 bits
        text += f". 4 bits change images much; {plans[-2].name} changes them less, but takes more time here"
    return text


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
