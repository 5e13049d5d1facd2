"""Everything a user can choose from, for what offers, names or tests all of a kind: the API, the batch client, reports,
benchmarks and tests. Nodes are listed in nodes/, with their widgets.
"""

from __future__ import annotations

from typing import Any

from .contract import Method
from .drafts.adt_tree import ADTTree
from .drafts.auto import Auto
from .drafts.structures import Chain, Dynamic, Static, Structure
from .methods.continuous import ContinuousSpeculative
from .methods.continuous_next_token import ContinuousNextToken
from .methods.jacobi import SJD, Jacobi
from .methods.next_token import NextToken
from .methods.published import PUBLISHED
from .methods.speculative import DraftTree
from .rules.acceptance import AcceptanceRule, Exact
from .rules.cool_sd import CoolSD, UniformRSD
from .rules.entropy import Entropy
from .rules.grouped import Grouped
from .rules.lantern import Lantern, LanternPP
from .rules.tv_budget import TVMetered

RULES: tuple[type[AcceptanceRule], ...] = (Exact, Lantern, LanternPP, UniformRSD, CoolSD, Grouped, TVMetered, Entropy)
STRUCTURES: tuple[type[Structure], ...] = (Auto, Chain, Static, Dynamic, ADTTree)
METHODS: tuple[type[Method], ...] = (NextToken, Jacobi, SJD, DraftTree, ContinuousNextToken, ContinuousSpeculative)


__all__ = ["METHODS", "PUBLISHED", "RULES", "STRUCTURES", "method_of", "structure_class"]


def structure_class(settings: dict[str, Any]) -> type[Structure]:
    """The structure that wrote these settings. Raises LookupError for none of this pack."""
    return {structure.kind: structure for structure in STRUCTURES}[settings["kind"]]


def method_of(settings: dict[str, Any]) -> type[Method]:
    """The method that wrote a trace's settings; published ones are draft trees. Raises LookupError for none of this
    pack."""
    return DraftTree if "structure" in settings else {method.name: method for method in METHODS}[settings["method"]]
