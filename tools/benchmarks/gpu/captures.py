"""Stage ``captures``: how often an image makes steps be captured, how long that takes, and what repeats it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from .. import sizes
from ..passes import Sampler
from ..subjects import Subject
from . import subjects
from .findings import NEEDS_DEVICE, Findings
from .graphs import Captures, captures

MODEL = "llamagen-xl"
METHODS = ("next_token", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "ADT-Tree")


def run(findings: Findings, **_options: object) -> None:
    """A whole image twice, then parts of images after every change that a user may make between two runs."""
    subjects.need_graphs(findings.dry)
    dry = findings.dry
    if dry:
        findings.not_run("milliseconds of captures", NEEDS_DEVICE)
    size = subjects.tiny(sizes.SIZES[MODEL]) if dry else sizes.SIZES[MODEL]
    device, dtype = subjects.device_of(dry), torch.float32 if dry else torch.bfloat16
    whole = subjects.random_subject(MODEL, size, device, dtype, subjects.DRY_TOKENS if dry else size.grid[0] ** 2)
    with findings.listening(), captures(dry) as counted:
        for method in findings.each(subjects.DRY_METHODS[:2] if dry else METHODS, "methods"):
            with findings.item(method=method) as row:
                row |= of_an_image(whole.sampler(method), counted, dry)
                if row["second image"]:
                    findings.failure(
                        f"{method}: a second image with the same settings captures {row['second image']} steps again"
                    )
            with findings.trying(f"{method}, changed settings"):
                for change, number in after_changes(whole, method, counted):
                    row[change] = number
                    if number:
                        findings.warning(f"{method}: {number} steps are captured again after another {change}")
    findings.content["summary"] = f"{', '.join(str(row['captures']) for row in findings.rows)} captures of an image"


def of_an_image(contestant: Sampler, counted: Captures, dry: bool) -> dict[str, object]:
    """Captures of the first image (with milliseconds of one and of all, on a device) and of the second."""
    counted.taken()
    contestant(0)
    taken = counted.taken()
    row: dict[str, object] = {"captures": len(taken)}
    if taken and not dry:
        row |= {"ms of one": round(1e3 * statistics.median(taken), 1), "ms in all": round(1e3 * sum(taken), 1)}
    contestant(1)
    return row | {"second image": len(counted.taken())}


def after_changes(whole: Subject, method: str, counted: Captures) -> Iterator[tuple[str, int]]:
    """What is captured after each change. Nothing begins or ceases to be filtered or guided by it."""
    few = replace(whole.stretch, behind=whole.stretch.layout.length // 3, tokens=subjects.DRY_TOKENS)
    base = replace(whole.params, cfg=4.0, temperature=0.9, top_k=50, top_p=0.9)
    contestant = replace(whole, stretch=few, params=base).sampler(method)
    [(features, *rest)] = contestant.conditioning
    for _ in range(2):
        contestant(0)
    counted.taken()
    for change, changed in {  # the prompt first, while the session of these settings is kept
        "prompt": {"conditioning": [(features.roll(1, 1), *rest)]},
        "guidance": {"params": replace(base, cfg=6.0)},
        "temperature": {"params": replace(base, temperature=0.8)},
        "top-k": {"params": replace(base, top_k=40)},
        "top-p": {"params": replace(base, top_p=0.8)},
    }.items():
        replace(contestant, **changed)(1)
        yield change, len(counted.taken())
