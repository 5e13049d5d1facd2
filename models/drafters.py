"""A smaller model of the target's family as its drafter: it proposes tokens by sampling them autoregressively."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model_loaders.files.errors import CheckpointError
from ..samplers.contract import StepOut
from ..samplers.layout import TokenLayout
from .branches import repeated
from .networks.prefix import TextPrefix
from .text.prompts import Conditioning, EncodedPrompt, prompt_images, prompt_text


@dataclass
class ModelState:
    """State of the small model. expanded: drafted tokens since the last observation."""

    own: Any
    expanded: int = 0


class ModelDrafter:
    """A small model as a Drafter (samplers/contract.py). It does not use the target's hidden states.

    module: the small model, a DiscreteModel (ar_model.py).
    own_words: prompts are tokenized again with the small model's tokenizer, whose special tokens may have other ids
    than the target's (as in Janus-Pro).
    """

    kind = "model"

    def __init__(self, module: Any, own_words: bool = False):
        self.module, self.own_words = module, own_words
        self.family, self.dtype = module.family, module.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int = 0) -> int:
        """Bytes of the key/value caches of a run with prompts of ``prompt`` tokens (0: any caption or class)."""
        return self.module.kv_bytes(batch, layout, slack + 1, guided, prompt)

    def start(
        self,
        target_state: Any,
        conditioning: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: ModelState | None = None,
    ) -> ModelState:
        """Prefill the prompts, as the target does."""
        negative = None if negative is None else self._own(negative)
        # Observations may carry one more token than was drafted: the one the target added.
        own = self.module.start(
            self._own(conditioning), negative, batch, layout, slack + 1, guided, into.own if into else None
        )
        if into is None or own is not into.own:
            return ModelState(own)
        into.expanded = 0
        return into

    def set_attention_length(self, state: ModelState, tokens: int | None) -> int:
        """Limit the next steps to the first ``tokens`` of the image; returns the attention length (see ARModel)."""
        return self.module.set_attention_length(state.own, tokens)

    def _own(self, prompt: Conditioning | EncodedPrompt) -> Conditioning | EncodedPrompt:
        text = prompt_text(prompt) if self.own_words else None
        return prompt if text is None else self.module.encode_prompt(text, prompt_images(prompt))

    def observe(self, state: ModelState, tokens: Tensor, positions: Tensor, hidden: Tensor, count: Tensor) -> StepOut:
        """Feed the decided tokens and keep ``count``; where it is 0, the result of the row is meaningless."""
        state.expanded = 0
        out = self.module.step(state.own, tokens, positions)
        self.module.commit(state.own, count)
        last = (repeated(count, state.own.branches) - 1).clamp(min=0)
        row = torch.arange(len(last), device=self.device)
        return StepOut(out.logits[row, last][:, None], out.hidden[row, last][:, None])

    def expand(
        self, state: ModelState, tokens: Tensor, positions: Tensor, hidden: Tensor, tree_mask: Tensor
    ) -> StepOut:
        """Feed drafts [B, T], each of which sees those that tree_mask names; the next observation forgets them."""
        uncommitted = state.expanded
        state.expanded += tokens.shape[1]
        return self.module.step(state.own, tokens, positions, tree_mask, uncommitted)

    def rewind(self, state: ModelState, count: Tensor) -> None:
        """Forget the last ``count`` [B] tokens observed, and what was expanded."""
        state.expanded = 0
        self.module.commit(state.own, -count)


def pair(small: Any, target: Any, path: Path) -> ModelDrafter:
    """One DiscreteModel (ar_model.py) as the drafter of another.

    Raises CheckpointError unless both use the same image tokens and prompts.
    """
    other = next((grid for grid in target.grids if grid not in small.grids), small.grid)
    check_alike(
        path,
        {
            "family": (small.family, target.family),
            "number of image tokens": (small.vocab, target.vocab),
            "token grid": ("{1} x {0}".format(*small.grid), "{1} x {0}".format(*other)),
            "kind of prompt": (small.prompt_kind, target.prompt_kind),
        },
        "image tokens",
    )
    if not isinstance(small.prefix, TextPrefix):
        small.prompt_encoder = target.prompt_encoder
        return ModelDrafter(small)
    try:
        small.prompt_encoder.encode("a")
    except FileNotFoundError:  # the drafter's folder has no tokenizer
        small.prompt_encoder, small.prefix.null = target.prompt_encoder, target.prefix.null
        return ModelDrafter(small)
    if target.image_prompts and not small.image_prompts:  # its drafts may be worse, but the images are right
        small.prompt_encoder = replace(small.prompt_encoder, images=target.image_prompts)
    return ModelDrafter(small, own_words=True)


def check_alike(path: Path, traits: Mapping[str, tuple[Any, Any]], shared: str) -> None:
    """Raise CheckpointError unless a drafter and its target have the same traits.

    path: the drafter's file. traits: name -> value of the drafter, value of the target. shared: name of what both must
    have been trained with.
    """
    for what, (mine, its) in traits.items():
        if mine != its:
            raise CheckpointError(
                f"{path.name} cannot draft for this model: its {what} is {mine}, the model's is {its}. Choose a "
                f"smaller model of the same family that was trained with the same {shared}."
            )
