"""The samplers with a drafter: one node for all draft structures, and one for each published method built on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..samplers.drafts.adt_tree import ANOLE, INITIAL, ADTTree
from ..samplers.drafts.auto import Auto
from ..samplers.drafts.structures import Chain, Dynamic, Static, Structure
from ..samplers.drafts.trees import Path
from ..samplers.methods import published
from ..samplers.methods.skipping import SCHEDULES, Skipping
from ..samplers.methods.speculative import DraftTree
from ..samplers.rules.cool_sd import CoolSD
from ..samplers.rules.lantern import Lantern, LanternPP
from .comfy_runtime.runs import LoadedDrafter
from .rules import COOL_SD, EXACT, REDRAW, ChosenRule, setting_input, setting_inputs, where_input
from .samplers import Inputs, run_method
from .schema import schema
from .search import WITH_DRAFTER
from .widgets import (
    choose,
    common_inputs,
    drafter_input,
    fold_away,
    negative_input,
    option_of,
    removed,
    rule_input,
    sampler_outputs,
)

AUTO = "auto"
STATIC = "static tree, 25 drafts (EAGLE)"
DYNAMIC = "dynamic tree (EAGLE-2)"
OWN = "own tree"
STRUCTURES = {  # option -> what is drafted per pass: what pays here, or the published sizes
    AUTO: Auto(),
    STATIC: Static("eagle_25"),
    "static tree, 57 drafts (LANTERN++)": Static("lantern_57"),
    DYNAMIC: Dynamic(),
    "chain": Chain(),
    "chain, block verification": Chain(verification="block"),
}
DEFAULT = option_of(Auto(), STRUCTURES)
PAPER = "paper's"
MOST_LIKELY = "most likely (paper)"
OWN_VALUES = "own values"
PRESETS = {  # option -> the paper's steps and bounds, or the bounds that pay here
    AUTO: ADTTree(pays=True),
    "LlamaGen": ADTTree(),
    "Anole": ANOLE,
}
FEATURES = {  # option -> Skipping.features
    "fresh; skipped: 0 (paper)": "-1, 0",
    **{f"fresh; skipped: {stale}": f"-1, {stale}" for stale in (1, 2, 3)},
    **{f"always {stale}": f"{stale}, {stale}" for stale in range(4)},
    **{f"fresh and {stale} by turns": f"-1 or {stale}" for stale in (0, 1, 5)},
}
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


class DraftTreeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARDraftTreeSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, "chain", "eagle-2"),
            inputs=[
                *common_inputs(),
                drafter_input(),
                io.Combo.Input("structure", options=[*STRUCTURES, OWN], default=DEFAULT),
                io.Int.Input("depth", default=Dynamic.depth, min=1, max=32),
                fold_away(io.Int.Input("width", default=Dynamic.width, min=1, max=64)),
                fold_away(io.Int.Input("nodes", default=Dynamic.nodes, min=1, max=1024)),
                fold_away(io.String.Input("tree_paths", default="0; 1; 2; 0,0; 0,1; 1,0; 0,0,0")),
                negative_input(),
                rule_input(),
            ],
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
        shape = structure_of(structure, depth, width, nodes, tree_paths)
        return run_method(DraftTree(drafter.drafter, shape, rule.rule), Inputs(**inputs), drafter, rule.where)


LANTERN, LANTERN_PP = "LANTERN (dynamic tree)", "LANTERN++ (static tree)"


class LanternSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLanternSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, "relaxed", "lossy"),
            inputs=[
                *common_inputs(),
                drafter_input(),
                io.Combo.Input("variant", options=[LANTERN, LANTERN_PP], default=LANTERN_PP),
                fold_away(io.Int.Input("neighbours", default=0, min=0, max=16384)),
                setting_input(Lantern, "delta"),
                setting_input(LanternPP, "ratio", step=0.1),
                setting_input(Lantern, "redraw", folded=True),
                negative_input(),
                where_input(),
                io.Combo.Input("structure", options=[AUTO, PAPER], default=AUTO, optional=True),
            ],
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
        structure: str = AUTO,
        **inputs: Any,
    ) -> io.NodeOutput:
        rule: dict[str, Any] = {"redraw": choose("redraw", redraw, REDRAW)}
        if neighbours:
            rule["neighbours"] = neighbours
        name = choose("variant", variant, {LANTERN: "lantern", LANTERN_PP: "lantern_pp"})
        shape = choose("structure", structure, {AUTO: Auto(), PAPER: published.PAPER_STRUCTURES[name]})
        if name == "lantern":
            method = published.lantern(drafter.drafter, shape, delta=delta, **rule)
        else:
            method = published.lantern_pp(drafter.drafter, shape, ratio=ratio, **rule)
        return run_method(method, Inputs(**inputs), drafter, where)


class CoolSDSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARCoolSDSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, "relaxed", "lossy", "annealed"),
            inputs=[
                *common_inputs(),
                drafter_input(),
                io.Combo.Input("structure", options=list(STRUCTURES), default=DEFAULT),
                *setting_inputs(CoolSD, COOL_SD),
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
        return run_method(method, Inputs(**inputs), drafter, where)


class ADTTreeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARADTTreeSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, "adaptive tree"),
            inputs=[
                *common_inputs(),
                drafter_input(),
                io.Combo.Input("preset", options=[*PRESETS, OWN_VALUES], default=AUTO),
                io.Combo.Input("initialisation", options=list(INITIAL), default=ADTTree.initial),
                removed(io.Combo.Input("children", options=[MOST_LIKELY, "drawn at random"], default=MOST_LIKELY)),
                fold_away(io.Float.Input("beta", default=ADTTree.beta, min=0, max=1, step=0.05, round=0.001)),
                fold_away(io.Int.Input("depth_step", default=ADTTree.depth_step, min=0, max=32)),
                fold_away(io.Int.Input("width_step", default=ADTTree.width_step, min=0, max=64)),
                fold_away(io.Int.Input("depth_min", default=ADTTree.depths[0], min=1, max=32)),
                fold_away(io.Int.Input("depth_max", default=ADTTree.depths[1], min=1, max=32)),
                fold_away(io.Int.Input("width_min", default=ADTTree.widths[0], min=1, max=64)),
                fold_away(io.Int.Input("width_max", default=ADTTree.widths[1], min=1, max=64)),
                fold_away(io.Int.Input("nodes", default=ADTTree.nodes, min=1, max=1024)),
                negative_input(),
                rule_input(),
                fold_away(io.Boolean.Input("bonus", default=ADTTree.bonus, optional=True)),
                fold_away(io.Int.Input("base_depth", default=ADTTree.base[0], min=0, max=32, optional=True)),
                fold_away(io.Int.Input("base_width", default=ADTTree.base[1], min=0, max=64, optional=True)),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: LoadedDrafter,
        preset: str,
        initialisation: str,
        beta: float,
        depth_step: int,
        width_step: int,
        depth_min: int,
        depth_max: int,
        width_min: int,
        width_max: int,
        nodes: int,
        rule: ChosenRule = EXACT,
        bonus: bool = ADTTree.bonus,
        base_depth: int = ADTTree.base[0],
        base_width: int = ADTTree.base[1],
        **inputs: Any,
    ) -> io.NodeOutput:
        own = ADTTree(
            beta=beta,
            depth_step=depth_step,
            width_step=width_step,
            nodes=nodes,
            depths=(depth_min, depth_max),
            widths=(width_min, width_max),
        )
        whatever_the_preset = {
            "initial": choose("initialisation", initialisation, {name: name for name in INITIAL}),
            "bonus": bonus,
            "base": (base_depth, base_width),
        }
        method = published.adt_tree(
            drafter.drafter,
            rule.rule,
            **vars(choose("preset", preset, PRESETS | {OWN_VALUES: own})) | whatever_the_preset,
        )
        return run_method(method, Inputs(**inputs), drafter, rule.where)


class VVSSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARVVSSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, "skip verification", "lossy"),
            inputs=[
                *common_inputs(),
                drafter_input(),
                io.Combo.Input("structure", options=list(STRUCTURES), default=DEFAULT),
                io.Combo.Input("schedule", options=list(SCHEDULES), default=Skipping.schedule),
                io.Int.Input("interval", default=Skipping.interval, min=2, max=1024),
                io.Float.Input("threshold", default=Skipping.threshold, min=0, max=1.01, step=0.01, round=0.001),
                fold_away(io.Combo.Input("path", options=list(PATHS), default=option_of(Skipping.path, PATHS))),
                fold_away(io.Boolean.Input("truncate", default=Skipping.truncate)),
                fold_away(io.Boolean.Input("refresh", default=Skipping.refresh)),
                negative_input(),
                rule_input(),
                io.Mask.Input("where", optional=True),
                fold_away(
                    io.Combo.Input(
                        "features",
                        options=list(FEATURES),
                        default=option_of(Skipping.features, FEATURES),
                        optional=True,
                    )
                ),
            ],
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
        features: str = option_of(Skipping.features, FEATURES),
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
            features=choose("features", features, FEATURES),
        )
        return run_method(method, Inputs(**inputs), drafter, rule.where, where)
