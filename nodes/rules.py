"""One node per acceptance rule: when a sampler accepts a drafted token, and in which part of the image."""

from __future__ import annotations

from dataclasses import dataclass

from comfy_api.latest import io
from torch import Tensor

from ..samplers.rules.acceptance import AcceptanceRule, Exact
from ..samplers.rules.cool_sd import SCHEDULES, CoolSD, UniformRSD
from ..samplers.rules.entropy import Entropy
from ..samplers.rules.grouped import Grouped
from ..samplers.rules.lantern import Lantern, LanternPP
from ..samplers.rules.tv_budget import TVMetered
from .search import RELAXED, RULE, found_by
from .sockets import ARRule
from .widgets import choose, folded, option_of

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
    return io.Combo.Input(
        "redraw",
        options=list(REDRAW),
        default=option_of(Lantern.redraw, REDRAW),
        tooltip="How a token is resampled after a rejection. optimal drifts least; the other option is the paper's.",
    )


def where_input() -> io.Input:
    return io.Mask.Input(
        "where",
        optional=True,
        tooltip="Where the rule is relaxed: white fully, black not at all (exact), grey partly. Any size. Not "
        "connected: everywhere.",
    )


def outputs() -> list[io.Output]:
    return [ARRule.Output("rule", display_name="AR_RULE", tooltip="For the rule input of an AR sampler.")]


def chosen(rule: AcceptanceRule, where: Tensor | None = None) -> io.NodeOutput:
    """Output a rule. Raises ValueError for invalid values, so that the error appears on the rule's node."""
    rule.check()
    return io.NodeOutput(ChosenRule(rule, where))


class ExactRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleExact",
            display_name="Exact Rule",
            category="SpecAR/rules",
            **found_by(*RULE, "lossless"),
            description="Accepts draft tokens so that images follow the model's own distribution. The same as no rule.",
            inputs=[],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return chosen(Exact())


class LanternRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleLantern",
            display_name="LANTERN Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "similar tokens"),
            description="Adds the probability of similar tokens to a draft token's own, up to a fixed amount.",
            inputs=folded(
                [
                    io.Int.Input(
                        "neighbours",
                        default=Lantern.neighbours,
                        min=1,
                        max=16384,
                        tooltip="Number of most similar tokens whose probability is added. More is faster and "
                        "drifts further; 100 to 1000 is sensible, and a small codebook needs fewer. Default: "
                        "1000, as LANTERN uses of 16384.",
                    ),
                    io.Float.Input(
                        "delta",
                        default=Lantern.delta,
                        min=0,
                        max=1,
                        step=0.01,
                        round=0.001,
                        tooltip="Maximum probability added to a draft token's own. Higher is faster and "
                        "drifts further; 0 is exact, and papers use 0.1 to 0.6. Default: 0.1.",
                    ),
                    redraw_input(),
                    where_input(),
                ],
                "redraw",
            ),
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, neighbours: int, delta: float, redraw: str, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(Lantern(neighbours, delta, choose("redraw", redraw, REDRAW)), where)


class LanternPPRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleLanternPP",
            display_name="LANTERN++ Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "similar tokens"),
            description="As LANTERN, but the added probability is limited to a multiple of the draft token's own.",
            inputs=folded(
                [
                    io.Int.Input(
                        "neighbours",
                        default=LanternPP.neighbours,
                        min=1,
                        max=16384,
                        tooltip="Number of most similar tokens whose probability is added. More is faster and "
                        "drifts further; LANTERN++ uses 5 or 10. Default: 10.",
                    ),
                    io.Float.Input(
                        "ratio",
                        default=LanternPP.ratio,
                        min=1,
                        max=1000,
                        step=0.1,
                        round=0.01,
                        tooltip="The paper's lambda: maximum factor by which a draft token's probability may "
                        "grow. Higher is faster and drifts further; 1 is exact, and the paper uses 2 to 20. "
                        "Default: 2.",
                    ),
                    redraw_input(),
                    where_input(),
                ],
                "redraw",
            ),
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, neighbours: int, ratio: float, redraw: str, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(LanternPP(neighbours, ratio, choose("redraw", redraw, REDRAW)), where)


class UniformRSDRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleUniformRSD",
            display_name="Uniform Relaxation Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "cool-sd", "uniformrsd"),
            description="Accepts draft tokens more often, by the same factor for all (UniformRSD of the Cool-SD "
            "paper).",
            inputs=[
                io.Float.Input(
                    "delta",
                    default=UniformRSD.delta,
                    min=1,
                    max=1000,
                    step=0.05,
                    round=0.01,
                    tooltip="Factor on the acceptance probability. Higher is faster and drifts further: 1 "
                    "is exact, 1.1 drifts a little, 2 clearly. Default: 1.1.",
                ),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, delta: float, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(UniformRSD(delta), where)


def cool_sd_inputs() -> list[io.Input]:
    """The widgets of Cool-SD, for its rule and its sampler."""
    return folded(
        [
            io.Float.Input(
                "delta",
                default=CoolSD.delta,
                min=1,
                max=1000,
                step=0.05,
                round=0.01,
                tooltip="Mean factor on the acceptance probability over a draft. Higher is faster and drifts "
                "further: 1.1 drifts a little, 2 clearly. Default: 1.1.",
            ),
            io.Float.Input(
                "decay",
                default=CoolSD.decay,
                min=0,
                max=10,
                step=0.05,
                round=0.001,
                tooltip="How much more relaxed the beginning of a draft is than its end: there, accepting "
                "saves most passes. 0: the same everywhere; 0.1 to 0.5 is sensible. Default: 0.2.",
            ),
            io.Int.Input(
                "steps",
                default=CoolSD.steps,
                min=1,
                max=64,
                tooltip="Number of draft tokens over which the relaxation is spread; after them the rule is "
                "exact. A good value is the depth of the draft, 3 to 8. Default: 5, the depth of most trees.",
            ),
            io.Combo.Input(
                "schedule",
                options=list(SCHEDULES),
                default=CoolSD.schedule,
                tooltip="How the relaxation decreases along a draft. The paper finds exponential best.",
            ),
            io.Boolean.Input(
                "floor",
                default=CoolSD.floor,
                tooltip="On (default): never stricter than exact. Off: as printed in the paper, where a "
                "small delta makes the end of a draft stricter than necessary.",
            ),
        ],
        "decay",
        "steps",
        "schedule",
        "floor",
    )


class CoolSDRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleCoolSD",
            display_name="Cool-SD Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "annealed"),
            description="Accepts draft tokens more often, most at the beginning of a draft, where this saves most.",
            inputs=[*cool_sd_inputs(), where_input()],
            outputs=outputs(),
        )

    @classmethod
    def execute(
        cls, delta: float, decay: float, steps: int, schedule: str, floor: bool, where: Tensor | None = None
    ) -> io.NodeOutput:
        return chosen(CoolSD(delta, decay, steps, schedule, floor), where)


class GroupedRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleGrouped",
            display_name="Grouped Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "gsd", "similar tokens"),
            description="Verifies groups of similar, about equally likely tokens instead of single tokens (GSD).",
            inputs=[
                io.Int.Input(
                    "window",
                    default=Grouped.window,
                    min=1,
                    max=64,
                    tooltip="Number of about equally likely tokens that a group is chosen from. More is "
                    "faster and drifts further; 1 is exact, and 5 to 20 is sensible. Default: 14, as GSD's "
                    "authors use.",
                ),
                io.Float.Input(
                    "gap",
                    default=Grouped.gap,
                    min=0,
                    max=1,
                    step=0.01,
                    round=0.001,
                    tooltip="Maximum difference between probabilities in a group. Higher is faster and "
                    "drifts further; 0 is exact, and 0.05 to 0.3 is sensible. Default: 0.15.",
                ),
                io.Float.Input(
                    "radius",
                    default=Grouped.radius,
                    min=0,
                    max=1000,
                    step=0.05,
                    round=0.001,
                    tooltip="Maximum visual difference between tokens of a group (squared distance of "
                    "their code vectors, so it depends on the model). Higher is faster and drifts "
                    "further; 0 is exact, and 0.1 to 1 is a start. Default: 0.5.",
                ),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, window: int, gap: float, radius: float, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(Grouped(window, gap, radius), where)


class TVMeteredRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleTVMetered",
            display_name="TV Budget Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "total variation", "drift", "metered"),
            description="Accepts as many draft tokens as a given drift per tested draft token (total variation) "
            "allows.",
            inputs=[
                io.Float.Input(
                    "epsilon",
                    default=TVMetered.epsilon,
                    min=0,
                    max=1,
                    step=0.01,
                    round=0.001,
                    tooltip="Allowed drift per tested draft token (total variation, 0 to 1). Higher is "
                    "faster; 0 is exact, and 0.01 to 0.2 is sensible. Default: 0.05: one token in twenty "
                    "may differ from what the model would have sampled; more in a tree, where siblings "
                    "tested at one position add up.",
                ),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, epsilon: float, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(TVMetered(epsilon), where)


class EntropyRule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARRuleEntropy",
            display_name="Entropy Rule",
            category="SpecAR/rules",
            **found_by(*RELAXED, "uncertainty"),
            description="Accepts draft tokens more often the more certain the model is. Never exact.",
            inputs=[
                io.Float.Input(
                    "scale",
                    default=Entropy.scale,
                    min=1,
                    max=64,
                    step=0.5,
                    round=0.01,
                    tooltip="Entropy (in nats) up to which acceptance is relaxed. Higher is faster and "
                    "drifts further; 4 to 12 is sensible. Default: 8, the paper's e.",
                ),
                io.Float.Input(
                    "decay",
                    default=Entropy.decay,
                    min=2,
                    max=128,
                    step=0.5,
                    round=0.01,
                    tooltip="How much of the test is left to chance where entropy is high: the higher, "
                    "the more. Must be above the largest entropy of the model's tokens; 10 to 20 is "
                    "sensible. Default: 16, the paper's lambda.",
                ),
                where_input(),
            ],
            outputs=outputs(),
        )

    @classmethod
    def execute(cls, scale: float, decay: float, where: Tensor | None = None) -> io.NodeOutput:
        return chosen(Entropy(scale, decay), where)


NODES = (ExactRule, LanternRule, LanternPPRule, UniformRSDRule, CoolSDRule, GroupedRule, TVMeteredRule, EntropyRule)
