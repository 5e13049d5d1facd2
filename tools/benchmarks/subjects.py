"""Models under measurement, with their prompts, settings, drafters and methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.samplers.contract import SamplingParams

from . import sizes
from .passes import Sampler, Staged, Stretch
from .runs import PROMPTS, Case, cases, drafter_cases
from .widen import widen, widen_eagle, widen_small

BASE = "next_token"
CURVES = (BASE, "sjd coupled w16", "sjd coupled w32")
DEFAULTS = (  # as the samplers' nodes are when they are new; LANTERN's and SJD's with both variants
    BASE,
    "sjd coupled w16",
    "sjd threshold_paper w16",
    "EAGLE, auto",
    "LANTERN delta 0.1, auto",
    "LANTERN++ k 10, lambda 2, auto",
    "Cool-SD delta 1.1, auto",
    "VVS every 4th, auto",
    "ADT-Tree, auto",
)
METHODS = (  # those of the README's table (documents.METHODS) among them
    *DEFAULTS,
    "sjd coupled w32",
    "sjd resample w32",
    "sjd gumbel w32",
    "sjd threshold_paper w32",
    "SJD coupled, TV budget 0.1, w32",
    "chain of 5",
    "EAGLE-1, 25 drafts",
    "EAGLE-1, 57 drafts",
    "EAGLE-2",
    "ADT-Tree",
    "LANTERN delta 0.3",
    "LANTERN++ k 10, lambda 2",
    "Cool-SD delta 1.1",
    "Cool-SD delta 2",
    "VVS every 4th, EAGLE-1",
)
SMALL = ("chain of 5, small model",)  # of the bundled model, which has a small one
STORAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint4}


@dataclass
class Subject:
    """A model under measurement: its prompt, settings, drafters, and the part of an image that is generated."""

    name: str
    model: Any
    conditioning: Any
    params: SamplingParams
    stretch: Stretch
    eagle: Any
    small: Any = None

    def conditionings(self, prompts: Sequence[str]) -> list[Any]:
        """Of these prompts; its own one where the prompt changes nothing that is measured."""
        return [self.model.encode_prompt(prompt) for prompt in prompts] if self.whole else [self.conditioning]

    @property
    def whole(self) -> bool:
        """Does it generate whole images, with weights that were trained?"""
        return self.small is not None

    @property
    def prompt(self) -> int:
        return self.conditioning[0][0].shape[1]

    @property
    def rows(self) -> int:
        return 1 + (self.params.cfg != 1)

    def cases(self) -> dict[str, Case]:
        """All methods by name."""
        listed = [*cases((16, 32)), *drafter_cases(self.eagle, self.small or self.eagle)]
        return {case.name: case for case in listed if self.small or "small model" not in case.name}

    def drafter(self, name: str) -> Any:
        """The drafter that a method of ours asks, if any."""
        found = self.cases().get(name)
        return found and getattr(found.method, "drafter", None)

    def sampler(self, name: str, stretch: Stretch | None = None, batch: int = 1) -> Sampler:
        stretch = stretch or self.stretch
        method, staged = self.cases()[name].method, Staged(self.model, stretch)
        return Sampler(name, method, staged, self.conditioning, stretch, self.params, batch)


def subject(name: str, cfg: float, device: torch.device, dtype: torch.dtype) -> Subject:
    """The bundled model (``default``), or it widened to one of ``sizes.SIZES`` (``default@llamagen-b``): they generate
    whole images."""
    bundled, _, size = name.partition("@")
    model = specar.load_model(specar.bundled(bundled), device=device, dtype=dtype)
    eagle, small = (
        specar.load_drafter(specar.bundled(f"{bundled}/{drafter}"), model) for drafter in ("eagle", "small")
    )
    if size:
        own, model = model.backbone.config, widen(model, sizes.SIZES[size].config)
        eagle, small = widen_eagle(eagle, model), widen_small(small, own, model)
    layout = model.layout()
    stretch, params = Stretch(layout, 0, layout.length), replace(model.defaults, cfg=cfg)
    return Subject(name, model, model.encode_prompt(PROMPTS[0]), params, stretch, eagle, small)
