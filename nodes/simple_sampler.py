"""The sampler with one choice instead of a method's settings, first among the samplers."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..samplers.methods.continuous_next_token import ContinuousNextToken
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.next_token import NextToken
from ..samplers.rules.tv_budget import TVMetered
from .samplers import Inputs, sample
from .schema import schema
from .search import FAMILIES, SAMPLER, START
from .widgets import choose, common_inputs, negative_input, sampler_outputs

NEXT_TOKEN = "next token"
METHODS = {  # option -> method for models of token ids
    "fast, exact": SJD(),
    "same image as next token": SJD(reuse="gumbel"),
    "fastest, may drift": SJD(rule=TVMetered(0.1)),
    NEXT_TOKEN: NextToken(),
}


class SimpleSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARSampler",
            category="SpecAR/sampling",
            search=(*START, "ksampler", "inpaint", *SAMPLER, *FAMILIES),
            inputs=[
                *common_inputs(),
                io.Combo.Input("method", options=list(METHODS), default=next(iter(METHODS))),
                negative_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, method: str, **inputs: Any) -> io.NodeOutput:
        chosen, common = choose("method", method, METHODS), Inputs(**inputs)
        if not common.model.model.continuous:
            return sample(chosen, common, chosen=method)
        if method != NEXT_TOKEN:
            raise ValueError(
                f"{common.model.name} is a continuous model, for which {method!r} needs a drafter. Use Continuous "
                f"Speculative Sampler with Load AR Drafter, or choose {NEXT_TOKEN!r}."
            )
        return sample(ContinuousNextToken(), common)
