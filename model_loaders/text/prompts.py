"""Prompts as core's CONDITIONING, the same for models of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prompt_encoders import PromptEncoder, TextEncoder, features_of

Conditioning = list  # core's CONDITIONING: [[features [1 or B, n, F], {"ar": {"family": ..., "text": ...}}]]


@dataclass(frozen=True)
class EncodedPrompt:
    """What a model reads of a CONDITIONING: features [1 or B, n, F] on its device, and the text they were written from.
    """

    features: Tensor
    text: str


def prompt_text(prompt: Conditioning | EncodedPrompt | None) -> str:
    """What was typed for a prompt; "" where nobody knows, or there is none."""
    if isinstance(prompt, EncodedPrompt):
        return prompt.text
    return prompt[0][1]["ar"].get("text", "") if prompt else ""


class Prompted:
    """A model that is told what to draw: writes CONDITIONING, and reads it back."""

    family: str
    prompt_encoder: PromptEncoder
    device: torch.device

    def encode_prompt(self, text: str) -> Conditioning:
        """CONDITIONING of a prompt (or of a class name or number). Raises ValueError with a remedy."""
        return self.encode_features(self.prompt_encoder.encode(text), text=text)

    def encode_class(self, number: int) -> Conditioning:
        """CONDITIONING of a class number, for class-conditional models."""
        return self.encode_prompt(str(number))

    def encode_features(self, features: Tensor, mask: Tensor | None = None, text: str = "") -> Conditioning:
        """CONDITIONING of ready features [1, n, F]; mask [1, n] (bool) marks the valid slots, which alone are kept."""
        if mask is not None:
            features = features[:, mask[0].bool()]
        return [[features, {"ar": {"family": self.family, "text": text}}]]

    def encode_ids(self, ids: Sequence[int]) -> Conditioning:
        """CONDITIONING of a language model's token ids, special ones included, just as the model is to read them."""
        return self.encode_features(features_of(ids))

    def read(
        self, conditioning: Conditioning | EncodedPrompt, batch: int, name: str, grid: tuple[int, int] | None = None
    ) -> EncodedPrompt:
        """The prompt of a CONDITIONING for ``batch`` images of ``grid`` (rows, cols); one that was read stays as it is.

        A prompt that names the picture's size is written anew for each; so is a negative one in a family that frames it
        otherwise. Raises ValueError if it is not one of this model's, or no longer what the model wrote.
        """
        if isinstance(conditioning, EncodedPrompt):
            return conditioning
        if len(conditioning) != 1:
            raise ValueError(f"{name} combines {len(conditioning)} prompts; AR models take one. Use a single prompt.")
        features, extra = conditioning[0]
        own = extra.get("ar", {})
        family = own.get("family")
        if family != self.family:
            origin = f"was encoded for {family}" if family else "does not come from this pack's CLIP"
            raise ValueError(f"{name} {origin}, but the model is {self.family}. Encode it with this model's own CLIP.")
        if features.shape[0] not in (1, batch):
            raise ValueError(f"{name} holds {features.shape[0]} prompts for a batch of {batch}. Use 1 or {batch}.")
        if own.get("text") and isinstance(self.prompt_encoder, TextEncoder):
            if not torch.equal(features.cpu(), self.prompt_encoder.encode(own["text"])):
                raise ValueError(
                    f"{name} was changed by another node (zeroed, joined, averaged ...), or written by another model's "
                    "CLIP, but this model reads words of its own: connect CLIP Text Encode with its CLIP directly. An "
                    "empty text there stands for no negative prompt."
                )
            features = self.prompt_encoder.encode(own["text"], grid, name == "negative")
        return EncodedPrompt(features.to(self.device), own.get("text", ""))
