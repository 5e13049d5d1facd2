"""Toy models all of whose images are enumerated: one large batch is many single runs, each at its own pace, and samples
from the distribution pass a chi-square test."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from comfyui_specar.samplers.contract import Result, SamplingParams
from torch import Tensor

from .toy import ToyModel, chi_square, marginal, plain, request, with_kept_tokens, with_line_ends

LAYOUTS = {
    "plain": (plain(2, 2), 0),
    "row": (plain(2, 3), 0),
    "line_ends": (with_line_ends(2, 2), 2),
    "kept": (with_kept_tokens(2, 3), 0),
}
MODELS = {name: ToyModel(layout, specials) for name, (layout, specials) in LAYOUTS.items()}


def draw(method: Any, name: str, params: SamplingParams | None = None, seed: int = 0, batch: int = 1, **more) -> Result:
    """A run on the model of a layout. more: other entries of the request."""
    return method.sample(replace(request(MODELS[name], LAYOUTS[name][0], params, seed, batch), **more))


def distance(tokens: Tensor, name: str, params: SamplingParams | None = None) -> SimpleNamespace:
    """How far images are from the model's distribution: see ``chi_square``."""
    return chi_square(tokens, MODELS[name].distribution(LAYOUTS[name][0], params or SamplingParams()))


def assert_exact(tokens: Tensor, name: str, params: SamplingParams | None = None) -> None:
    """Whole images follow the distribution, and so does what comes late: the last free positions together."""
    layout = LAYOUTS[name][0]
    late = (layout.forced[0] < 0).nonzero()[-2:, 0].tolist()
    distribution = marginal(MODELS[name].distribution(layout, params or SamplingParams()), late)
    whole, end = distance(tokens, name, params), chi_square(tokens[:, late], distribution)
    assert whole.z < 4 and end.z < 4, (whole, end)
