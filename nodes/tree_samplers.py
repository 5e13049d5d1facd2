"""The samplers with a drafter: one node for all draft structures, and one for each published method built on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..samplers.drafts.adt_tree import ANOLE, INITIAL, ADTTree
from ..samplers.drafts.structures import Chain, Dynamic, Static, Structure
from ..samplers.drafts.trees import Path
from ..samplers.methods import published
from ..samplers.methods.skipping import SCHEDULES, Skipping
from ..samplers.methods.speculative import DraftTree
from ..samplers.rules.lantern import Lantern, LanternPP
from .comfy_runtime.runs import LoadedDrafter
from .rules import EXACT, REDRAW, ChosenRule, cool_sd_inputs, redraw_input, where_input
from .samplers import Inputs, sample
from .search import WITH_DRAFTER, found_by
from .widgets import (
    auto,
    check_removed,
    choose,
    common_inputs,
    drafter_input,
    folded,
    negative_input,
    option_of,
    removed,
    rule_input,
    sampler_outputs,
)

STATIC = "static tree, 25 drafts (EAGLE)"
DYNAMIC = "dynamic tree (EAGLE-2)"
OWN = "own tree"
STRUCTURES = {  # option -> what is drafted per pass, with the published sizes
    STATIC: Static("eagle_25"),
    "static tree, 57 drafts (LANTERN++)": Static("lantern_57"),
    DYNAMIC: Dynamic(),
    "chain": Chain(),
    "chain, block verification": Chain(verification="block"),
}
DEFAULT, COOL_SD_DEFAULT, VVS_DEFAULT = (
    option_of(structure, STRUCTURES)
    for structure in (Static(), *map(published.default_structure, (published.cool_sd, published.vvs)))
)
STRUCTURE_TIP = (
    "The shape of the draft. Static tree: sampled children, best at temperature 1. Dynamic tree: the most likely "
    "children, best at low temperature. Chain: one sequence of draft tokens, the cheapest pass."
)
MOST_LIKELY = "most likely (paper)"
OWN_VALUES = "own values"
PRESETS = {"LlamaGen": ADTTree(), "Anole": ANOLE}  # option -> the paper's steps and bounds
PATHS = {"at random (paper)": "uniform", "most confident": "confident", "first drawn": "first"}


def own_tree(paths: str) -> tuple[Path, ...]:
    """The paths in a string such as "0; 1; 0,0". Raises ValueError for other strings."""
    try:
        return tuple(tuple(int(child) for child in path.split(",")) for path in paths.split(";") if path.strip())
    except ValueError:
        raise ValueError(
            f"tree_paths is {paths!r}, which is no list of paths. Write child indices from 0, paths separated by "
            "semicolons: 0; 1; 0,0 (the root's first child, its second child, and the first child of its first child)."
        ) from None


def structure_of(structure: str, depth: int, width: int, nodes: int, tree_paths: str) -> Structure:
    """The draft structure for the widgets of the Draft-Tree Sampler. Raises ValueError for invalid ones."""
    if structure == OWN:
        return Static(own_tree(tree_paths))
    chosen = choose("structure", structure, STRUCTURES | {OWN: None})
    if isinstance(chosen, Chain):
        return replace(chosen, length=depth)
    return Dynamic(depth, width, nodes) if isinstance(chosen, Dynamic) else chosen


def structure_input(default: str, more: tuple[str, ...] = ()) -> io.Input:
    return io.Combo.Input("structure", options=[*STRUCTURES, *more], default=default, tooltip=STRUCTURE_TIP)


def tree_inputs() -> list[io.Input]:
    """The widgets for the size of a structure."""
    return [
        io.Int.Input(
            "depth",
            default=Dynamic.depth,
            min=1,
            max=32,
            tooltip="Number of consecutive draft tokens: the length of a chain, or the levels of a dynamic "
            "tree. More may be accepted at once, but drafting takes longer; 3 to 8 is sensible. Default: 5.",
        ),
        io.Int.Input(
            "width",
            default=Dynamic.width,
            min=1,
            max=64,
            tooltip="Dynamic tree: children per draft token, and how many tokens of a level get children. "
            "More raise the chance that one is accepted, but drafting takes longer; 4 to 16 is sensible. "
            "Default: 10.",
        ),
        io.Int.Input(
            "nodes",
            default=Dynamic.nodes,
            min=1,
            max=1024,
            tooltip="Dynamic tree: number of draft tokens that the model verifies per forward pass, the "
            "most likely ones. More save passes, but each pass takes longer; 20 to 60 is sensible. Default: "
            "58.",
        ),
    ]


class DraftTreeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARDraftTreeSampler",
            display_name="Draft-Tree Sampler (EAGLE)",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, "chain", "eagle-2"),
            description="A drafter proposes a tree of tokens, the model verifies all of them in one forward pass, and "
            "the accepted path is kept. Exact unless a relaxed rule is connected.",
            inputs=folded(
                [
                    *common_inputs(),
                    drafter_input(),
                    structure_input(DEFAULT, (OWN,)),
                    *tree_inputs(),
                    io.String.Input(
                        "tree_paths",
                        default="0; 1; 2; 0,0; 0,1; 1,0; 0,0,0",
                        tooltip="For own tree: paths of child indices from 0, separated by semicolons. Parents "
                        "and earlier siblings must be in the list.",
                    ),
                    negative_input(),
                    rule_input(),
                ],
                "width",
                "nodes",
                "tree_paths",
            ),
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        structure: str,
        depth: int,
        width: int,
        nodes: int,
        tree_paths: str,
        rule: ChosenRule = EXACT,
        **inputs: Any,
    ) -> io.NodeOutput:
        structure = structure_of(structure, depth, width, nodes, tree_paths)
        return sample(DraftTree(drafter.drafter, structure, rule.rule), Inputs(**inputs), drafter, rule.where)


LANTERN, LANTERN_PP = "LANTERN (dynamic tree)", "LANTERN++ (static tree)"


class LanternSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLanternSampler",
            display_name="LANTERN Sampler",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, "relaxed", "lossy"),
            description="Draft trees with a relaxed rule: the probability of similar tokens is added to a draft "
            "token's own. Fewer forward passes; images drift from the model's own distribution.",
            inputs=folded(
                [
                    *common_inputs(),
                    drafter_input(),
                    io.Combo.Input(
                        "variant",
                        options=[LANTERN, LANTERN_PP],
                        default=LANTERN_PP,
                        tooltip="LANTERN: limited by delta, with EAGLE-2's dynamic tree. LANTERN++, its "
                        "successor: limited by ratio, with EAGLE's static tree.",
                    ),
                    io.Int.Input(
                        "neighbours",
                        auto("neighbours"),
                        default=0,
                        min=0,
                        max=16384,
                        tooltip="Number of most similar tokens whose probability is added. More is faster and "
                        "drifts further; 5 to 1000 is sensible, and a small codebook needs fewer. Default: 0 "
                        "(auto), the paper's value: 1000 for LANTERN, 10 for LANTERN++.",
                    ),
                    io.Float.Input(
                        "delta",
                        default=Lantern.delta,
                        min=0,
                        max=1,
                        step=0.01,
                        round=0.001,
                        tooltip="For LANTERN: maximum probability added to a draft token's own. Higher is "
                        "faster and drifts further; 0 is exact, and papers use 0.1 to 0.6. Default: 0.1.",
                    ),
                    io.Float.Input(
                        "ratio",
                        default=LanternPP.ratio,
                        min=1,
                        max=1000,
                        step=0.1,
                        round=0.01,
                        tooltip="For LANTERN++: the paper's lambda, the maximum factor by which a draft "
                        "token's probability may grow. Higher is faster and drifts further; 1 is exact, and "
                        "the paper uses 2 to 20. Default: 2.",
                    ),
                    redraw_input(),
                    negative_input(),
                    where_input(),
                ],
                "neighbours",
                "redraw",
            ),
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        variant: str,
        neighbours: int,
        delta: float,
        ratio: float,
        redraw: str,
        where: Tensor | None = None,
        **inputs: Any,
    ) -> io.NodeOutput:
        rule = {"redraw": choose("redraw", redraw, REDRAW)} | ({"neighbours": neighbours} if neighbours else {})
        if choose("variant", variant, {LANTERN: True, LANTERN_PP: False}):
            method = published.lantern(drafter.drafter, delta=delta, **rule)
        else:
            method = published.lantern_pp(drafter.drafter, ratio=ratio, **rule)
        return sample(method, Inputs(**inputs), drafter, where)


class CoolSDSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARCoolSDSampler",
            display_name="Cool-SD Sampler",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, "relaxed", "lossy", "annealed"),
            description="Draft trees with a rule that accepts draft tokens more often than exact, most at the "
            "beginning of a draft. Fewer forward passes; images drift from the model's own distribution.",
            inputs=[
                *common_inputs(),
                drafter_input(),
                structure_input(COOL_SD_DEFAULT),
                *cool_sd_inputs(),
                negative_input(),
                where_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        structure: str,
        delta: float,
        decay: float,
        steps: int,
        schedule: str,
        floor: bool,
        where: Tensor | None = None,
        **inputs: Any,
    ) -> io.NodeOutput:
        method = published.cool_sd(
            drafter.drafter,
            choose("structure", structure, STRUCTURES),
            delta=delta,
            decay=decay,
            steps=steps,
            schedule=schedule,
            floor=floor,
        )
        return sample(method, Inputs(**inputs), drafter, where)


class ADTTreeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARADTTreeSampler",
            display_name="ADT-Tree Sampler",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, "adaptive tree"),
            description="A draft tree that adapts: deeper and narrower where draft tokens were accepted nearby, "
            "shallower and wider where they were rejected. Exact unless a relaxed rule is connected.",
            inputs=folded(
                [
                    *common_inputs(),
                    drafter_input(),
                    io.Combo.Input(
                        "preset",
                        options=[*PRESETS, OWN_VALUES],
                        default=option_of(ADTTree(), PRESETS),
                        tooltip="The paper's steps and bounds for two models. own values: those of the widgets "
                        "from beta to nodes, which are ignored otherwise.",
                    ),
                    io.Combo.Input(
                        "initialisation",
                        options=list(INITIAL),
                        default=ADTTree.initial,
                        tooltip="Which earlier tree's depth and width are adapted: the left neighbour's (best "
                        "in the paper), the upper one's, random ones, or a weighted mean of the surroundings.",
                    ),
                    removed(io.Combo.Input("children", options=[MOST_LIKELY, "drawn at random"], default=MOST_LIKELY)),
                    io.Float.Input(
                        "beta",
                        default=ADTTree.beta,
                        min=0,
                        max=1,
                        step=0.05,
                        round=0.001,
                        tooltip="The tree grows deeper if at least this fraction of the last tree's levels "
                        "was accepted; lower makes deeper trees. 0.5 to 1 is sensible. Default: 1, as in the "
                        "paper: only after a full path.",
                    ),
                    io.Int.Input(
                        "depth_step",
                        default=ADTTree.depth_step,
                        min=0,
                        max=32,
                        tooltip="Levels added or removed per pass: the higher, the faster the tree adapts, and "
                        "the more it wavers. 1 to 3 is sensible. Default: 1.",
                    ),
                    io.Int.Input(
                        "width_step",
                        default=ADTTree.width_step,
                        min=0,
                        max=64,
                        tooltip="Children per draft token removed or added at the same time, so that a deeper "
                        "tree takes not much longer. 5 to 20 is sensible. Default: 10.",
                    ),
                    io.Int.Input(
                        "depth_min",
                        default=ADTTree.depths[0],
                        min=1,
                        max=32,
                        tooltip="Minimum number of levels, for places where drafts are rejected. Fewer are "
                        "drafted faster; 1 to 3 is sensible. Default: 1.",
                    ),
                    io.Int.Input(
                        "depth_max",
                        default=ADTTree.depths[1],
                        min=1,
                        max=32,
                        tooltip="Maximum number of levels, for places where drafts are accepted. More may save "
                        "passes, but drafting takes longer; 5 to 12 is sensible. Default: 9.",
                    ),
                    io.Int.Input(
                        "width_min",
                        default=ADTTree.widths[0],
                        min=1,
                        max=64,
                        tooltip="Minimum number of children per draft token, in the deepest trees. More raise "
                        "the chance that one is accepted, but drafting takes longer; 2 to 8 is sensible. "
                        "Default: 4.",
                    ),
                    io.Int.Input(
                        "width_max",
                        default=ADTTree.widths[1],
                        min=1,
                        max=64,
                        tooltip="Maximum number of children per draft token, in the shallowest trees. More "
                        "raise the chance that one is accepted, but drafting takes longer; 10 to 40 is "
                        "sensible. Default: 39.",
                    ),
                    io.Int.Input(
                        "nodes",
                        default=ADTTree.nodes,
                        min=1,
                        max=1024,
                        tooltip="Maximum number of draft tokens verified per forward pass. More save passes, "
                        "but each takes longer; 20 to 60 is sensible. Default: 58.",
                    ),
                    negative_input(),
                    rule_input(),
                ],
                "beta",
                "depth_step",
                "width_step",
                "depth_min",
                "depth_max",
                "width_min",
                "width_max",
                "nodes",
            ),
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        preset: str,
        initialisation: str,
        children: str,
        beta: float,
        depth_step: int,
        width_step: int,
        depth_min: int,
        depth_max: int,
        width_min: int,
        width_max: int,
        nodes: int,
        rule: ChosenRule = EXACT,
        **inputs: Any,
    ) -> io.NodeOutput:
        check_removed("children", children, MOST_LIKELY, "drafts drawn at random were accepted less often")
        own = ADTTree(
            beta=beta,
            depth_step=depth_step,
            width_step=width_step,
            nodes=nodes,
            depths=(depth_min, depth_max),
            widths=(width_min, width_max),
        )
        method = published.adt_tree(
            drafter.drafter,
            rule.rule,
            **vars(choose("preset", preset, PRESETS | {OWN_VALUES: own}))
            | {"initial": choose("initialisation", initialisation, {name: name for name in INITIAL})},
        )
        return sample(method, Inputs(**inputs), drafter, rule.where)


class VVSSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARVVSSampler",
            display_name="VVS Sampler",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, "skip verification", "lossy"),
            description="Accepts some drafts without verifying them, which saves whole forward passes of the model. "
            "Approximate: images drift from the model's own distribution. Nothing limits how far in advance; the "
            "report tells it afterwards.",
            inputs=folded(
                [
                    *common_inputs(),
                    drafter_input(),
                    structure_input(VVS_DEFAULT),
                    io.Combo.Input(
                        "schedule",
                        options=list(SCHEDULES),
                        default=Skipping.schedule,
                        tooltip="Which drafts are accepted unverified. uniform: every interval-th. dynamic: "
                        "those whose paths in the tree are similar.",
                    ),
                    io.Int.Input(
                        "interval",
                        default=Skipping.interval,
                        min=2,
                        max=1024,
                        tooltip="For uniform: one draft in this many is accepted unverified. Lower is faster "
                        "and drifts further; the paper uses 2 to 4. Default: 4.",
                    ),
                    io.Float.Input(
                        "threshold",
                        default=Skipping.threshold,
                        min=0,
                        max=1.01,
                        step=0.01,
                        round=0.001,
                        tooltip="For dynamic: a draft is accepted unverified if its paths are at least this "
                        "similar (0 to 1). Lower is faster and drifts further; the paper uses 0.65 to 0.8 "
                        "on its larger tree; 25 drafts seldom reach that. Above 1: never. "
                        "Default: 0.7.",
                    ),
                    io.Combo.Input(
                        "path",
                        options=list(PATHS),
                        default=option_of(Skipping.path, PATHS),
                        tooltip="Which path of the tree is accepted unverified: any of them at random, as in "
                        "the paper (default); the one that the drafter finds most likely; or the one that it "
                        "drew first.",
                    ),
                    io.Boolean.Input(
                        "truncate",
                        default=Skipping.truncate,
                        tooltip="On (default): cut an unverified path to the mean length of the tree's "
                        "paths, so that fewer tokens go unverified.",
                    ),
                    io.Boolean.Input(
                        "refresh",
                        default=Skipping.refresh,
                        tooltip="On (default): after an unverified draft, rerun the drafter on the model's "
                        "true features, which takes a little longer. Off: keep the outdated features, as the "
                        "official code does.",
                    ),
                    negative_input(),
                    rule_input(),
                    io.Mask.Input(
                        "where",
                        optional=True,
                        tooltip="Where drafts may be accepted unverified: white yes, black never. Any size; a "
                        "token that is partly black is always verified. Not connected: everywhere.",
                    ),
                ],
                "path",
                "truncate",
                "refresh",
            ),
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        structure: str,
        schedule: str,
        interval: int,
        threshold: float,
        path: str,
        truncate: bool,
        refresh: bool,
        rule: ChosenRule = EXACT,
        where: Tensor | None = None,
        **inputs: Any,
    ) -> io.NodeOutput:
        method = published.vvs(
            drafter.drafter,
            choose("structure", structure, STRUCTURES),
            rule.rule,
            schedule=schedule,
            interval=interval,
            threshold=threshold,
            path=choose("path", path, PATHS),
            truncate=truncate,
            refresh=refresh,
        )
        return sample(method, Inputs(**inputs), drafter, rule.where, where)
