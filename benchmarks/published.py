"""Speed-ups that papers publish, for the models they name, on their GPUs. None of them was reproduced here."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published ratio to next-token sampling at temperature 1. method: the page in docs/methods; fewer: forward
    passes saved ("" if not given); faster: in time."""

    method: str
    what: str
    model: str
    fewer: str
    faster: str
    source: str


SJD, COOL, ADT, VVS, CONTINUOUS = "SJD++, table 1", "Cool-SD, table 1", "ADT-Tree, table I", "VVS, table 1", "table 1"
PUBLISHED = (
    Published("sjd-plus-plus", "SJD++", "Emu3", "7.5x", "3.0x", SJD),
    Published("sjd-plus-plus", "SJD++", "Lumina-mGPT", "6.4x", "3.1x", SJD),
    Published("sjd-plus-plus", "SJD++", "LlamaGen", "3.3x", "2.3x", SJD),
    Published("draft-trees", "EAGLE-1", "Lumina-mGPT", "", "2.4x", COOL),
    Published("draft-trees", "EAGLE-1", "LlamaGen-XL", "", "2.0x", COOL),
    Published("draft-trees", "EAGLE-2", "Anole", "", "0.76x", ADT),
    Published("draft-trees", "EAGLE-2", "LlamaGen-XL", "", "0.87x", VVS),
    Published("lantern", "LANTERN", "Anole", "", "1.38x", ADT),
    Published("lantern", "LANTERN", "LlamaGen-XL", "", "1.45x", VVS),
    Published("lantern", "LANTERN++", "Lumina-mGPT", "", "2.5x", COOL),
    Published("lantern", "LANTERN++", "LlamaGen-XL", "", "2.15x", COOL),
    Published("cool-sd", "Cool-SD, delta 1.1", "Lumina-mGPT", "", "2.7x", COOL),
    Published("cool-sd", "Cool-SD", "LlamaGen-XL", "", "2.7x", COOL),
    Published("adt-tree", "ADT-Tree", "Anole", "", "1.06x", ADT),
    Published("adt-tree", "ADT-Tree with LANTERN", "Anole", "", "1.53x", ADT),
    Published("vvs", "VVS", "LlamaGen-XL", "2.2x to 2.9x", "1.6x to 1.8x", VVS),
    Published("continuous", "one image", "MAR-H", "", "1.1x to 1.4x", CONTINUOUS),
    Published("continuous", "256 images", "MAR-H", "", "up to 2.3x", CONTINUOUS),
)
