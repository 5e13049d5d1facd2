"""What the names of a file's tensors tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence


def root_of(names: Collection[str], roots: Sequence[str], *marks: str) -> str | None:
    """What the names of a part begin with: the first of ``roots`` behind which all ``marks`` are there; None if there
    is none."""
    return next((root for root in roots if all(f"{root}{mark}" in names for mark in marks)), None)


def numbered(names: Collection[str], before: str) -> int:
    """How many modules are numbered, from 0 on, behind what the regular expression ``before`` matches.

    Raises ValueError if there are none.
    """
    return 1 + max(int(match[1]) for name in names if (match := re.match(rf"{before}(\d+)\.", name)))
