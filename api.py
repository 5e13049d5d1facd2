"""The headless interface: load a model, encode a prompt, sample, decode. The nodes use the same functions."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from inspect import signature
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .limits.limits import IMAGES
from .model_loaders.detect import bundled, find_model, load_drafter, load_image_decoder, load_model
from .models.conditions import conditions
from .models.continuous_model import ContinuousBase
from .models.discrete_model import DiscreteModel
from .samplers.continuous_contract import ContinuousParams
from .samplers.contract import Method, Output, SamplingParams
from .samplers.drafts.structures import Structure
from .samplers.generate import generate
from .samplers.layout import TokenLayout
from .samplers.methods.continuous_next_token import ContinuousNextToken
from .samplers.methods.jacobi import SJD
from .samplers.methods.skipping import Skipping
from .samplers.registry import METHODS, PUBLISHED, RULES, STRUCTURES
from .samplers.rules.acceptance import AcceptanceRule
from .samplers.trace import Trace
from .samplers.trace_files import load_trace, save_trace

__all__ = [
    "Output",
    "Trace",
    "bundled",
    "find_model",
    "load_drafter",
    "load_image_decoder",
    "load_model",
    "load_trace",
    "methods",
    "rules",
    "sample",
    "save_trace",
    "structures",
]


class Names(SimpleNamespace):
    """Classes by their names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name}; there are {', '.join(vars(self))}")


methods = Names(
    **{method.__name__: method for method in METHODS},
    **{name: each.build for name, each in PUBLISHED.items()},
    Skipping=Skipping,
)
structures = Names(**{structure.__name__: structure for structure in STRUCTURES})
rules = Names(**{rule.__name__: rule for rule in RULES}, AcceptanceRule=AcceptanceRule)
SEEDS = 2**64  # how many there are, as in ComfyUI
GRIDS = ("strength", "skippable", "tokens", "kept")  # arguments with a value per token
MORE = ("grid", "tokens", "kept", *(each.name for kind in (SamplingParams, ContinuousParams) for each in fields(kind)))
PARTS = {  # a field of a method -> what it takes, and in words
    "rule": (AcceptanceRule, "an object such as rules.Exact()"),
    "structure": (Structure, "an object such as structures.Static()"),
    "skipping": (Skipping, "an object such as methods.Skipping()"),
    "window": (Integral | None, "a whole number or None"),
    "threshold": (Real, "a number"),
}
REPORTS = {
    "acceptance_map": ("acceptance_map", "acceptance_map"),
    "timeline_frames": ("timeline_frames", "timeline_frames"),
    "comparison_chart": ("comparison", "chart"),
    "comparison_table": ("comparison", "table"),
    "run_report": ("run_report", "describe"),
}


def __getattr__(name: str) -> Any:
    """Maps, films, charts and reports (reports/): imported when asked for, as they need numpy and Pillow."""
    if name not in REPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = REPORTS[name]
    return getattr(import_module(f".reports.{module}", __package__), function)


def sample(
    model: DiscreteModel | ContinuousBase,
    conditioning: Any,
    method: Method | None = None,
    negative: Any = None,
    cfg: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 1,
    layout: TokenLayout | None = None,
    callback: Any = None,
    strength: Tensor | None = None,
    skippable: Tensor | None = None,
    **more: Any,
) -> Output:
    """Generate ``batch_size`` images (image i with seed + i); parameters left None are the model's own.

    method: one of ``methods`` (None: SJD, for continuous models ContinuousNextToken). strength [rows, cols] (0..1): how
    far a relaxed rule or settling may go at each token, 0 being exact. skippable [rows, cols] (bool): where a skipping
    schedule may take drafts unverified. ``more``: grid (rows, cols); tokens and kept (bool), both [B, rows, cols], to
    keep parts of an image; entropy (T0, alpha, theta: see SamplingParams); and for continuous models cfg_schedule,
    steps, kind and iterations (see ContinuousParams), while layout, top_k, top_p, entropy, strength and skippable are
    for models of token ids. Raises ValueError where a parameter is outside its range or not supported (the message says
    which), TypeError where it has another type or is none of these, and where the method is none or lacks its drafter.
    """
    if not hasattr(model, "request"):
        raise TypeError(f"model is {model!r}, but must be that of load_model(path).")
    for name, number in (("seed", seed), ("batch_size", batch_size)):
        if not isinstance(number, Integral):
            raise TypeError(f"{name} is {number!r}, but must be a whole number.")
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed is {seed}, but must be 0 to {SEEDS - 1}.")
    if not 1 <= batch_size <= IMAGES:
        raise ValueError(f"batch_size is {batch_size}, but must be 1 to {IMAGES}.")
    if unknown := more.keys() - MORE:
        *named, _more = signature(sample).parameters
        raise TypeError(f"there is no argument {min(unknown)}; there are {', '.join(dict.fromkeys((*named, *MORE)))}.")
    sides = (1, 1) if more.get("grid") is None else more["grid"]
    if not isinstance(sides, tuple | list) or len(sides) != 2 or not all(isinstance(side, Integral) for side in sides):
        raise TypeError(f"grid is {sides!r}, but must be two whole numbers: rows and columns of tokens.")
    if method is not None:
        check_parts(method)
    for name, grid in {"strength": strength, "skippable": skippable, **more}.items():
        if name in GRIDS and not isinstance(grid, Tensor | None):
            raise TypeError(f"{name} is {grid!r}, but must be a tensor with a value for every token, or None.")
    if skippable is not None and not hasattr(method, "skipping"):
        raise ValueError("skippable says where drafts may be accepted unverified, which is for methods.VVS alone.")
    if strength is not None and not relaxes(method):
        raise ValueError("strength says how far a relaxed rule or settling may go, and this method has neither.")
    strength, skippable = (None if grid is None else grid[None] for grid in (strength, skippable))
    request = model.request(
        conditioning,
        negative,
        seed=int(seed),
        batch=int(batch_size),
        callback=callback,
        layout=layout,
        strength=strength,
        skippable=skippable,
        cfg=cfg,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        **more,
    )
    output = generate(method or (ContinuousNextToken() if model.continuous else SJD()), request)
    output.trace.settings |= {"model": model.family} | conditions(model)
    return output


def relaxes(method: Method | None) -> bool:
    """Does it accept drafts that the exact rule may reject, so that a strength says where?"""
    return bool(getattr(method, "settle", 0)) or not getattr(getattr(method, "rule", None), "lossless", True)


def check_parts(method: Method) -> None:
    """Raises TypeError if this is no method, or if one of its parts is of another type than it takes."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method is {method!r}, but must be an object such as methods.SJD(); there are "
            f"{', '.join([*(each.__name__ for each in METHODS), *PUBLISHED])}."
        )
    drafter = getattr(method, "drafter", None)
    if hasattr(method, "drafter") and not hasattr(drafter, "channels" if method.continuous else "kind"):
        raise TypeError(
            f"{type(method).__name__}'s drafter is {drafter!r:.60}, but must be that of load_drafter(path, model)."
        )
    for part, (kind, words) in PARTS.items():
        if hasattr(method, part) and not isinstance(value := getattr(method, part), kind):
            raise TypeError(f"{part} is {value!r}, but must be {words}.")
