"""The samplers of continuous models, whose tokens are vectors: plain, and with a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..model_loaders.families import CONTINUOUS_NAMES
from ..samplers.methods.continuous import ContinuousSpeculative
from ..samplers.methods.continuous_next_token import ContinuousNextToken
from .comfy_runtime import models
from .samplers import CommonInputs, sample
from .search import CONTINUOUS, SAMPLER, WITH_DRAFTER, found_by
from .widgets import (
    auto,
    choose,
    drafter_input,
    folded,
    negative_input,
    option_of,
    prompt_inputs,
    sampler_outputs,
    temperature_input,
)

MODELS_OWN = "model's own"
GUIDANCE = {MODELS_OWN: None, "linear": "linear", "constant": "constant"}
HEADS = {MODELS_OWN: None, "ddpm": "ddpm", "ddim": "ddim"}
MODES = {  # option -> ContinuousSpeculative.mode
    "each guess alone (approximate)": "block",
    "stop at a rejection (approximate)": "prefix",
    "exact (slow)": "exact",
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
    return folded(
        [
            *prompt_inputs(),
            temperature_input("it scales the noise in every denoising step of the head"),
            io.Combo.Input(
                "guidance",
                options=list(GUIDANCE),
                default=MODELS_OWN,
                tooltip="How cfg changes over the image. linear: it grows with the fraction generated so far, "
                "as MAR's authors do. constant: the same for every token.",
            ),
            io.Combo.Input(
                "head_sampler",
                options=list(HEADS),
                default=MODELS_OWN,
                tooltip="How the diffusion head samples a token. ddpm: with noise in every step. ddim: without "
                "noise, which needs fewer steps.",
            ),
            io.Int.Input(
                "head_steps",
                auto("head_steps"),
                default=0,
                min=0,
                max=1000,
                tooltip="Denoising steps of the diffusion head per token. Fewer are faster and coarser; 25 to "
                "100 is common. Default: 0 (auto), the model's own number.",
            ),
        ],
        "guidance",
        "head_sampler",
    )


class ContinuousNextTokenSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARContinuousNextTokenSampler",
            display_name="AR Sampler (continuous)",
            category="SpecAR/sampling",
            **found_by(*SAMPLER, *CONTINUOUS, "next token", "baseline"),
            description=f"For models whose tokens are vectors ({CONTINUOUS_NAMES}). Samples one token per forward "
            "pass of the model, or as many as the model's authors do. The baseline for the speculative sampler.",
            inputs=[
                *continuous_inputs(),
                io.Int.Input(
                    "iterations",
                    auto("iterations"),
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Forward passes of the model. With fewer passes than tokens, several tokens are "
                    "sampled in one pass: faster, but they do not see each other; MAR's authors use 64 to "
                    "256. Default: 0 (auto), the model's own number, for MAR one per token.",
                ),
                negative_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return sample(ContinuousNextToken(), Inputs(**inputs))


class ContinuousSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARContinuousSampler",
            display_name="Continuous Speculative Sampler",
            category="SpecAR/sampling",
            **found_by(*WITH_DRAFTER, *CONTINUOUS),
            description=f"For models whose tokens are vectors ({CONTINUOUS_NAMES}): a small model drafts tokens, and "
            "the model verifies several of them in one forward pass. NOT lossless: a draft token is accepted if it is "
            "within a tolerance of what the model itself would sample. Only mode exact follows a distribution exactly, "
            "that of the model with noise in its last denoising step, and it saves almost nothing.",
            inputs=folded(
                [
                    *continuous_inputs(),
                    drafter_input(),
                    io.Int.Input(
                        "draft_length",
                        default=ContinuousSpeculative.length,
                        min=1,
                        max=256,
                        tooltip="Tokens drafted and verified per forward pass of the model. Longer drafts save "
                        "passes; in the first mode, more of the image is then generated without seeing its "
                        "latest tokens. 4 to 16 is sensible. Default: 8.",
                    ),
                    io.Float.Input(
                        "prefill",
                        default=ContinuousSpeculative.prefill,
                        min=0,
                        max=1,
                        step=0.01,
                        round=0.001,
                        tooltip="Fraction of the image that the model generates alone before drafting starts: "
                        "the first tokens decide what the image becomes. More is slower and closer to the "
                        "model; 0.02 to 0.2 is sensible. Default: 0.05, as in the paper.",
                    ),
                    io.Combo.Input(
                        "mode",
                        options=list(MODES),
                        default=option_of(ContinuousSpeculative.mode, MODES),
                        tooltip="each guess alone: a rejected draft token is replaced by the model's own "
                        "sample, and the others stay. stop at a rejection: the paper's algorithm, which drops "
                        "all later draft tokens. exact: no tolerance; a standard MAR adds no noise in its last "
                        "step and would reject every draft token, so this mode adds that noise. All modes but "
                        "exact are approximate.",
                    ),
                    io.Combo.Input(
                        "target_sees",
                        options=list(SEES),
                        default=option_of(ContinuousSpeculative.condition, SEES),
                        tooltip="What the model sees when it verifies a draft token. what is decided: one image "
                        "per pass, cheap, but the draft tokens of a round do not see each other. and earlier "
                        "guesses: one variant of the image per draft token, at the cost of that many images. "
                        "automatic: the first for each guess alone, the second for the other modes, which need "
                        "it.",
                    ),
                    io.Float.Input(
                        "tolerance",
                        default=ContinuousSpeculative.tolerance,
                        min=0,
                        max=10,
                        step=0.01,
                        round=0.0001,
                        tooltip="How far a draft token may be from the model's own sample, in units of the "
                        "latent (whose spread is about 1). Higher keeps more of the small model's image, and "
                        "0 rejects every draft token; 0.1 to 1 is sensible. Not used in mode exact. Default: "
                        "0.26, the value of the published code (kappa 42).",
                    ),
                    io.Combo.Input(
                        "sigma",
                        options=list(SIGMA),
                        default=option_of(ContinuousSpeculative.path, SIGMA),
                        tooltip="The factor by which the paper multiplies the test, from the denoising paths of "
                        "both models. off is correct: any other value biases the images. The official code uses "
                        "the inverse. Must be off in mode exact.",
                    ),
                    io.Boolean.Input(
                        "alignment",
                        default=ContinuousSpeculative.aligned,
                        tooltip="On (default): both models denoise from the same noise, so that their "
                        "samples are close. Off: almost every draft token is rejected.",
                    ),
                    negative_input(),
                ],
                "prefill",
                "target_sees",
                "sigma",
                "alignment",
            ),
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
        return sample(method, Inputs(**inputs), drafter)
