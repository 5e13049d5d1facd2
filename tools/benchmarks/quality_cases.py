"""Whose quality is measured, and on which prompts: ``python -m tools.benchmarks quality``."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import comfyui_specar as specar
from comfyui_specar.tools.training.captions import on_background
from comfyui_specar.tools.training.classifier import NO_HAIR, labels_for
from comfyui_specar.tools.training.settings import Setting

from . import documents
from .runs import Case, cases, drafter_cases

PROMPTS = 512  # of the 1440 that name an emoji, a style and a background, or the 576 that name a portrait's
FLOOR = ", other seeds"  # after the name of the reference: what two sets of one method differ by

# Besides the README's methods. Lossless ones for the check, then relaxed ones.
MORE = (
    "sjd threshold_exact w32",
    "chain of 5, blocks",
    "static tree, small model",
    "LANTERN delta 0.1",
    "ADT-Tree, LANTERN delta 0.3",
    "UniformRSD delta 2",
    "Cool-SD delta 1.1",
    "grouped",
    "TV-metered 0.05",
    "SJD coupled, Cool-SD delta 2, w32",
    "sjd coupled w32, settling 0.05",
)


class Prompt(NamedTuple):
    """What an image is asked to show: a name of each of the classifier's labels."""

    subject: str
    style: str
    background: str

    @property
    def text(self) -> str:
        return f"{self.subject}, {self.style}, {on_background(self.background)}"

    @property
    def possible(self) -> bool:
        """Is there such an image? One style of portraits has robots, and no others."""
        return self.subject != NO_HAIR and self.subject.endswith(" robot") == (self.style == "bottts")


def prompts(count: int, setting: Setting) -> list[Prompt]:
    """The first ``count`` of PROMPTS different random ones for a model of a setting. Raises ValueError for more than
    there are."""
    if not 1 <= count <= PROMPTS:
        raise ValueError(f"{count} images per method were asked for, but must be 1 to {PROMPTS}: each has its prompt.")
    every = (Prompt(*names) for names in product(*labels_for(setting).values()))
    return random.Random(0).sample([prompt for prompt in every if prompt.possible], PROMPTS)[:count]


def first_seed(name: str) -> int:
    """The seed of a method's first image; image i has this + i. Methods have seeds of their own."""
    return zlib.crc32(name.encode()) << 20


def published(eagle) -> list[Case]:
    """The papers' settings, where the cases of runs.py have our defaults: "as published" where nothing differs but
    Cool-SD's tree, which is that of LANTERN++ (the paper has EAGLE-1's).

    LANTERN's 1000 neighbours are a sixteenth of LlamaGen's codebook, but nearly all of the bundled model's: 63 are a
    sixteenth of it. First drafts of SJD++ are uniform with their true distribution, not with the certainty of the
    official code.
    """
    m, r, tree, top_k = (
        specar.methods,
        specar.rules,
        specar.structures.Static("lantern_57"),
        specar.structures.Dynamic(),
    )
    lantern = {"neighbours": 1000, "redraw": "paper"}
    return [
        Case("LANTERN delta 0.1, as published", m.Lantern(eagle, top_k, delta=0.1, **lantern)),
        Case("LANTERN delta 0.3, as published", m.Lantern(eagle, top_k, delta=0.3, **lantern)),
        Case(
            "LANTERN k 63, delta 0.3, paper's redraw",
            m.Lantern(eagle, top_k, delta=0.3, **lantern | {"neighbours": 63}),
        ),
        Case("LANTERN++ k 10, lambda 2, as published", m.LanternPP(eagle, tree, redraw="paper")),
        Case("Cool-SD delta 1.1, as published", m.CoolSD(eagle, tree, delta=1.1, decay=0.7, floor=False)),
        Case("Cool-SD delta 2, as published", m.CoolSD(eagle, tree, delta=2.0, decay=0.7, floor=False)),
        Case(
            "VVS every 4th, as published",
            m.VVS(eagle, top_k, rule=r.Lantern(delta=0.2, **lantern), interval=4, refresh=False),
        ),
        Case(
            "VVS every 2nd, as published",
            m.VVS(eagle, top_k, rule=r.Lantern(delta=0.1, **lantern), interval=2, refresh=False),
        ),
        Case(
            "SJD++ reuse (paper), window 96",
            m.SJD(window=96, reuse="threshold_paper", threshold=0.5, initial="uniform"),
        ),
    ]


def defaults(eagle) -> list[Case]:
    """Relaxed settings that are the defaults of nodes, and of which neither runs.py nor the papers have a case."""
    m, r = specar.methods, specar.rules
    return [
        Case("SJD coupled, entropy rule, w32", m.SJD(window=32, rule=r.Entropy())),
        Case("VVS every 4th, EAGLE-2", m.VVS(eagle, specar.structures.Dynamic())),
    ]


def discrete_cases(eagle, small) -> list[Case]:
    """Next token, the same with other seeds (what differs by chance), every method of the README, MORE, the papers'
    settings, and defaults of nodes."""
    listed = {case.name: case for case in (*cases((32,)), *drafter_cases(eagle, small))}
    readme = [case for *_, case in documents.METHODS]
    chosen = [listed[name] for name in dict.fromkeys((*readme, *MORE))]
    return [*_with_other_seeds(chosen), *published(eagle), *defaults(eagle)]


def continuous_cases(drafter: Any) -> list[Case]:
    """The plain sampler, the same with other seeds (what differs by chance), and speculation."""
    plain, m = specar.methods.ContinuousNextToken, specar.methods.ContinuousSpeculative
    listed = {
        "one token a pass": plain(),
        "MAR's schedule, 16 passes": plain(16),
        **{f"block of {drafts}": m(drafter, drafts) for drafts in (8, 32)},
        "exact, 4 drafts": m(drafter, 4, mode="exact"),
    }
    return _with_other_seeds([Case(name, method) for name, method in listed.items()])


def _with_other_seeds(listed: Sequence[Case]) -> list[Case]:
    reference, *others = listed
    return [reference, Case(reference.name + FLOOR, reference.method), *others]


def settings_of(case: Case, model) -> dict[str, Any]:
    """What a method says of itself in traces, "lossless" among it."""
    return case.method.describe(model.request(model.encode_prompt("")))
