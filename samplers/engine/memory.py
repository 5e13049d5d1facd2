"""How many bytes a run of a model of token ids takes beside the weights."""

from __future__ import annotations

from ..contract import Drafter, Request
from .prefill import CHUNK, given_tokens

PROBABILITIES = 8  # rows of fp32 [V+] that live at once per token of a pass
LOGITS = 4  # the same while given tokens are read


def run_bytes(request: Request, width: int, drafter: Drafter | None = None, draft_width: int = 0) -> int:
    """Caches, probabilities and activations of a run whose passes feed ``width`` tokens an image, and of its drafter.

    Raises ValueError for a prompt that is not the model's.
    """
    model, layout, batch, guided = request.model, request.layout, request.batch, request.params.guided
    prompt = model.prompt_tokens(request.conditioning, request.negative, batch, layout, guided)
    rows, widest = batch * (1 + guided), max(width, draft_width) + 1
    read = min(int(given_tokens(layout).max()), CHUNK)
    numbers = rows * max(PROBABILITIES * widest, LOGITS * read) * model.vocab_total
    memory = 4 * numbers + model.activation_bytes(rows, max(prompt, widest, read))
    memory += model.kv_bytes(batch, layout, width, guided, prompt)
    return memory + (drafter.kv_bytes(batch, layout, draft_width, guided, prompt) if drafter else 0)
