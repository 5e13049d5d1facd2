"""One node per acceptance rule: when a sampler accepts a drafted token, and in which part of the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from comfy_api.latest import io
from torch import Tensor

from ..samplers.rules.acceptance import AcceptanceRule, Exact
from ..samplers.rules.cool_sd import SCHEDULES, CoolSD, UniformRSD
from ..samplers.rules.entropy import Entropy
from ..samplers.rules.grouped import Grouped
from ..samplers.rules.lantern import Lantern, LanternPP
from ..samplers.rules.tv_budget import TVMetered
from .schema import schema
from .search import RELAXED, RULE
from .sockets import ARRule
from .widgets import advanced, choose, option_of

REDRAW = {  # option -> Lantern.redraw
    "optimal (recommended)": "optimal",
    "as in the paper": "paper",
}


@dataclass(frozen=True)
class ChosenRule:
    """An acceptance rule, and the MASK [1 or B, H, W] of its strength (1: full, 0: exact); None: 1 everywhere."""

    rule: AcceptanceRule
    where: Tensor | None = None


EXACT = ChosenRule(Exact())


def redraw_input() -> io.Input:
    return advanced(io.Combo.Input("redraw", options=list(REDRAW), default=option_of(Lantern.redraw, REDRAW)))


def where_input() -> io.Input:
    return io.Mask.Input("where", optional=True)


def outputs() -> list[io.Output]:
    return [ARRule.Output("rule")]


def chosen(rule: AcceptanceRule, where: Tensor | None = None) -> io.NodeOutput:
    """Output a rule. Raises ValueError for invalid values, so that the error appears on the rule's node."""
    rule.check()
    return io.NodeOutput(ChosenRule(rule, where))


class ExactRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleExact", category="SpecAR/rules", search=(*RULE, "lossless"), inputs=[], outputs=outputs()
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return chosen(Exact())


class LanternRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleLantern",
            category="SpecAR/rules",
            search=(*RELAXED, "similar tokens"),
            inputs=[
                io.Int.Input("neighbours", default=Lantern.neighbours, min=1, max=16384),
                io.Float.Input("delta", default=Lantern.delta, min=0, max=1, step=0.01, round=0.001),
                redraw_input(),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, neighbours: int, delta: float, redraw: str, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(Lantern(neighbours, delta, choose("redraw", redraw, REDRAW)), where)


class LanternPPRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleLanternPP",
            category="SpecAR/rules",
            search=(*RELAXED, "similar tokens"),
            inputs=[
                io.Int.Input("neighbours", default=LanternPP.neighbours, min=1, max=16384),
                io.Float.Input("ratio", default=LanternPP.ratio, min=1, max=1000, step=0.1, round=0.01),
                redraw_input(),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, neighbours: int, ratio: float, redraw: str, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(LanternPP(neighbours, ratio, choose("redraw", redraw, REDRAW)), where)


class RelaxedRule(io.ComfyNode):
    """A node whose widgets are named like the settings of its rule."""

    rule: ClassVar[type[AcceptanceRule]]

    @classmethod
    def execute(cls, where: Tensor | None = None, **settings: Any) -> io.NodeOutput:
        return chosen(cls.rule(**settings), where)


class UniformRSDRule(RelaxedRule):
    rule = UniformRSD

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleUniformRSD",
            category="SpecAR/rules",
            search=(*RELAXED, "cool-sd", "uniformrsd"),
            inputs=[
                io.Float.Input("delta", default=UniformRSD.delta, min=1, max=1000, step=0.05, round=0.01),
                where_input(),
            ],
            outputs=outputs(),
        )


def cool_sd_inputs() -> list[io.Input]:
    """The widgets of Cool-SD, for its rule and its sampler."""
    return [
        io.Float.Input("delta", default=CoolSD.delta, min=1, max=1000, step=0.05, round=0.01),
        advanced(io.Float.Input("decay", default=CoolSD.decay, min=0, max=10, step=0.05, round=0.001)),
        advanced(io.Int.Input("steps", default=CoolSD.steps, min=1, max=64)),
        advanced(io.Combo.Input("schedule", options=list(SCHEDULES), default=CoolSD.schedule)),
        advanced(io.Boolean.Input("floor", default=CoolSD.floor)),
    ]


class CoolSDRule(RelaxedRule):
    rule = CoolSD

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleCoolSD",
            category="SpecAR/rules",
            search=(*RELAXED, "annealed"),
            inputs=[*cool_sd_inputs(), where_input()],
            outputs=outputs(),
        )


class GroupedRule(RelaxedRule):
    rule = Grouped

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleGrouped",
            category="SpecAR/rules",
            search=(*RELAXED, "gsd", "similar tokens"),
            inputs=[
                io.Int.Input("window", default=Grouped.window, min=1, max=64),
                io.Float.Input("gap", default=Grouped.gap, min=0, max=1, step=0.01, round=0.001),
                io.Float.Input("radius", default=Grouped.radius, min=0, max=1000, step=0.05, round=0.001),
                where_input(),
            ],
            outputs=outputs(),
        )


class TVMeteredRule(RelaxedRule):
    rule = TVMetered

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleTVMetered",
            category="SpecAR/rules",
            search=(*RELAXED, "total variation", "drift", "metered"),
            inputs=[
                io.Float.Input("epsilon", default=TVMetered.epsilon, min=0, max=1, step=0.01, round=0.001),
                where_input(),
            ],
            outputs=outputs(),
        )


class EntropyRule(RelaxedRule):
    rule = Entropy

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARRuleEntropy",
            category="SpecAR/rules",
            search=(*RELAXED, "uncertainty"),
            inputs=[
                io.Float.Input("scale", default=Entropy.scale, min=1, max=64, step=0.5, round=0.01),
                io.Float.Input("decay", default=Entropy.decay, min=2, max=128, step=0.5, round=0.01),
                where_input(),
            ],
            outputs=outputs(),
        )


NODES = (ExactRule, LanternRule, LanternPPRule, UniformRSDRule, CoolSDRule, GroupedRule, TVMeteredRule, EntropyRule)
