"""Models that the golden record generates with: the bundled ones and a tiny one of every family, with drafters, prompts
and the part of an image that is generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from comfyui_specar import api

from ..support.every_family import FAMILIES, make_family
from ..support.tiny_family import declared

BUNDLED, TINY = "default", tuple(FAMILIES)
_VECTORS = declared("TINY", continuous=True)
BUNDLED_VECTORS, TINY_VECTORS = "continuous", tuple(_VECTORS)
PROMPT, NEGATIVE = "heart, 3d, on a blue background", "moon, flat"
ROWS = 3  # generated per case, of the bundled models' 16 or 8: the last ones of a next-token image; the others are kept
SEED = 7


@dataclass(frozen=True)
class Subject:
    """A model in fp32 on the CPU with what it is asked for; drafters by kind, a layout where tokens are ids."""

    model: Any
    prompt: Any
    negative: Any
    drafters: dict[str, Any]
    layout: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # of api.sample, in every case


@cache
def discrete(name: str) -> Subject:
    """Every case overrides some of the options, which are the bundled model's own settings."""
    options = {"cfg": 2.0, "temperature": 0.9, "top_k": 0, "top_p": 0.9}
    if name != BUNDLED:
        with TemporaryDirectory() as folder:
            family = make_family(name, Path(folder))
        drafters = {"eagle": family.eagle, "small": family.small}
        options["cfg"] = 2.0 if family.model.guidance else 1.0
        # Only the text-to-image LlamaGen has no text encoder here: it gets features.
        negative = None if name == "llamagen-t2i" else family.model.encode_prompt("5")
        return Subject(family.model, family.prompt, negative, drafters, family.model.layout(), options)
    folder = api.bundled(BUNDLED)
    model = api.load_model(folder, dtype=torch.float32)
    drafters = {kind: api.load_drafter(folder / kind, model) for kind in ("eagle", "small")}
    prompt = model.encode_prompt(PROMPT)
    layout = model.layout().keeping(*_begun(model, prompt, api.methods.NextToken(), options))
    return Subject(model, prompt, model.encode_prompt(NEGATIVE), drafters, layout, options)


def _begun(model: Any, prompt: Any, method: Any, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [1, rows, cols, ...] of an image, and which of them a case keeps [1, rows, cols] (bool)."""
    tokens = api.sample(model, prompt, method, seed=SEED, **options).tokens
    keep = torch.ones(tokens.shape[:3], dtype=torch.bool)
    keep[:, -ROWS:] = False
    return tokens, keep


@cache
def continuous(name: str) -> Subject:
    """The tiny models draft for themselves. A token has few denoising steps, which is not how they were trained."""
    options = {"cfg": 2.0, "temperature": 0.9, "steps": 5}
    if name == BUNDLED_VECTORS:
        folder = api.bundled(BUNDLED_VECTORS)
        model = api.load_model(folder, dtype=torch.float32)
        small = api.load_drafter(folder / "small", model)
        prompt = model.encode_prompt(PROMPT)
        tokens, keep = _begun(model, prompt, api.methods.ContinuousNextToken(), options)
        return Subject(
            model,
            prompt,
            model.encode_prompt(NEGATIVE),
            {"small": small},
            options=options | {"tokens": tokens, "kept": keep},
        )
    with TemporaryDirectory() as folder:
        model = api.load_model(_VECTORS[name].write(Path(folder)), dtype=torch.float32)
        prompt, negative = (model.encode_prompt(text) for text in ("3", "5"))
    return Subject(model, prompt, negative, {"itself": model}, options=options)
