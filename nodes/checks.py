"""Validation of what ComfyUI does not check: the values of links, and what an API client sends in place of a link.
Types of links, missing inputs and the values of widgets it checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from comfy_api.latest import io
from torch import Tensor

from ..limits.printable import make_printable
from ..samplers.trace import Trace
from .chosen_method import ChosenMethod
from .comfy_runtime import models
from .rules import ChosenRule

SHORT = 60  # characters of a value in a message
SOCKETS = {  # private sockets -> type of their values, and the node that makes them
    "AR_MODEL": (models.LoadedModel, "Load AR Checkpoint"),
    "AR_DRAFTER": (models.LoadedDrafter, "Load AR Drafter"),
    "AR_RULE": (ChosenRule, "a rule node"),
    "AR_TRACE": (Trace, "an AR sampler or Load Trace"),
    "AR_METHOD": (ChosenMethod, "Find Fastest"),
}


def checked(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """The node class with a check of its inputs before each run. Raises ValueError that names the first invalid one.
    Errors are made printable, as ComfyUI logs them."""
    execute = node.execute.__func__
    if hasattr(execute, "__wrapped__"):
        return node

    @wraps(execute)
    def run(cls: type[io.ComfyNode], **inputs: Any) -> io.NodeOutput:
        try:
            return execute(cls, **checked_inputs(node.SCHEMA or node.GET_SCHEMA(), inputs))
        except Exception as error:
            make_printable(error)
            raise

    node.execute = classmethod(run)
    return node


def checked_inputs(schema: io.Schema, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, without optional ones that are None (as API clients may send), and with numpy scalars, which other
    packs' nodes may output, converted to Python's, and without removed widgets (see ``removed`` of
    widgets.py). Raises ValueError."""
    given: dict[str, Any] = {}
    for wanted in schema.inputs:
        if wanted.optional and inputs.get(wanted.id) is None:
            continue
        value = inputs[wanted.id]
        if isinstance(value, np.generic):
            value = value.item()
        if problem := problem_of(wanted, value):
            raise ValueError(f"{wanted.id} {problem}")
        if not wanted.extra_dict.get("hidden"):
            given[wanted.id] = value
        elif value != wanted.default:
            raise ValueError(
                f"{wanted.id} is {show(value)}, but was removed, as no measurement recommended it. Recreate the node, "
                f"or set {wanted.id} to {wanted.default!r}."
            )
    return given


def problem_of(wanted: io.Input, value: Any) -> str | None:
    """Error message for an input's value, without the input's name in front; None if the value is valid."""
    kind = wanted.io_type
    if kind in SOCKETS:
        made, maker = SOCKETS[kind]
        return None if isinstance(value, made) else f"is {show(value)}, but must be connected to {maker}."
    return CHECKS[kind](wanted, value) if kind in CHECKS else None


def show(value: Any) -> str:
    """A short description of a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, (str, int, float)):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**SHORT else "a number with too many digits"
    else:
        text = f"of type {type(value).__name__}"
    return text if len(text) <= SHORT else text[:SHORT] + "..."


def available(choice: Any, find: Callable[[str], Any]) -> bool | str:
    """True if a loader can find the file of this choice, else the error message. Called before a prompt is queued,
    instead of ComfyUI's "Value not in list".

    find: raises FileNotFoundError or ValueError. choice None: comes from a link and is not known yet, or is missing
    (the list has no files), which ComfyUI reports itself.
    """
    if choice is None:
        return True
    if not isinstance(choice, str):
        return f"{show(choice)} is not the name of a file or folder."
    try:
        find(choice)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return True


def _number(wanted: io.Input, value: Any) -> str | None:
    whole = isinstance(wanted, io.Int.Input)
    sound = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if sound and wanted.min <= value <= wanted.max:
        return None
    return f"is {show(value)}, but must be {'an integer' if whole else 'a number'} from {wanted.min} to {wanted.max}."


def _latent(wanted: io.Input, value: Any) -> str | None:
    samples = value.get("samples") if isinstance(value, dict) else None
    if getattr(samples, "is_nested", False):
        return "holds several latents (for example video and audio). Use Empty AR Latent or VAE Encode."
    if samples is None or not isinstance(samples, Tensor):  # the first half is for the checker of types
        return f"is {show(value)}, but must be a LATENT (Empty AR Latent or VAE Encode)."
    problem = flaw(samples, (4,)) or (None if samples.is_floating_point() else f"holds {show(samples)}, not floats.")
    if problem:
        return f"{problem} A LATENT is [images, channels, rows, columns]: use Empty AR Latent or VAE Encode."
    if value.get("noise_mask") is not None:
        problem = flaw(value["noise_mask"], (2, 3, 4))
        return problem and f"has a noise mask that {problem} Recreate the mask (Set Latent Noise Mask)."
    return None


def _conditioning(wanted: io.Input, value: Any) -> str | None:
    if not isinstance(value, list):
        return f"is {show(value)}, but must be a CONDITIONING (CLIP Text Encode with the model's own CLIP)."
    for entry in value:
        if not (
            isinstance(entry, (list, tuple))
            and len(entry) == 2
            and isinstance(entry[0], Tensor)
            and isinstance(entry[1], dict)
            and isinstance(entry[1].get("ar", {}), dict)
        ):
            return "is a CONDITIONING not made by CLIP Text Encode. Connect one made with the model's own CLIP."
        if entry[0].ndim != 3 and "ar" in entry[1]:
            return f"is a CONDITIONING of shape {list(entry[0].shape)}, not [prompts, words, values]. Recreate it."
        if entry[0].numel() and not entry[0].isfinite().all():
            return "is a CONDITIONING with NaN or infinite values. Recreate it with CLIP Text Encode."
    return None


def _image(wanted: io.Input, value: Any) -> str | None:
    problem = flaw(value, (4,))
    if not problem and (not value.is_floating_point() or value.shape[-1] < 3):
        problem = f"is {show(value)}."
    return problem and f"{problem} An IMAGE is [images, height, width, 3] with values from 0 to 1 (VAE Decode)."


def _mask(wanted: io.Input, value: Any) -> str | None:
    problem = flaw(value, (2, 3, 4))
    return problem and f"{problem} A MASK is [masks, height, width] with values from 0 to 1."


def _vae(wanted: io.Input, value: Any) -> str | None:
    sound = hasattr(value, "encode") and hasattr(value, "decode")
    return None if sound else f"is {show(value)}, but must be a VAE, from Load AR Checkpoint."


def flaw(value: Any, dimensions: tuple[int, ...]) -> str | None:
    """Error message for a tensor with another number of dimensions, without elements, or with NaN; None if valid."""
    if not isinstance(value, Tensor) or value.ndim not in dimensions:
        return f"is {show(value)}."
    if not value.numel():
        return f"is empty: {show(value)}."
    return None if value.isfinite().all() else "holds NaN or infinite values."


CHECKS: dict[str, Callable[[io.Input, Any], str | None]] = {
    "INT": _number,
    "FLOAT": _number,
    "LATENT": _latent,
    "CONDITIONING": _conditioning,
    "IMAGE": _image,
    "MASK": _mask,
    "VAE": _vae,
}
