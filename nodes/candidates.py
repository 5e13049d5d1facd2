"""The methods that Find Fastest tries, with the names and widgets of the sampler nodes that set them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..samplers.drafts.structures import Structure
from ..samplers.methods import published
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.next_token import NextToken
from ..samplers.methods.speculative import DraftTree
from ..samplers.rules.acceptance import AcceptanceRule, Exact
from ..samplers.rules.cool_sd import CoolSD
from ..samplers.rules.lantern import LanternPP
from ..samplers.rules.tv_budget import TVMetered
from .comfy_runtime.runs import LoadedDrafter, LoadedModel
from .method import ChosenMethod
from .tree_samplers import DYNAMIC, PRESETS, STATIC, STRUCTURES

WINDOWS = (16, 32, 8, 64)
CHAIN, LARGE = "chain", "static tree, 57 drafts (LANTERN++)"
ADAPTIVE = "LlamaGen"  # preset of the ADT-Tree Sampler
NEIGHBOURS, MOST_CODES = 10, 20000  # the table for more codes takes minutes


def next_token(model: LoadedModel) -> ChosenMethod:
    return ChosenMethod(model, NextToken(), None, "next token", "exact", "AR Sampler (next token)")


def exact_methods(model: LoadedModel, drafter: LoadedDrafter | None, length: int) -> list[ChosenMethod]:
    """Methods that sample the model's distribution, for runs of ``length`` tokens; likely the fastest first."""
    windows = [sjd(model, window) for window in WINDOWS if 2 * window <= length]
    trees = [] if drafter is None else [
        *(tree(model, drafter, name, STRUCTURES[name]) for name in (STATIC, CHAIN, DYNAMIC)),
        tree(model, drafter, f"ADT tree, {ADAPTIVE}", PRESETS[ADAPTIVE]),
        tree(model, drafter, LARGE, STRUCTURES[LARGE]),
    ]
    return [*windows[:1], *trees[:3], *windows[1:3], *trees[3:], *windows[3:]]


def relaxed_methods(bases: Iterable[ChosenMethod], budget: float, codes: int) -> list[ChosenMethod]:
    """``bases`` with approximate rules that have a drift bound. budget: limit of the drift bound per token; codes: size
    of the codebook (0: none)."""
    rules: list[AcceptanceRule] = [TVMetered(budget), CoolSD(1.1), CoolSD(2.0)]
    if NEIGHBOURS < codes <= MOST_CODES:
        rules.append(LanternPP(NEIGHBOURS, 2.0))
    return [relaxed(base, rule) for base in bases for rule in rules]


def sjd(model: LoadedModel, window: int) -> ChosenMethod:
    return ChosenMethod(model, SJD(window), None, f"SJD++, window {window}", "exact",
                        f"SJD++ Sampler: window {window}, refinement coupled (exact)")


def tree(model: LoadedModel, drafter: LoadedDrafter, name: str, structure: Structure) -> ChosenMethod:
    if structure is PRESETS[ADAPTIVE]:
        method = published.adt_tree(drafter.drafter, Exact(), **vars(structure))
        by_hand = f"ADT-Tree Sampler: preset {ADAPTIVE}"
    else:
        method = DraftTree(drafter.drafter, structure)
        by_hand = f"Draft-Tree Sampler (EAGLE): structure {name}"
    if name == CHAIN:
        name, by_hand = f"chain of {structure.length}", f"{by_hand}, depth {structure.length}"
    return ChosenMethod(model, method, drafter, name, "exact", f"{by_hand}; drafter {drafter.name}")


def relaxed(base: ChosenMethod, rule: AcceptanceRule) -> ChosenMethod:
    """The method with another rule."""
    acceptance = rule.in_words(rule.describe())
    by_hand = f"{base.by_hand}; rule {acceptance}"
    return replace(base, method=replace(base.method, rule=rule), acceptance=acceptance, by_hand=by_hand)
