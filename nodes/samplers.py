"""One node per sampling method. They share their first widgets and everything around the method itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..model_loaders.ar_model import Conditioning, DiscreteModel
from ..samplers.contract import Progress, Request, SamplingParams
from ..samplers.engine.prefill import CHUNK, given_tokens
from ..samplers.layout import TokenLayout
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.next_token import NextToken
from .comfy_runtime import models, runs
from .comfy_runtime.clip import prompts_of, text_of
from .comfy_runtime.previews import Sketch
from .latents import Latent, first_image, kept, skippable, strength, tokens_of, with_tokens
from .rules import EXACT, ChosenRule
from .widgets import choose, common_inputs, given, negative_input, rule_input, sampler_outputs

REFINEMENTS = {  # shown -> SJD.reuse
    "coupled (exact)": "coupled",
    "SJD++ reuse (paper)": "threshold_paper",
    "SJD++ reuse (exact)": "threshold_exact",
    "redraw (SJD, exact)": "resample",
    "same seed, same picture (Gumbel, exact)": "gumbel",
}
INITIAL = {  # shown -> SJD.initial
    "left and upper neighbour": "mixed",
    "left neighbour": "left",
    "upper neighbour": "upper",
    "uniform": "uniform",
    "repeat the last token": "repeat",
}


@dataclass(frozen=True, kw_only=True)
class CommonInputs:
    """The inputs of samplers of every kind, named like their sockets and widgets."""

    model: models.LoadedModel
    positive: Conditioning
    latent_image: Latent
    seed: int
    cfg: float
    temperature: float
    negative: Conditioning | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs(CommonInputs):
    """Those of a sampler of token ids."""

    top_k: int
    top_p: float


def params_of(inputs: Inputs) -> SamplingParams:
    """Sampling parameters, with the model's own where a widget says -1."""
    return replace(inputs.model.model.defaults, **given(inputs, "cfg", "temperature", "top_k", "top_p"))


def layout_of(inputs: Inputs) -> TokenLayout:
    """The token layout of latent_image; with a noise mask, the tokens outside it are forced. Raises ValueError."""
    model, latent = inputs.model.model, inputs.latent_image
    batch, _, rows, cols = latent["samples"].shape
    layout = model.layout(rows, cols)
    if latent.get("noise_mask") is None:
        return layout
    return layout.keeping(tokens_of(latent, model), kept(latent["noise_mask"], batch, rows, cols))


def request_of(inputs: Inputs, where: Tensor | None = None, skip: Tensor | None = None) -> Request:
    """What a sampler is asked by these inputs; a rule is lenient in the MASK ``where``, and a schedule may take drafts
    unverified in the MASK ``skip`` (None: everywhere).

    Raises ValueError where an input is illegal.
    """
    model, latent = inputs.model.discrete(), inputs.latent_image
    positive, negative = prompts_of(inputs.positive, inputs.negative)
    params, layout, batch = params_of(inputs), layout_of(inputs), latent["samples"].shape[0]
    seed = inputs.seed + first_image(latent)
    return Request(
        model, positive, layout, params, negative, seed, batch, strength=strength(where, layout, batch),
        skippable=skippable(skip, layout, batch),
    )


def sample(
    method: Any, width: int, inputs: Inputs, where: Tensor | None = None, drafter: models.LoadedDrafter | None = None,
    skip: Tensor | None = None,
) -> io.NodeOutput:
    """Run a method that feeds ``width`` tokens per pass; see request_of for the MASKs ``where`` and ``skip``.

    Raises ValueError where an input is illegal.
    """
    request = request_of(inputs, where, skip)
    model, layout = request.model, request.layout

    def sketch(progress: Progress) -> Sketch:
        return sketched(model, layout, progress)

    memory = memory_for(request, method, width, drafter)
    with runs.sampling(
        inputs.model, memory, layout.length, sketch, drafter, method.session_key(request)
    ) as report:
        decoded = method.sample(replace(request, callback=report))
    tokens = models.output(layout.to_grid(decoded.tokens))
    decoded.trace.settings |= told(inputs, drafter)
    return io.NodeOutput(with_tokens(inputs.latent_image, tokens, model), decoded.trace)


def memory_for(request: Request, method: Any, width: int, drafter: models.LoadedDrafter | None) -> int:
    """Bytes that a run takes beside the weights. Raises ValueError for a prompt that is not the model's."""
    model, layout, batch, guided = request.model, request.layout, request.batch, request.params.cfg != 1
    prompt = model.prompt_tokens(request.conditioning, request.negative, batch, layout, guided)
    return memory_of(model, layout, batch, guided, prompt, width, drafter, method.draft_width if drafter else 0)


def memory_of(
    model: DiscreteModel, layout: TokenLayout, batch: int, guided: bool, prompt: int, width: int,
    drafter: models.LoadedDrafter | None, draft_width: int,
) -> int:
    """Bytes of the caches, laws and activations of a run behind prompts of ``prompt`` tokens, in which model and
    drafter work on so many tokens in a round, and before that on those given at the beginning."""
    rows, widest, read = batch * (1 + guided), max(width, draft_width) + 1, min(int(given_tokens(layout).max()), CHUNK)
    config = model.backbone.config
    laws = rows * max(8 * widest, 4 * read) * model.vocab_total * 4  # eight rows of fp32 laws, or a few of logits
    activations = rows * max(prompt, widest, read) * (8 * config.dim + 4 * config.ffn_dim) * model.dtype.itemsize
    memory = model.kv_bytes(batch, layout, width, guided, prompt) + laws + activations
    return memory + (drafter.drafter.kv_bytes(batch, layout, draft_width, guided, prompt) if drafter else 0)


def sketched(model: DiscreteModel, layout: TokenLayout, progress: Progress) -> Sketch:
    """The first image as far as it is drawn, and what is guessed behind that. Kept tokens are there from the start."""
    forced, tokens = layout.forced[0].cpu(), progress.tokens[0].to("cpu", copy=True)
    decided = int((progress.committed if progress.start is None else progress.start)[0])
    known = torch.arange(layout.length) < decided
    guessed = torch.zeros_like(known)
    if progress.draft is not None:
        draft = progress.draft[0, : layout.length - decided].cpu()  # no more than there are places
        tokens[decided : decided + len(draft)] = draft
        guessed[decided : decided + len(draft)] = True
    known, guessed = known | (forced >= 0), guessed & (forced < 0)
    tokens = torch.where(forced >= 0, forced, tokens)
    return Sketch(model.dequantize(layout.to_grid(tokens)[None]), layout.to_grid(known), layout.to_grid(guessed))


def told(inputs: Any, drafter: models.LoadedDrafter | None) -> dict[str, Any]:
    """What a trace is to tell of where it came from."""
    told = {"model": inputs.model.name, "prompt": text_of(inputs.positive), "server": models.SERVER}
    return told if drafter is None else told | {"drafter_name": drafter.name}


class NextTokenSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARNextTokenSampler",
            display_name="AR Sampler (next token)",
            category="SpecAR/sampling",
            description="Draws one token per pass of the model: the plain method, and the baseline for all others.",
            inputs=[*common_inputs(), negative_input()],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return sample(NextToken(), 1, Inputs(**inputs))


class SJDSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARSJDSampler",
            display_name="SJD++ Sampler",
            category="SpecAR/sampling",
            description="Speculative Jacobi decoding: guesses a window of tokens and verifies them in one pass of the "
            "model, several times fewer passes than tokens. No second model is needed.",
            inputs=[
                *common_inputs(),
                io.Int.Input("window", default=0, min=0, max=4096,
                             tooltip="Tokens guessed and verified per pass. Wider saves passes, but each costs more. "
                             "0: automatic (32, on a CPU 16). SJD's authors use 16 to 96."),
                io.Combo.Input("refinement", options=list(REFINEMENTS), default="coupled (exact)",
                               tooltip="What becomes of guesses that are not accepted yet. The exact ones keep the "
                               "distribution of the next-token sampler; SJD++ as in the paper is biased. "
                               "Same seed: the very picture of the next-token sampler."),
                io.Float.Input("threshold", default=0.5, min=0.01, max=10, step=0.01, round=0.001,
                               tooltip="For the two SJD++ refinements: keep a guess whose probability ratio is above "
                               "this (the paper's tau, 0.5). Higher redraws more."),
                io.Combo.Input("initialisation", options=list(INITIAL), default="left and upper neighbour",
                               tooltip="Where the first guess at a position comes from. The neighbours' predictions "
                               "save passes; uniform is the plain choice."),
                negative_input(),
                rule_input(),
            ],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(
        cls, window: int, refinement: str, threshold: float, initialisation: str, rule: ChosenRule = EXACT,
        **inputs: Any,
    ) -> io.NodeOutput:
        reuse = choose("refinement", refinement, REFINEMENTS)
        initial = choose("initialisation", initialisation, INITIAL)
        method = SJD(window or None, reuse, initial, threshold, rule.rule)
        return sample(method, window or 32, Inputs(**inputs), rule.where)
