"""Reading and renaming tensor names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ...limits import LAYERS, bounded_int

T = TypeVar("T")


def root_of(names: Collection[str], roots: Sequence[str], *marks: str) -> str | None:
    """Prefix of a submodule: the first of ``roots`` for which all names root + mark exist; None if there is none."""
    return next((root for root in roots if all(f"{root}{mark}" in names for mark in marks)), None)


def numbered(names: Collection[str], before: str) -> int:
    """Number of modules whose numbers, starting at 0, follow the regular expression ``before``.

    Raises ValueError if there are none, or more than LAYERS.
    """
    matches = (re.match(rf"{before}(\d+)\.", name) for name in names)
    return 1 + max(bounded_int("the number of a module", int(match[1]), 0, LAYERS) for match in matches if match)


def renamed(tensors: Mapping[str, T], beginnings: Mapping[str, str]) -> dict[str, T]:
    """The tensors with other prefixes of their names: theirs -> ours, the first that matches ("": any)."""
    found = {}
    for name, tensor in tensors.items():
        theirs = next(beginning for beginning in beginnings if name.startswith(beginning))
        found[beginnings[theirs] + name.removeprefix(theirs)] = tensor
    return found
