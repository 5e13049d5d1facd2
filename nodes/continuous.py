"""The samplers of continuous models, whose tokens are vectors: plain, and with a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..samplers.methods.continuous import ContinuousSpeculative
from ..samplers.methods.continuous_next_token import ContinuousNextToken
from .comfy_runtime import models
from .samplers import CommonInputs, run_method
from .schema import schema
from .search import CONTINUOUS, SAMPLER, WITH_DRAFTER
from .widgets import choose, drafter_input, fold_away, negative_input, option_of, prompt_inputs, sampler_outputs

MODELS_OWN = "model's own"
GUIDANCE = {MODELS_OWN: None, "linear": "linear", "constant": "constant"}
HEADS = {MODELS_OWN: None, "ddpm": "ddpm", "ddim": "ddim"}
MODES = {  # option -> ContinuousSpeculative.mode
    "each guess alone (approximate)": "block",
    "stop at a rejection (approximate)": "prefix",
    "exact (slow)": "exact",
    "algorithm 1 as printed (biased, slow)": "printed",
    "as the published code (approximate)": "published",
}
SEES = {  # option -> ContinuousSpeculative.condition
    "automatic": None,
    "what is decided": "prefix",
    "what is decided, and earlier guesses": "drafts",
}
SIGMA = {"off": "off", "as in the paper": "paper", "as in the official code": "official"}


@dataclass(frozen=True, kw_only=True)
class Inputs(CommonInputs):
    """Inputs of a sampler of vectors, named like its sockets and widgets."""

    guidance: str
    head_sampler: str
    head_steps: int
    iterations: int = 0

    def params(self) -> dict[str, Any]:
        return super().params() | {
            "cfg_schedule": choose("guidance", self.guidance, GUIDANCE),
            "steps": self.head_steps or None,
            "kind": choose("head_sampler", self.head_sampler, HEADS),
            "iterations": self.iterations or None,
        }


def continuous_inputs() -> list[io.Input]:
    """Sockets and widgets of every sampler of continuous models, first on the node."""
    return [
        *prompt_inputs(),
        fold_away(io.Combo.Input("guidance", options=list(GUIDANCE), default=MODELS_OWN)),
        fold_away(io.Combo.Input("head_sampler", options=list(HEADS), default=MODELS_OWN)),
        io.Int.Input("head_steps", default=0, min=0, max=1000),
    ]


class ContinuousNextTokenSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARContinuousNextTokenSampler",
            category="SpecAR/sampling",
            search=(*SAMPLER, *CONTINUOUS, "next token", "baseline"),
            inputs=[*continuous_inputs(), io.Int.Input("iterations", default=0, min=0, max=4096), negative_input()],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return run_method(ContinuousNextToken(), Inputs(**inputs))


class ContinuousSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARContinuousSampler",
            category="SpecAR/sampling",
            search=(*WITH_DRAFTER, *CONTINUOUS),
            inputs=[
                *continuous_inputs(),
                drafter_input(),
                io.Int.Input("draft_length", default=ContinuousSpeculative.length, min=1, max=256),
                fold_away(
                    io.Float.Input(
                        "prefill", default=ContinuousSpeculative.prefill, min=0, max=1, step=0.01, round=0.001
                    )
                ),
                io.Combo.Input("mode", options=list(MODES), default=option_of(ContinuousSpeculative.mode, MODES)),
                fold_away(
                    io.Combo.Input(
                        "target_sees", options=list(SEES), default=option_of(ContinuousSpeculative.condition, SEES)
                    )
                ),
                io.Float.Input(
                    "tolerance", default=ContinuousSpeculative.tolerance, min=0, max=10, step=0.01, round=0.0001
                ),
                fold_away(
                    io.Combo.Input("sigma", options=list(SIGMA), default=option_of(ContinuousSpeculative.path, SIGMA))
                ),
                fold_away(io.Boolean.Input("alignment", default=ContinuousSpeculative.aligned)),
                negative_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls,
        drafter: models.LoadedDrafter,
        draft_length: int,
        prefill: float,
        mode: str,
        target_sees: str,
        tolerance: float,
        sigma: str,
        alignment: bool,
        **inputs: Any,
    ) -> io.NodeOutput:
        method = ContinuousSpeculative(
            drafter.drafter,
            draft_length,
            prefill,
            choose("mode", mode, MODES),
            choose("target_sees", target_sees, SEES),
            tolerance,
            choose("sigma", sigma, SIGMA),
            alignment,
        )
        return run_method(method, Inputs(**inputs), drafter)
