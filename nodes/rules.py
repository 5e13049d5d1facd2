"""One node per acceptance rule: when a sampler accepts a drafted token, and in which part of the image."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from comfy_api.latest import io
from torch import Tensor

from ..samplers.rules.acceptance import AcceptanceRule, Exact
from ..samplers.rules.cool_sd import CoolSD, UniformRSD
from ..samplers.rules.entropy import Entropy
from ..samplers.rules.grouped import Grouped
from ..samplers.rules.lantern import Lantern, LanternPP
from ..samplers.rules.tv_budget import TVMetered
from ..samplers.settings import settings_of
from .schema import schema
from .search import RELAXED, RULE
from .sockets import ARRule
from .widgets import choose, fold_away, option_of

REDRAW = {  # option -> NeighbourRule.redraw
    "optimal (recommended)": "optimal",
    "as in the paper": "paper",
}
OPTIONS = {"redraw": REDRAW}  # setting -> option -> value, of choices that the widget words in its own way


@dataclass(frozen=True)
class ChosenRule:
    """An acceptance rule, and the MASK [1 or B, H, W] of its strength (1: full, 0: exact); None: 1 everywhere."""

    rule: AcceptanceRule
    where: Tensor | None = None


EXACT = ChosenRule(Exact())


def where_input() -> io.Input:
    return io.Mask.Input("where", optional=True)


def setting_input(
    rule: type[AcceptanceRule], name: str, step: float = 0.01, most: float = 1000, folded: bool = False
) -> io.Input:
    """The widget of a rule's setting, with its type, default and legal values.

    step: of the arrows of a fraction; most: the maximum, if it may be any number; folded: few touch it.
    """
    [field] = [each for each in fields(rule) if each.name == name]
    widget: io.WidgetInput
    if field.type == "bool":
        widget = io.Boolean.Input(name, default=field.default)
    elif (legal := settings_of(rule)[name]).options:
        options = OPTIONS.get(name) or dict(zip(legal.options, legal.options, strict=True))
        widget = io.Combo.Input(name, options=list(options), default=option_of(field.default, options))
    elif field.type == "int":
        widget = io.Int.Input(name, default=field.default, min=int(legal.low), max=int(min(legal.high, most)))
    else:
        bounds = {"min": legal.low, "max": min(legal.high, most), "round": 0.01 if legal.low >= 1 else 0.001}
        widget = io.Float.Input(name, default=field.default, step=step, **bounds)
    return fold_away(widget) if folded else widget


def setting_inputs(rule: type[AcceptanceRule], looks: dict[str, dict[str, Any]]) -> list[io.Input]:
    """The widgets of all settings of a rule; looks: further arguments of setting_input, by setting."""
    return [setting_input(rule, each.name, **looks.get(each.name, {})) for each in fields(rule) if each.repr]


class RuleNode(io.ComfyNode):
    """The node of a rule: a widget for every setting, and the mask of its strength if it relaxes."""

    rule: ClassVar[type[AcceptanceRule]]
    node_id: ClassVar[str]
    search: ClassVar[tuple[str, ...]]
    looks: ClassVar[dict[str, dict[str, Any]]]

    @classmethod
    def define_schema(cls) -> io.Schema:
        mask = [] if cls.rule is Exact else [where_input()]
        return schema(
            node_id=cls.node_id,
            category="SpecAR/rules",
            search=cls.search,
            inputs=[*setting_inputs(cls.rule, cls.looks), *mask],
            outputs=[ARRule.Output("rule")],
        )

    @classmethod
    def execute(cls, where: Tensor | None = None, **settings: Any) -> io.NodeOutput:
        """Raises ValueError for invalid values, so that the error appears on the rule's node."""
        read = {
            name: choose(name, value, OPTIONS[name]) if name in OPTIONS else value for name, value in settings.items()
        }
        rule = cls.rule(**read)
        rule.check()
        return io.NodeOutput(ChosenRule(rule, where))


def rule_node(rule: type[AcceptanceRule], *search: str, node_id: str, **looks: dict[str, Any]) -> type[RuleNode]:
    """The node of a rule. search: words that find it, besides those of all rules; looks: see setting_inputs. Its id is
    written out, because registries of nodes read the source."""
    found = (*(RULE if rule is Exact else RELAXED), *search)
    return type(
        f"{rule.__name__}Rule", (RuleNode,), {"rule": rule, "node_id": node_id, "search": found, "looks": looks}
    )


FOLDED = {"folded": True}
NEIGHBOURS = {"neighbours": {"most": 16384}, "redraw": FOLDED}
COOL_SD = {
    "delta": {"step": 0.05},
    "decay": {"step": 0.05, "most": 10, "folded": True},
    "steps": FOLDED,
    "schedule": FOLDED,
    "floor": FOLDED,
}
NODES = (
    rule_node(Exact, "lossless", node_id="SpecARRuleExact"),
    rule_node(Lantern, "similar tokens", node_id="SpecARRuleLantern", **NEIGHBOURS),
    rule_node(LanternPP, "similar tokens", node_id="SpecARRuleLanternPP", ratio={"step": 0.1}, **NEIGHBOURS),
    rule_node(UniformRSD, "cool-sd", "uniformrsd", node_id="SpecARRuleUniformRSD", delta={"step": 0.05}),
    rule_node(CoolSD, "annealed", node_id="SpecARRuleCoolSD", **COOL_SD),
    rule_node(Grouped, "gsd", "similar tokens", node_id="SpecARRuleGrouped", radius={"step": 0.05}),
    rule_node(TVMetered, "total variation", "drift", "metered", node_id="SpecARRuleTVMetered"),
    rule_node(Entropy, "uncertainty", node_id="SpecARRuleEntropy", scale={"step": 0.5}, decay={"step": 0.5}),
)
