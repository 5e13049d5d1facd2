"""Stages about CUDA graphs: ``graphs``, ``graphs-async``, ``captures``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar.device import graphs
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.methods import pass_costs

from .. import sizes
from ..passes import Sampler
from ..runs import PROMPTS
from ..subjects import DEFAULTS, Subject
from . import subjects
from .findings import Findings

SEED = 7
CAPTURED = ("next_token", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "ADT-Tree")


class Eager(dict):
    """In place of what runs leave with a model: every session is new, and its graphs are switched off."""

    def pop(self, key: Any, default: Any = None) -> session.Session:
        return session.Session(graphs.Graphs(torch.device("cpu")))


@dataclass
class Captures:
    """Seconds that every capture took, in order."""

    seconds: list[float] = field(default_factory=list)

    def taken(self) -> list[float]:
        """Those since the last call."""
        found, self.seconds = self.seconds, []
        return found


@contextmanager
def captures(dry: bool) -> Iterator[Captures]:
    """Steps of sessions that begin meanwhile are captured, and every capture is counted. In a dry run the tests' tape
    stands in for CUDA graphs, on the CPU, and the host learns late what was decided, as on a GPU."""
    found, base = Captures(), graphs.Graphs
    with ExitStack() as stack:
        if dry:
            from comfyui_specar.tests.support.tape import LatePoll, TapeGraphs

            base = TapeGraphs
            stack.enter_context(patch.object(engine, "Poll", LatePoll))

        class Counted(base):
            def _capture(self, *given):
                begun = time.perf_counter()
                try:
                    return super()._capture(*given)
                finally:
                    found.seconds.append(time.perf_counter() - begun)

        stack.enter_context(patch.object(session, "Graphs", Counted))
        yield found


# Captured steps give the tokens of called ones, at first and when replayed


def methods(number: int, dry: bool) -> Sequence[str]:
    """Those of a model. The tape is slow: a dry run takes a few, and of all models but the first two."""
    return subjects.DRY_METHODS[: None if number == 0 else 2] if dry else subjects.methods()


def made(name: str, dtype: torch.dtype, dry: bool) -> Subject:
    if name == "default":
        return subjects.bundled_subject(dry, dtype)
    size = subjects.tiny(sizes.SIZES[name])
    return subjects.random_subject(name, dry, size.grid[0] ** 2, size, dtype)


def run(findings: Findings) -> None:
    """The stages ``graphs`` and ``graphs-async``: every method on a tiny model of each family and the bundled one, once
    with called steps, twice with captured ones."""
    subjects.need_graphs(findings.dry)
    dtypes = (torch.float32,) if findings.dry else (torch.bfloat16, torch.float32)
    listed = [(name, dtype) for dtype in dtypes for name in (*subjects.FAMILIES, "default")]
    with torch.inference_mode(), findings.listening(), captures(findings.dry) as counted:
        for number, (name, dtype) in enumerate(findings.each(listed, "models")):
            with findings.trying(name):
                case = made(name, dtype, findings.dry)
                about = {"model": name, "dtype": str(dtype).removeprefix("torch.")}
                listed_here = methods(number, findings.dry)
                for method in findings.each(listed_here, f"methods of {name}, {dtype}", "method", **about):
                    with findings.item(**about, method=method) as row:
                        title = ", ".join((*about.values(), method))
                        sampler, other = (unmeasured(case.sampler(method)) for _ in range(2))
                        row |= compared(sampler, other, counted)
                        if not row["same"]:
                            findings.failure(
                                f"{title}: captured steps draw other tokens than called ones: first run from token "
                                f"{row['first']}, repeated {row['again']}"
                            )
                        if not row["captures"]:
                            findings.failure(f"{title}: nothing was captured")
    same = sum(row["same"] for row in findings.rows)
    findings.content["summary"] = (
        f"{same} of {len(findings.rows)} methods draw the same tokens captured, replayed and called"
    )


def unmeasured(sampler: Sampler) -> Sampler:
    """With a tree that does not depend on what passes cost, which differs between called and captured ones."""
    return replace(sampler, method=sampler.method.without_measuring())


def compared(called: Sampler, captured: Sampler, counted: Captures) -> dict[str, object]:
    """A row: the first token that differs in the captured run and in its repetition (None: none), and captures."""
    called.staged.sessions = Eager()
    wanted = called.output(SEED).tokens.flatten()
    counted.taken()
    runs = [captured.output(SEED).tokens.flatten() for _ in range(2)]
    first, again = (int(unlike.byte().argmax()) if (unlike := run != wanted).any() else None for run in runs)
    return {"same": first is None and again is None, "first": first, "again": again, "captures": len(counted.taken())}


# How often the first images of a process make steps be captured, how long that takes, and what repeats it


def run_captures(findings: Findings) -> None:
    """Three images by every method as if it was the first of the process, then parts of images after every change that
    a user may make between two runs."""
    dry = findings.dry
    subjects.need_graphs(dry)
    whole = subjects.trained("llamagen-xl", dry)
    listed = subjects.DRY_METHODS[:2] if dry else (*sorted(DEFAULTS, key=adaptive, reverse=True), *CAPTURED)
    listed = dict.fromkeys(listed)  # once each
    with findings.listening(), captures(dry) as counted:
        for method in findings.each(listed, "methods", "method"):
            with findings.item(method=method) as row:
                row |= of_images(whole.sampler(method), counted, dry)
                if row["later images"] and not adaptive(method):
                    findings.failure(
                        f"{method}: more images with the same settings capture {row['later images']} steps again"
                    )
                if graphs._failed:
                    findings.failure(f"{method}: the first images switch graphs off")
                graphs._failed = False
            if adaptive(method):
                continue
            with findings.trying(f"{method}, changed settings"):
                for change, number in after_changes(whole, method, counted):
                    row[change] = number
                    if number:
                        findings.warning(f"{method}: {number} steps are captured again after another {change}")
    counts = (f"{row['method']}: {row['captures']} + {row['later images']}" for row in findings.rows)
    findings.content["summary"] = f"captures of the first image, and of two more: {'; '.join(counts)}"


def adaptive(method: str) -> bool:
    """May later images of a method lead to other steps than the first one?"""
    return "auto" in method or method.startswith("ADT-Tree")


def of_images(contestant: Sampler, counted: Captures, dry: bool) -> dict[str, object]:
    """Captures of the first image and of two more; on a device, milliseconds of one capture, and seconds of the
    images. Nothing is known of the costs of passes."""
    pass_costs.known.clear()
    counted.taken()
    seconds, taken = [], []
    for seed in range(3):
        seconds.append(round(contestant(seed).seconds, 2))
        taken.append(counted.taken())
    row: dict[str, object] = {"captures": len(taken[0]), "later images": len(taken[1]) + len(taken[2])}
    if dry:
        return row
    ms = [round(1e3 * statistics.median(taken[0]), 1)] if taken[0] else []
    return row | {"ms of a capture": ms, "seconds": seconds}


def another_prompt(whole: Subject) -> Any:
    """CONDITIONING of the same shapes."""
    if whole.whole:
        return whole.model.encode_prompt(PROMPTS[1])
    [(features, *rest)] = whole.conditioning
    return [(features.roll(1, 1), *rest)]


def after_changes(whole: Subject, method: str, counted: Captures) -> Iterator[tuple[str, int]]:
    """What is captured after each change. Nothing begins or ceases to be filtered or guided by it."""
    behind = whole.stretch.layout.length // 3
    few = replace(whole.stretch, behind=behind, tokens=min(subjects.FEW, whole.stretch.layout.length - behind))
    base = replace(whole.params, cfg=4.0, temperature=0.9, top_k=50, top_p=0.9)
    contestant = replace(whole, stretch=few, params=base).sampler(method)
    for _ in range(2):
        contestant(0)
    counted.taken()
    for change, changed in {  # the prompt first, while the session of these settings is kept
        "prompt": {"conditioning": another_prompt(whole)},
        "guidance": {"params": replace(base, cfg=6.0)},
        "temperature": {"params": replace(base, temperature=0.8)},
        "top-k": {"params": replace(base, top_k=40)},
        "top-p": {"params": replace(base, top_p=0.8)},
    }.items():
        replace(contestant, **changed)(1)
        yield change, len(counted.taken())
