"""Reading and renaming: names of tensors, and what names of files and folders say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

from ...limits.limits import LAYERS, bounded_int

T = TypeVar("T")

# Modules around a model that have no weights of their own, by whose names those of all tensors begin: DDP, DeepSpeed
# and averaged models (with a counter beside them); PEFT after merging.
_AROUND = ("module.", "base_model.model.")
_COUNTER = "n_averaged"
# Wrappers of single modules, too, which may be anywhere in a name: torch.compile, FSDP, checkpointed activations,
# Lightning.
_WITHIN = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
_SQUARE = re.compile(r"(?<![^\W_])(\d+)(?:x\1|px)(?![^\W_])")  # a size in pixels


def unwrap_names(names: Iterable[str]) -> dict[str, str]:
    """Names of tensors -> the same without those of wrappers around the model, however nested. Other names pass
    unchanged, and all do if two would become one."""
    given = list(names)
    plain = {name: _WITHIN.sub("", name) for name in given if name != _COUNTER}
    while around := next((each for each in _AROUND if plain and all(n.startswith(each) for n in plain.values())), None):
        plain = {name: own.removeprefix(around) for name, own in plain.items()}
    return plain if len(set(plain.values())) == len(plain) else dict(zip(given, given, strict=True))


def meaning(name: str, table: Mapping[str, T]) -> T | None:
    """What the name of a file or folder says, by a table of words (lower case, without separators) and numbers.

    Only whole words and whole numbers count: "0512000" and "20240512" contain no 512, "genshin" no "gen". The size of a
    square is one number: "512x512" and "512px" are 512. Several words
    in a row count as one, however they are separated ("Emu3.5-Image" is "emu35image"), and then not each for itself.
    None if the name says nothing, or two things.
    """
    words = re.findall(r"[^\W_]+", _SQUARE.sub(r"\1", name.lower()))
    runs = combinations(range(len(words) + 1), 2)
    found = {
        (first, last): table[joined]
        for first, last in runs
        if (joined := "".join(words[first:last])) in table and (last == first + 1 or not joined.isdigit())
    }
    whole = {
        value
        for (first, last), value in found.items()
        if not any(a <= first and last <= b and (a, b) != (first, last) for a, b in found)
    }
    return whole.pop() if len(whole) == 1 else None


def root_of(names: Collection[str], roots: Sequence[str], *marks: str) -> str | None:
    """Prefix of a submodule: the first of ``roots`` for which all names root + mark exist; None if there is none."""
    return next((root for root in roots if all(f"{root}{mark}" in names for mark in marks)), None)


def count_modules(names: Collection[str], before: str, most: int) -> int:
    """Number of modules whose numbers, starting at 0, follow the regular expression ``before``.

    Raises ValueError if there are none, or more than ``most``.
    """
    matches = (re.match(rf"{before}(\d+)\.", name) for name in names)
    return 1 + max(bounded_int("the number of a module", int(match[1]), 0, most - 1) for match in matches if match)


def count(names: Collection[str], before: str) -> int:
    """Number of the modules ``before``0, ``before``1, ..., of which some may be missing. Raises ValueError for more
    than LAYERS."""
    matches = (re.match(rf"{re.escape(before)}(\d+)\.", name) for name in names)
    return bounded_int(f"the number of modules {before}", len({match[1] for match in matches if match}), 0, LAYERS)


def rename(tensors: Mapping[str, T], beginnings: Mapping[str, str]) -> dict[str, T]:
    """The tensors with other prefixes of their names: theirs -> ours, the first that matches ("": any)."""
    found = {}
    for name, tensor in tensors.items():
        theirs = next(beginning for beginning in beginnings if name.startswith(beginning))
        found[beginnings[theirs] + name.removeprefix(theirs)] = tensor
    return found
