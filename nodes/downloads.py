"""Where to download a released model, for the error message about a missing one. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from dataclasses import astuple

from ..model_loaders.declarations import Download
from ..model_loaders.families import FAMILIES

GB = {  # to download, of 10^9 bytes, where the sizes or numbers of all weights are known
    "Janus-Pro-1B": 4.2,
    "Janus-Pro-7B": 14.8,
    "c2i_L_256.pt": 1.7,
    "c2i_L_384.pt": 1.7,
    "t2i_XL_stage1_256.pt": 14.8,
    "t2i_XL_stage2_512.pt": 14.8,
    "Lumina-mGPT-7B-768": 14.3,
    "Anole-7b-v0.1-hf": 14.3,
    "Emu3-Gen": 35,
    "Emu3.5-Image": 70,
    "GLM-Image/vision_language_encoder": 36,
}


def where_to_get(choice: str) -> str | None:
    """What to download into which folders, for a choice of Load AR Checkpoint, Load AR Drafter or Load AR Image Decoder
    that is the name of a released model, or a file in its folder; None for others."""
    places = [
        f"{source.files or 'all files'} of https://huggingface.co/{source.repository} into models/{source.folder}"
        for source in sources_of(choice)
    ]
    size = next((f" {GB[name]} GB" for name in _names(choice) if name in GB), "")
    return f"Download{size}: {'; '.join(places)}. Then press R in ComfyUI." if places else None


def sources_of(choice: str) -> list[Download]:
    """All that a released model needs, itself first, with the names of this choice; none for other choices."""
    for name, sources in (release for family in FAMILIES for release in family.releases.items()):
        for each in _names(choice):
            if match := re.fullmatch(name, each):
                return [Download(*map(match.expand, astuple(source))) for source in sources]
    return []


def _names(choice: str) -> tuple[str, str]:
    """A choice, and the folder that it may be a file in."""
    return choice, os.path.dirname(choice)
