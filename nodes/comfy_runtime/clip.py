"""The text encoder of an AR model as a CLIP, so that CLIP Text Encode works with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...models.text.prompts import Conditioning, Prompted
from .progress import notify

NODE = "CLIP Text Encode"


class Tokens(str):
    """What ``ARClip.tokenize`` gives: the whole text, of which ``encode_prompt`` makes token ids.

    Nodes for other models look for the parts of their own tokenizers in it (CLIPTextEncodeFlux for "t5xxl"), and learn
    which node to use."""

    def __getitem__(self, name: Any) -> Any:
        raise ValueError(wrong_node(f"tokens {name!r}"))

    def __setitem__(self, name: Any, value: Any) -> None:
        raise ValueError(wrong_node(f"tokens {name!r}"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(wrong_node(name))


class ARClip:
    """The interface that CLIP Text Encode calls."""

    def __init__(self, model: Prompted):
        self._model = model

    def tokenize(self, text: str, **options: Any) -> Tokens:
        """Raises ValueError for what is to be read besides the text."""
        check_unused(options)
        return Tokens(text)

    def encode_from_tokens_scheduled(
        self, tokens: str, add_dict: Mapping[str, Any] | None = None, **_options: Any
    ) -> Conditioning:
        """CONDITIONING of a prompt. Raises ValueError or FileNotFoundError with a remedy."""
        check_unused(add_dict or {})
        text = str(tokens) if tokens.strip() else ""
        conditioning = self._model.encode_prompt(text)
        notify(self._model.text_notices(text))
        return conditioning

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(wrong_node(name))


def check_unused(options: Mapping[str, Any]) -> None:
    """Raise ValueError for pictures, templates or sizes that a node for other models wants to be read with a text."""
    if used := [name for name, value in options.items() if isinstance(value, Tensor) or value]:
        raise ValueError(wrong_node(", ".join(used)))


def wrong_node(missing: str) -> str:
    """Error message for a use of this CLIP that needs what there is not."""
    return (
        f"This CLIP belongs to an AR image model. Connect it straight to {NODE}: nodes that change it do not work "
        f"({missing})."
    )
