"""The text encoder of an AR model as a CLIP, so that CLIP Text Encode works with it."""

from __future__ import annotations

from typing import Any

import torch

from ...model_loaders.ar_model import Conditioning, DiscreteModel
from ...model_loaders.continuous_model import ContinuousBase
from .messages import send


class ARClip:
    """The interface that CLIP Text Encode calls. An empty text selects the model's unconditional branch."""

    def __init__(self, model: DiscreteModel | ContinuousBase):
        self._model = model

    def tokenize(self, text: str, **_options: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, tokens: str, **_options: Any) -> Conditioning:
        """CONDITIONING of a prompt. Raises ValueError or FileNotFoundError with a remedy."""
        if not tokens.strip():
            words, conditioning = [], [[torch.zeros(1, 0, 1), {"ar": {"family": self._model.family, "text": ""}}]]
        else:
            try:
                words, conditioning = self._model.unknown_words_with_hints(tokens), self._model.encode_prompt(tokens)
            except (ValueError, FileNotFoundError) as error:
                send("specar.unknown_words", refused=str(error))
                raise
        send("specar.unknown_words", words=words)  # none: takes away what was shown before
        return conditioning

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"This CLIP belongs to an AR image model and has no {name}: use it with CLIP Text Encode.")


def text_of(conditioning: Conditioning) -> str | None:
    """The prompt a conditioning was made from; None if it does not come from an ARClip."""
    return conditioning[0][1].get("ar", {}).get("text") if conditioning else None


def prompts_of(
    positive: Conditioning, negative: Conditioning | None
) -> tuple[Conditioning, Conditioning | None]:
    """Both prompts of a sampler, the negative one None where it is empty or zeroed (Conditioning Zero Out).

    Raises ValueError for an empty positive.
    """
    if text_of(positive) == "":
        raise ValueError("The positive prompt is empty. Enter a prompt in its CLIP Text Encode.")
    zeroed = negative and negative[0][0].shape[1] > 1 and not negative[0][0].any()  # a class label may be 0
    return positive, None if zeroed or (negative and text_of(negative) == "") else negative
