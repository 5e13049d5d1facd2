"""Where to download a released model, for the error message about a missing one. Nothing is downloaded."""

from __future__ import annotations

import re

from ..model_loaders.families import FAMILIES
from ..model_loaders.registry import Source


def where_to_get(choice: str) -> str | None:
    """What to download into which folders, for a choice of Load AR Checkpoint, Load AR Drafter or Load AR Image Decoder
    that is the name of a released model; None for others."""
    for name, sources in (release for family in FAMILIES for release in family.releases.items()):
        if match := re.fullmatch(name, choice):
            return f"Download {'; '.join(source_text(source, match) for source in sources)}. Then press R in ComfyUI."
    return None


def source_text(source: Source, match: re.Match[str]) -> str:
    """Text with files, repository and folder of a source, for a choice that matches."""
    repository, folder, files = (match.expand(part) for part in (source.repository, source.folder, source.files))
    return f"{files or 'all files'} of https://huggingface.co/{repository} into models/{folder}"
