"""One node per sampling method. They share their first widgets and all code except the method."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..models.conditions import conditions
from ..models.image_decoder import RESIZE
from ..models.sizes import check_grid
from ..models.text.prompts import Conditioning, prompt_text
from ..reports.run_report import FIRST_DRAFTS
from ..samplers.contract import Method
from ..samplers.generate import AnyRequest, generate
from ..samplers.methods.continuous_next_token import ContinuousNextToken
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.next_token import NextToken
from ..samplers.rules.tv_budget import TVMetered
from .comfy_runtime import models, runs
from .comfy_runtime.memory import to_output_device
from .comfy_runtime.progress import finished_run, notify
from .latents import (
    Latent,
    describe_unused,
    first_image,
    grid_of,
    image_samples,
    keep_mask,
    skippable,
    strength,
    tokens_of,
    with_output,
)
from .rules import EXACT, ChosenRule
from .schema import schema
from .search import FAMILIES, SAMPLER, START
from .widgets import (
    choose,
    collect_given,
    common_inputs,
    fold_away,
    negative_input,
    option_of,
    removed,
    renamed,
    rule_input,
    sampler_outputs,
    valid_choice,
)

SLOW = "slow"
METHODS = {  # option -> method for models of token ids
    "fast, same quality": SJD(),
    "fast, same image as slow": SJD(reuse="gumbel"),
    SLOW: NextToken(),
}
WITHDRAWN = {"fastest, may drift": SJD(rule=TVMetered(0.1))}  # is not the fastest; only for older workflows
REFINEMENTS = {  # option -> SJD.reuse
    "coupled (exact)": "coupled",
    "SJD++ reuse (paper)": "threshold_paper",
    "SJD++ reuse (exact)": "threshold_exact",
    "redraw (SJD, exact)": "resample",
    "same seed, same image (Gumbel, exact)": "gumbel",
    "equality with a new sample (Jacobi, exact)": "equality",
    "none (exact)": "none",
}
INITIAL = {words: initial for initial, words in FIRST_DRAFTS.items()}  # option -> SJD.initial


@dataclass(frozen=True, kw_only=True)
class CommonInputs:
    """Inputs of all samplers, named like their sockets and widgets."""

    model: models.LoadedModel
    positive: Conditioning
    latent_image: Latent
    seed: int
    cfg: float
    temperature: float
    negative: Conditioning | None = None

    def params(self) -> dict[str, Any]:
        """Sampling parameters, without those whose widgets are set to the model's default."""
        return collect_given(self, "cfg", "temperature")


@dataclass(frozen=True, kw_only=True)
class Inputs(CommonInputs):
    """Inputs of a sampler of token ids."""

    top_k: int
    top_p: float

    def params(self) -> dict[str, Any]:
        return super().params() | collect_given(self, "top_k", "top_p")


def negative_of(negative: Conditioning | None) -> Conditioning | None:
    """The negative prompt of a sampler, None where it is empty or zeroed (Conditioning Zero Out)."""
    zeroed = negative and negative[0][0].shape[1] > 1 and not negative[0][0].any()  # a class label may be 0
    return None if zeroed or prompt_text(negative) == "" else negative


def checked_grid(inputs: CommonInputs) -> tuple[int, int]:
    """The grid of latent_image in tokens. Raises ValueError for one that the model was not trained on."""
    latent, model = inputs.latent_image, inputs.model.model
    try:
        return check_grid(model, *grid_of(latent, model))
    except ValueError as error:
        if latent.get("noise_mask") is not None:
            image_samples(latent, model)
            raise ValueError(f"{error} {RESIZE}") from error
        if latent["samples"].shape[1] != model.latent_channels:
            raise ValueError(
                f"{error} Connect Empty AR Latent with this model to latent_image: a token has "
                f"{model.pixels_per_token} pixels a side, and a cell of Empty Latent Image has 8."
            ) from error
        raise


def request_of(inputs: CommonInputs, where: Tensor | None = None, skip: Tensor | None = None) -> AnyRequest:
    """The request for these inputs. With a noise mask, the tokens of latent_image outside it are kept.

    where: MASK of a rule's strength; skip: MASK where a schedule may skip verification (None: everywhere). Raises
    ValueError for an invalid input.
    """
    model, latent = inputs.model.model, inputs.latent_image
    batch, grid = latent["samples"].shape[0], checked_grid(inputs)
    tokens = keep = None
    if latent.get("noise_mask") is not None:
        tokens, keep = tokens_of(latent, model), keep_mask(latent["noise_mask"], batch, *grid)
    request = model.request(
        inputs.positive,
        negative_of(inputs.negative),
        seed=inputs.seed + first_image(latent),
        batch=batch,
        grid=grid,
        tokens=tokens,
        kept=keep,
        strength=strength(where, batch, *grid),
        skippable=skippable(skip, batch, *grid),
        **inputs.model.sampling,
        **inputs.params(),
    )
    return replace(request, notices=(*request.notices, *describe_unused(latent, model, keep)))


def replace_settings(method: Method, **settings: Any) -> Method:
    """The method with other values of these settings."""
    return replace(method, **settings)  # type: ignore[type-var]  # every method is a dataclass, as Method says


def run_method(
    method: Method,
    inputs: CommonInputs,
    drafter: models.LoadedDrafter | None = None,
    where: Tensor | None = None,
    skip: Tensor | None = None,
    chosen: str = "",
) -> io.NodeOutput:
    """Run a method; see request_of for the MASKs. chosen: the user's name for the method, if it has one of its own on
    the node. Raises ValueError for an invalid input, and for a drafter of another model."""
    inputs.model.check_kind(method.continuous)
    if drafter is not None:
        drafter.follow(inputs.model)
        method = replace_settings(method, drafter=drafter.drafter)
    request = request_of(inputs, where, skip)
    notify(request.notices)
    output = generate(method, request, partial(runs.sampling, inputs.model, drafter))
    output.trace.settings |= origin(inputs, drafter) | ({"chosen": chosen} if chosen else {})
    tensors = {name: to_output_device(t) for name in ("tokens", "latent") if (t := getattr(output, name)) is not None}
    latent = with_output(inputs.latent_image, replace(output, **tensors), request)
    run = json.dumps(finished_run(request, output.trace, inputs.model.model.pixels_per_token))
    return io.NodeOutput(latent, output.trace, ui={"specar_run": [run]})


def origin(inputs: CommonInputs, drafter: models.LoadedDrafter | None) -> dict[str, Any]:
    """The origin of a run, for its trace. unknown_words: those of the prompts that the model ignored, if any."""
    model = inputs.model.model
    origin = {"model": inputs.model.name, "prompt": prompt_text(inputs.positive), "server": models.SERVER}
    texts = (prompt_text(prompt) or "" for prompt in (inputs.positive, inputs.negative) if prompt is not None)
    if unknown := [word for text in texts for word in model.unknown_words(text)]:
        origin["unknown_words"] = unknown
    if drafter is not None:
        origin["drafter_name"] = drafter.name
    return origin | conditions(model)


class ARSampler(io.ComfyNode):
    """AR Sampler, with one choice instead of a method's settings, first among the samplers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARSampler",
            category="SpecAR/sampling",
            search=("autoregressive", "speculative", *START, "ksampler", "inpaint", *SAMPLER, *FAMILIES),
            inputs=[
                *common_inputs(),
                io.Combo.Input("method", options=list(METHODS), default=next(iter(METHODS))),
                negative_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def validate_inputs(cls, method: str | None = None) -> bool | str:
        return valid_choice("method", method, METHODS | WITHDRAWN)

    @classmethod
    def execute(cls, method: str, **inputs: Any) -> io.NodeOutput:
        method = renamed(method)
        chosen, common = choose("method", method, METHODS | WITHDRAWN), Inputs(**inputs)
        if not common.model.model.continuous:
            return run_method(chosen, common, chosen=method)
        if method != SLOW:
            raise ValueError(
                f"{common.model.name} is a continuous model, for which {method!r} needs a drafter. Use Continuous "
                f"Speculative Sampler with Load AR Drafter, or choose {SLOW!r}."
            )
        return run_method(ContinuousNextToken(), common)


class NextTokenSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARNextTokenSampler",
            category="SpecAR/sampling",
            search=(*SAMPLER, "baseline", "sequential", *FAMILIES),
            inputs=[*common_inputs(), negative_input()],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return run_method(NextToken(), Inputs(**inputs))


class SJDSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARSJDSampler",
            category="SpecAR/sampling",
            search=(*SAMPLER, "jacobi", "parallel decoding", *FAMILIES),
            inputs=[
                *common_inputs(),
                io.Int.Input("window", default=SJD.window or 0, min=0, max=4096),
                io.Combo.Input("refinement", options=list(REFINEMENTS), default=option_of(SJD.reuse, REFINEMENTS)),
                fold_away(io.Float.Input("threshold", default=SJD.threshold, min=0.01, max=10, step=0.01, round=0.001)),
                fold_away(
                    io.Combo.Input("initialisation", options=list(INITIAL), default=option_of(SJD.initial, INITIAL))
                ),
                negative_input(),
                rule_input(),
                removed(io.Int.Input("front_drafts", default=1, min=1, max=16, optional=True)),
                fold_away(
                    io.Float.Input("settling", default=SJD.settle, min=0, max=1, step=0.01, round=0.001, optional=True)
                ),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def validate_inputs(cls, refinement: str | None = None) -> bool | str:
        return valid_choice("refinement", refinement, REFINEMENTS)

    @classmethod
    def execute(
        cls,
        window: int,
        refinement: str,
        threshold: float,
        initialisation: str,
        rule: ChosenRule = EXACT,
        settling: float = SJD.settle,
        **inputs: Any,
    ) -> io.NodeOutput:
        reuse = choose("refinement", refinement, REFINEMENTS)
        initial = choose("initialisation", initialisation, INITIAL)
        method = SJD(window or None, reuse, initial, threshold, rule.rule, settling)
        return run_method(method, Inputs(**inputs), where=rule.where)
