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
from .branches import repeat_rows
from .continuous_model import ContinuousBase
from .discrete_model import DiscreteModel
from .networks.prefix import TextPrefix
from .sizes import check_grid
from .text.prompt_encoders import TokenEncoder, WordEncoder
from .text.prompts import Conditioning, EncodedPrompt, prompt_images, prompt_text

Model = DiscreteModel | ContinuousBase


@dataclass
class ModelState:
    """State of the small model. expanded: drafted tokens since the last observation."""

    own: Any
    expanded: int = 0


class ModelDrafter:
    """A small model as a Drafter (samplers/contract.py). It does not use the target's hidden states.

    module: the small model.
    own_words: prompts are tokenized again with the small model's tokenizer, whose special tokens may have other ids
    than the target's (as in Janus-Pro).
    """

    kind = "model"

    def __init__(self, module: DiscreteModel, own_words: bool = False):
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
        last = (repeat_rows(count, state.own.branches) - 1).clamp(min=0)
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


def as_drafter(small: Model, target: Model, path: Path) -> ModelDrafter | ContinuousBase:
    """``small``, loaded from ``path``, as the drafter of ``target``.

    Raises CheckpointError unless both generate the same tokens, in the same order, from the same prompts.
    """
    if isinstance(small, DiscreteModel) and isinstance(target, DiscreteModel):
        return pair_discrete(small, target, path)
    if isinstance(small, ContinuousBase) and isinstance(target, ContinuousBase):
        return pair_continuous(small, target, path)
    raise CheckpointError(
        f"{path.name} generates {small.tokens}, but the model generates {target.tokens}: it cannot draft for it."
    )


def pair_continuous(small: ContinuousBase, target: ContinuousBase, path: Path) -> ContinuousBase:
    """A model of vectors as the drafter of another (see ``as_drafter``)."""
    try:
        check_grid(small, *target.grid)
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot draft for this model: {error}") from error
    check_alike(
        path,
        {
            "family": (small.family, target.family),
            "channels per token": (small.channels, target.channels),
            "scale of latents (that of its VAE)": (f"{small.scale:.5g}", f"{target.scale:.5g}"),
            "generation order": (small.cells, target.cells),
            "kind of prompt": (small.prompt_kind, target.prompt_kind),
        },
        "VAE",
    )
    words = [m.prompt_encoder for m in (small, target) if isinstance(m.prompt_encoder, WordEncoder)]
    if len(words) == 2 and not (words[0].words == words[1].words and torch.equal(words[0].table, words[1].table)):
        raise CheckpointError(
            f"{path.name} cannot draft for this model: the text_encoder.safetensors beside it is not the model's."
        )
    small.prompt_encoder = target.prompt_encoder  # a drafter's folder may lack its own
    return small


def pair_discrete(small: DiscreteModel, target: DiscreteModel, path: Path) -> ModelDrafter:
    """A model of token ids as the drafter of another (see ``as_drafter``)."""
    other = next((grid for grid in target.grids if grid not in small.grids), small.grid)
    check_alike(
        path,
        {
            "family": (small.family, target.family),
            "number of image tokens": (small.vocab, target.vocab),
            "token grid": ("{1} x {0}".format(*small.grid), "{1} x {0}".format(*other)),
            "kind of prompt": (prompt_kind(small), prompt_kind(target)),
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
    encoder, reads = small.prompt_encoder, target.image_prompts
    if isinstance(encoder, TokenEncoder) and reads and not encoder.images:
        small.prompt_encoder = replace(encoder, images=reads)  # its drafts may be worse, but the images are right
    return ModelDrafter(small, own_words=True)


def prompt_kind(model: DiscreteModel) -> str:
    """Description of the prompts that a model reads."""
    return model.prefix.reads + (f", image tokens from {model.word_ids[0]} on" if model.word_ids else "")


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
