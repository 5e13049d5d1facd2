"""The published methods by name: settings of the one loop in speculative.py.

Their defaults are here and in the dataclasses of their settings, and nowhere else: nodes read them. What a paper has
otherwise is given as arguments (docs/api.md). Their trees have the size that pays on the device at hand; those of
LANTERN's papers, which are meant for GPUs, are PAPER_STRUCTURES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract import Drafter
from ..drafts.adt_tree import ADTTree
from ..drafts.auto import Auto
from ..drafts.structures import Dynamic, Static, Structure
from ..rules.acceptance import AcceptanceRule, Exact
from ..rules.cool_sd import CoolSD
from ..rules.lantern import Lantern, LanternPP
from .skipping import Skipping
from .speculative import DraftTree
from .vvs import VVS


def lantern(drafter: Drafter, structure: Structure = Auto(), **rule: Any) -> DraftTree:
    """LANTERN (Jang et al., ICLR 2025): additive relaxation, there on EAGLE-2's tree. ``rule``: settings of
    rules.Lantern."""
    return DraftTree(drafter, structure, Lantern(**rule), name="lantern")


def lantern_pp(drafter: Drafter, structure: Structure = Auto(), **rule: Any) -> DraftTree:
    """LANTERN++ (Park et al., 2025): multiplicative relaxation, there on a static sampled tree; settings:
    rules.LanternPP."""
    return DraftTree(drafter, structure, LanternPP(**rule), name="lantern_pp")


def cool_sd(drafter: Drafter, structure: Structure = Auto(), **rule: Any) -> DraftTree:
    """Cool-SD: annealed relaxation, there on a static sampled tree. ``rule``: settings of rules.CoolSD."""
    return DraftTree(drafter, structure, CoolSD(**rule), name="cool_sd")


def adt_tree(drafter: Drafter, rule: AcceptanceRule = Exact(), **structure: Any) -> DraftTree:
    """ADT-Tree: depth and width of the tree follow acceptance nearby; settings of structures.ADTTree. Its bounds are
    those that pay on the device at hand, unless others are given, or ``pays=False`` for the paper's."""
    bounds = structure.keys() & {"depths", "widths", "nodes"}
    structure.setdefault("pays", all(structure[name] == getattr(ADTTree, name) for name in bounds))
    return DraftTree(drafter, ADTTree(**structure), rule, name="adt_tree")


def vvs(drafter: Drafter, structure: Structure = Auto(), rule: AcceptanceRule = Exact(), **skipping: Any) -> VVS:
    """VVS: some rounds are not verified; settings: methods.Skipping. The paper verifies the others with LANTERN."""
    return VVS(drafter, structure, rule, skipping=Skipping(**skipping))


PAPER_STRUCTURES: dict[str, Structure] = {"lantern": Dynamic(), "lantern_pp": Static("lantern_57")}  # by method


@dataclass(frozen=True)
class Published:
    """A method of a paper: ``build(drafter, ...)`` makes it, its own keywords being fields of ``settings``."""

    name: str  # of the method that it builds
    build: Callable[..., DraftTree]
    settings: type


PUBLISHED = {
    "Lantern": Published("lantern", lantern, Lantern),
    "LanternPP": Published("lantern_pp", lantern_pp, LanternPP),
    "CoolSD": Published("cool_sd", cool_sd, CoolSD),
    "ADTTree": Published("adt_tree", adt_tree, ADTTree),
    "VVS": Published("vvs", vvs, Skipping),
}
