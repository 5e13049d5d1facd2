"""What a setting does to images, as measured on the bundled model.

quality.json is written by ``python -m tools.benchmarks documents`` from the quality report. It has nothing of what was
not measured, and does not exist before there is a report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("quality.json")
DECIDES = ("lossless", "reuse", "rule", "skipping", "settle", "threshold")  # settings that images depend on


@dataclass(frozen=True)
class Quality:
    """images: how many were measured; loss: of log-probability (nats per token) from next token's, and half the width
    of its 95 % interval; agreement: fraction of images that show what was asked; plain_agreement: next token's."""

    images: int
    loss: float
    error: float
    agreement: float
    plain_agreement: float


def class_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings (as a method describes them) whose images are alike: they draft in the same form, and verify in the same
    way. Drafter and sizes of window and tree may differ."""
    drafts = settings["structure"]["kind"] if "structure" in settings else settings["method"]
    return {"drafts": drafts, **{key: settings[key] for key in DECIDES if key in settings}}


def quality_of(settings: dict[str, Any]) -> Quality | None:
    """What was measured of the class of these settings."""
    if not FILE.exists():
        return None
    wanted = class_of(settings)
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return next((Quality(**row["quality"]) for row in rows if row["class"] == wanted), None)
