"""The methods that Find Fastest tries for a request, with the sampler nodes and widgets that set them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ..samplers.contract import Method, Request
from ..samplers.drafts.structures import Chain
from ..samplers.methods import published
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.next_token import NextToken
from ..samplers.methods.speculative import DraftTree
from ..samplers.rules.acceptance import AcceptanceRule, Exact
from ..samplers.rules.cool_sd import CoolSD
from ..samplers.rules.lantern import LanternPP
from ..samplers.rules.tv_budget import TVMetered
from .chosen_method import ChosenMethod
from .comfy_runtime.runs import LoadedDrafter, LoadedModel
from .samplers import METHODS, replace_settings
from .tree_samplers import AUTO, PRESETS, STRUCTURES

WINDOWS = (16, 32, 8, 64)
BLOCKS = "chain, block verification"
NEIGHBOURS, MOST_CODES = 10, 20000  # the table for more codes takes minutes


def make_candidate(
    model: LoadedModel, method: Method, drafter: LoadedDrafter | None, widgets: str, request: Request
) -> ChosenMethod:
    settings = method.describe(request)
    same = (option for option, each in METHODS.items() if each.describe(request) == settings)
    return ChosenMethod(model, method, drafter, widgets, settings, next(same, None))


def next_token(model: LoadedModel, request: Request) -> ChosenMethod:
    return make_candidate(model, NextToken(), None, "AR Sampler (next token)", request)


def methods(
    model: LoadedModel, drafter: LoadedDrafter | None, request: Request, budget: float, codes: int
) -> list[ChosenMethod]:
    """What Find Fastest tries: next token, the exact methods, and the likely fastest window and tree with approximate
    rules if ``budget``, the limit of the drift bound per token, allows any. codes: size of the codebook (0: none)."""
    exact = exact_methods(model, drafter, request)
    likely = [[each for each in exact if (each.drafter is None) == window][:1] for window in (True, False)]
    relaxed = relaxed_methods(chain(*likely), budget, codes, request) if budget else []
    return [next_token(model, request), *exact, *relaxed]


def exact_methods(model: LoadedModel, drafter: LoadedDrafter | None, request: Request) -> list[ChosenMethod]:
    """Methods that sample the model's distribution; likely the fastest first."""
    windows = [sjd(model, window, request) for window in WINDOWS if 2 * window <= request.layout.sampled_tokens]
    trees = (
        []
        if drafter is None
        else [
            tree(model, drafter, AUTO, request),
            adaptive_tree(model, drafter, request),
            tree(model, drafter, BLOCKS, request),
        ]
    )
    return [*windows[:1], *trees[:1], *windows[1:3], *trees[1:], *windows[3:]]


def relaxed_methods(bases: Iterable[ChosenMethod], budget: float, codes: int, request: Request) -> list[ChosenMethod]:
    """``bases`` with approximate rules that have a drift bound; see ``methods``."""
    rules: list[AcceptanceRule] = [TVMetered(budget), CoolSD(1.1), CoolSD(2.0)]
    if NEIGHBOURS < codes <= MOST_CODES:
        rules.append(LanternPP(NEIGHBOURS, 2.0))
    return [relax_candidate(base, rule, request) for base in bases for rule in rules]


def sjd(model: LoadedModel, window: int, request: Request) -> ChosenMethod:
    widgets = f"SJD++ Sampler: window {window}, refinement coupled (exact)"
    return make_candidate(model, SJD(window), None, widgets, request)


def tree(model: LoadedModel, drafter: LoadedDrafter, option: str, request: Request) -> ChosenMethod:
    """``option``: of the widget structure."""
    structure = STRUCTURES[option]
    method = DraftTree(drafter.drafter, structure)
    depth = f", depth {structure.length}" if isinstance(structure, Chain) else ""
    widgets = f"Draft-Tree Sampler (EAGLE): structure {option}{depth}; drafter {drafter.name}"
    return make_candidate(model, method, drafter, widgets, request)


def adaptive_tree(model: LoadedModel, drafter: LoadedDrafter, request: Request) -> ChosenMethod:
    method = published.adt_tree(drafter.drafter, Exact(), **vars(PRESETS[AUTO]))
    widgets = f"ADT-Tree Sampler: preset {AUTO}; drafter {drafter.name}"
    return make_candidate(model, method, drafter, widgets, request)


def relax_candidate(base: ChosenMethod, rule: AcceptanceRule, request: Request) -> ChosenMethod:
    """The method with another rule."""
    widgets = f"{base.widgets}; rule {rule.in_words(rule.describe())}"
    return make_candidate(base.model, replace_settings(base.method, rule=rule), base.drafter, widgets, request)
