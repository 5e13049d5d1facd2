"""The cases that are measured: every method under its name, and the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfyui_specar as specar
from comfyui_specar.samplers.drafts.guesses import INITIAL
from comfyui_specar.samplers.methods.jacobi import REUSE

PROMPTS = (
    "heart, 3d, on a blue background",
    "cat, noto, on a yellow background",
    "rocket, flat, on a black background",
    "pizza, 3d, on a white background",
    "tree, noto, on a teal background",
    "robot, flat, on a pink background",
)


@dataclass(frozen=True)
class Case:
    """A named sampling method."""

    name: str
    method: Any


def cases(windows: Sequence[int]) -> list[Case]:
    """Next-token, then every SJD variant: all reuse modes, settling and AR Sampler's relaxed choice per
    window, all initialisations at the first window."""
    sjd = specar.methods.SJD
    listed = [Case("next_token", specar.methods.NextToken())]
    for window in windows:
        for reuse in REUSE:
            listed.append(Case(f"sjd {reuse} w{window}", sjd(window=window, reuse=reuse)))
        listed.append(Case(f"sjd coupled w{window}, settling 0.05", sjd(window=window, settle=0.05)))
        rule = specar.rules.TVMetered(0.1)
        listed.append(Case(f"SJD coupled, TV budget 0.1, w{window}", sjd(window=window, rule=rule)))
    for initial in INITIAL[1:]:  # the others use the first
        listed.append(Case(f"sjd coupled w{windows[0]} init {initial}", sjd(window=windows[0], initial=initial)))
    return listed


def names_of_cases() -> list[str]:
    """Of both lists, with the windows that reports have."""
    return [case.name for case in (*cases((16, 32)), *drafter_cases(None, None))]


def drafter_cases(eagle, small) -> list[Case]:
    """Every method and rule that needs a drafter, each on the structure of its paper unless named otherwise (auto: the
    one that pays)."""
    m, s, r = specar.methods, specar.structures, specar.rules
    tree, top_k = s.Static("lantern_57"), s.Dynamic()
    return [
        Case("chain of 5, small model", m.DraftTree(small, s.Chain(5))),
        Case("chain of 5, small model, blocks", m.DraftTree(small, s.Chain(5, "block"))),
        Case("static tree, small model", m.DraftTree(small, tree)),
        Case("chain of 5", m.DraftTree(eagle, s.Chain(5))),
        Case("chain of 5, blocks", m.DraftTree(eagle, s.Chain(5, "block"))),
        Case("EAGLE-1, 25 drafts", m.DraftTree(eagle, s.Static("eagle_25"))),
        Case("EAGLE-1, 57 drafts", m.DraftTree(eagle, tree)),
        Case("EAGLE-2", m.DraftTree(eagle, top_k)),
        Case("ADT-Tree", m.ADTTree(eagle, pays=False)),
        Case("LANTERN delta 0.1", m.Lantern(eagle, top_k, delta=0.1)),
        Case("LANTERN delta 0.3", m.Lantern(eagle, top_k, delta=0.3)),
        Case("ADT-Tree, LANTERN delta 0.3", m.ADTTree(eagle, r.Lantern(delta=0.3), pays=False)),
        Case("LANTERN++ k 10, lambda 2", m.LanternPP(eagle, tree)),
        Case("UniformRSD delta 1.1", m.DraftTree(eagle, tree, r.UniformRSD(1.1))),
        Case("UniformRSD delta 2", m.DraftTree(eagle, tree, r.UniformRSD(2.0))),
        Case("Cool-SD delta 1.1", m.CoolSD(eagle, tree, delta=1.1)),
        Case("Cool-SD delta 2", m.CoolSD(eagle, tree, delta=2.0)),
        Case("grouped", m.DraftTree(eagle, tree, r.Grouped())),
        Case("TV-metered 0.05", m.DraftTree(eagle, tree, r.TVMetered(0.05))),
        Case("VVS every 4th, LANTERN delta 0.3", m.VVS(eagle, top_k, rule=r.Lantern(delta=0.3), interval=4)),
        Case(
            "VVS dynamic 0.7, LANTERN delta 0.3",
            m.VVS(eagle, top_k, rule=r.Lantern(delta=0.3), schedule="dynamic", threshold=0.7),
        ),
        Case("VVS every 4th, EAGLE-1", m.VVS(eagle, tree, r.Exact(), interval=4, path="first")),
        Case("VVS every 3rd, Cool-SD delta 1.1", m.VVS(eagle, tree, r.CoolSD(), interval=3, path="first")),
        Case("EAGLE, auto", m.DraftTree(eagle)),
        Case("small model, auto", m.DraftTree(small)),
        Case("ADT-Tree, auto", m.ADTTree(eagle)),
        Case("LANTERN delta 0.1, auto", m.Lantern(eagle)),
        Case("LANTERN delta 0.3, auto", m.Lantern(eagle, delta=0.3)),
        Case("LANTERN++ k 10, lambda 2, auto", m.LanternPP(eagle)),
        Case("Cool-SD delta 1.1, auto", m.CoolSD(eagle, delta=1.1)),
        Case("VVS every 4th, auto", m.VVS(eagle)),
        Case("VVS every 4th, LANTERN delta 0.3, auto", m.VVS(eagle, rule=r.Lantern(delta=0.3), interval=4)),
        Case("SJD coupled, Cool-SD delta 2, w32", m.SJD(window=32, rule=r.CoolSD(2.0))),
    ]
