"""How many bytes a run of a discrete model takes besides the weights."""

from __future__ import annotations

from ..contract import Drafter, Request
from .prefill import CHUNK, prefix_length

PROBABILITIES = 8  # rows of fp32 [V+] alive at once per token of a forward pass
LOGITS = 4  # the same while prefix tokens are read


def run_bytes(request: Request, width: int, drafter: Drafter | None = None, draft_width: int = 0) -> int:
    """Bytes of caches, probabilities and activations of a run that feeds ``width`` tokens per image and forward pass.

    draft_width: uncommitted tokens in the drafter's cache. Raises ValueError for a prompt that does not fit the model.
    """
    model, layout, batch, guided = request.model, request.layout, request.batch, request.params.guided
    prompt = model.prompt_tokens(request.conditioning, request.negative, batch, layout, guided)
    rows, widest = batch * (1 + guided), max(width, draft_width) + 1
    prefix = min(int(prefix_length(layout).max()), CHUNK)
    numbers = rows * max(PROBABILITIES * widest, LOGITS * prefix) * model.vocab_total
    memory = 4 * numbers + model.activation_bytes(rows, max(prompt, widest, prefix))
    memory += model.kv_bytes(batch, layout, width, guided, prompt)
    return memory + (drafter.kv_bytes(batch, layout, draft_width, guided, prompt) if drafter else 0)
