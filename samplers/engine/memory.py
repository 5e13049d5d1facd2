"""How many bytes a run of a discrete model takes besides the weights."""

from __future__ import annotations

from typing import Any

import torch

from ..contract import Drafter, Request
from .prefix_tokens import CHUNK, prefix_length

PROBABILITIES = 8  # rows of fp32 [V+] alive at once per token of a forward pass
LOGITS = 4  # the same while prefix tokens are read
WINDOW = 32  # tokens per forward pass of an image that is not asked for yet: twice SJD's automatic window


def run_bytes(request: Request, width: int, drafter: Drafter | None = None, draft_width: int = 0) -> int:
    """Bytes of caches, probabilities and activations of a run that feeds ``width`` tokens per image and forward pass.

    draft_width: uncommitted tokens in the drafter's cache. Raises ValueError for a prompt that does not fit the model.
    """
    model, layout, batch, guided = request.model, request.layout, request.batch, request.params.guided
    prompt = model.prompt_tokens(request.conditioning, request.negative, batch, layout, guided)
    prefix = min(int(prefix_length(layout).max()), CHUNK)
    memory = pass_bytes(model, batch * (1 + guided), max(width, draft_width), prompt, prefix)
    memory += model.kv_bytes(batch, layout, width, guided, prompt)
    return memory + (drafter.kv_bytes(batch, layout, draft_width, guided, prompt) if drafter else 0)


def image_bytes(model: Any, dtype: torch.dtype, widened: int, int8_cache: bool = False) -> int:
    """Bytes that one image takes besides the weights of a DiscreteModel, were it loaded in ``dtype``: of the default
    size, with guidance if it has any, a usual prompt and a window of WINDOW. widened: numbers in the largest matrix, if
    matrices are narrow, of which two are widened at a time, or 0. int8_cache: are keys and values in int8."""
    prompt = model.usual_prompt
    memory = model.kv_bytes(1, model.layout(), WINDOW, model.guidance, prompt, dtype, int8_cache)
    return memory + 2 * widened * dtype.itemsize + pass_bytes(model, 1 + model.guidance, WINDOW, prompt)


def pass_bytes(model: Any, rows: int, width: int, prompt: int, prefix: int = 0) -> int:
    """Bytes of probabilities and activations of the largest forward pass: over the ``prompt``, over ``prefix`` tokens,
    or over ``width`` tokens and the one before them, in each of ``rows`` rows."""
    numbers = rows * max(PROBABILITIES * (width + 1), LOGITS * prefix) * model.vocab_total
    return 4 * numbers + model.activation_bytes(rows, max(width + 1, prefix), prompt)
