"""Outputs as a few numbers, and what differs between two records of them.

An entry holds the totals of a trace, and of every field (tokens, latent, records of tokens and rounds) what tells it
apart: a hash and a sum, and for fractions also a sum of squares, in fp64. Fields that are zero everywhere are left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from comfyui_specar.api import Output
from torch import Tensor

CLOSE = 1e-4  # relative: how far sums may be apart on another processor, which rounds every step of fp32 in its own way


def entry(output: Output) -> dict[str, Any]:
    """What the record holds of a case."""
    trace = output.trace
    fields = {"tokens": output.tokens, "latent": output.latent}
    fields |= {f"position {name}": values for name, values in trace.positions.items()}
    fields |= {f"round {name}": values for name, values in trace.rounds.items()}
    totals = {name: value for name, value in trace.totals.items() if name != "seconds"}
    used = {name: numbers(values) for name, values in fields.items() if values is not None and values.any()}
    return {
        "totals": totals,
        "settings": shortened(json.dumps(trace.settings, sort_keys=True).encode()),
        "fields": used,
    }


def numbers(values: Tensor) -> list[Any]:
    """[hash, sum] of whole numbers, [hash, sum, sum of squares] of fractions; the hash is of shape and content."""
    content = values.cpu()
    digest = shortened(repr((content.dtype, content.shape)).encode() + content.numpy().tobytes())
    if not content.is_floating_point():
        return [digest, int(content.sum())]
    wide = content.double()
    return [digest, float(f"{wide.sum():.8g}"), float(f"{wide.square().sum():.8g}")]


def shortened(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:10]


def differences(old: dict[str, Any], new: dict[str, Any], same_machine: bool) -> list[str]:
    """What differs between two entries of a case, in words; fractions count by closeness on another machine."""
    before, after = old["fields"], new["fields"]
    found = list(_unequal("totals", old["totals"], new["totals"], same_machine))
    if old["settings"] != new["settings"]:
        found.append("settings")
    for name in before.keys() | after.keys():
        if name not in before or name not in after:
            found.append(f"{name} is {'new' if name in after else 'gone'}")
        elif not _same(before[name], after[name], same_machine):
            found.append(f"{name} (sum {before[name][1]} -> {after[name][1]})")
    return sorted(found)


def _same(one: list[Any], other: list[Any], same_machine: bool) -> bool:
    if one[0] == other[0]:
        return True
    fractions = len(one) == len(other) == 3
    # A sum may cancel: it is held against the size of what was summed up, of which the squares tell.
    return (
        fractions
        and not same_machine
        and all(
            math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE * math.sqrt(abs(one[2])))
            for a, b in zip(one[1:], other[1:], strict=True)
        )
    )


def _unequal(name: str, one: Any, other: Any, same_machine: bool) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _unequal(f"{name} {key}", one.get(key), other.get(key), same_machine)
    elif isinstance(one, float) and isinstance(other, float) and not same_machine:
        if not math.isclose(one, other, rel_tol=CLOSE):
            yield f"{name} {one} -> {other}"
    elif one != other:
        yield f"{name} {one} -> {other}"
