"""What prompts for Stable Diffusion contain besides words. AR models do not read it."""

from __future__ import annotations

import re
from textwrap import shorten

SHOWN = 100  # characters of an example
WEIGHT = re.compile(r"\(([^()<>:]*):\s*\d*(?:\.\d+)?\s*\)")  # (cat:1.2)
TAG = re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>", re.IGNORECASE)  # <lora:name:1>


def words_of(text: str) -> str:
    """The text without tags and weights."""
    return WEIGHT.sub(r" \1 ", TAG.sub(" ", text))


def notices(text: str) -> list[str]:
    """That they are not used, a sentence for each kind."""
    weight, tag = WEIGHT.search(text), TAG.search(text)
    return [
        *([f"AR models do not use prompt weights: {shorten(weight[0], SHOWN)}."] if weight else []),
        *([f"LoRA tags in a prompt are not read: {shorten(tag[0], SHOWN)}. Use AR LoRA instead."] if tag else []),
    ]
