"""Where to download a released model, for the error message about a missing one. Nothing is downloaded."""

from __future__ import annotations

import re
from dataclasses import astuple

from ..model_loaders.declarations import Download
from ..model_loaders.families import FAMILIES


def where_to_get(choice: str) -> str | None:
    """What to download into which folders, for a choice of Load AR Checkpoint, Load AR Drafter or Load AR Image Decoder
    that is the name of a released model; None for others."""
    places = [
        f"{source.files or 'all files'} of https://huggingface.co/{source.repository} into models/{source.folder}"
        for source in sources_of(choice)
    ]
    return f"Download {'; '.join(places)}. Then press R in ComfyUI." if places else None


def sources_of(choice: str) -> list[Download]:
    """All that a released model needs, itself first, with the names of this choice; none for other choices."""
    for name, sources in (release for family in FAMILIES for release in family.releases.items()):
        if match := re.fullmatch(name, choice):
            return [Download(*map(match.expand, astuple(source))) for source in sources]
    return []
