"""What ComfyUI's nodes may set on a prompt besides its text. AR models read the text alone.

A setting (an area, a strength, a time range ...) is ignored with a notice: the prompt still counts, for all of the
image. A picture or a model (of a ControlNet, of an edited or an inpainted image ...) cannot be ignored, since the image
would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

OWN = "ar"  # the entry of this pack's CLIP
OF_THE_MASK = "set_area_to_bounds"  # says nothing alone
CELL = 8  # pixels for each unit of an area
WORDS = {  # entry of ComfyUI's nodes -> in words
    "area": "area",
    "mask": "mask",
    "mask_strength": "strength",
    "strength": "strength",
    "start_percent": "time range",
    "end_percent": "time range",
    "guidance": "guidance (set cfg on the sampler)",
    "hooks": "hooks (such as a LoRA's)",
    "control": "a ControlNet",
    "cross_attn_controlnet": "a ControlNet's prompt",
    "gligen": "GLIGEN's boxes",
    "unclip_conditioning": "a picture (unCLIP)",
    "clip_vision_output": "a picture (CLIP Vision)",
    "concat_latent_image": "a picture to inpaint or animate",
    "concat_image": "a picture to upscale",
    "reference_latents": "reference pictures",
}


def describe_ignored(entries: Mapping[str, Any], pixels: tuple[int, int]) -> list[str]:
    """The settings of a prompt that change nothing for an image of ``pixels`` (height, width), in words. Those that
    restrict nothing (a strength of 1, an area of the whole image) are left out."""
    found = [name for name, value in entries.items() if name != OWN and not neutral(name, value, pixels)]
    return list(dict.fromkeys(WORDS.get(name, repr(name)) for name in found))


def describe_refused(entries: Mapping[str, Any]) -> str:
    """The first picture or model that comes with a prompt, in words; "" if there is none."""
    return next(
        (
            WORDS.get(name, repr(name))
            for name, value in entries.items()
            if name not in (OWN, "mask") and not plain(value)
        ),
        "",
    )


def plain(value: Any) -> bool:
    """Whether this is a number, a text or nothing, or several of them."""
    return all(map(plain, value)) if isinstance(value, tuple | list) else isinstance(value, int | float | str | None)


def neutral(name: str, value: Any, pixels: tuple[int, int]) -> bool:
    """Whether an entry restricts nothing."""
    if name == "mask":
        return isinstance(value, Tensor) and bool((value >= 1).all())
    if name == "area" and isinstance(value, tuple | list):
        return covers(value, pixels)
    if name in ("strength", "mask_strength"):
        return value == 1
    if name in ("start_percent", "end_percent"):
        return value == (name == "end_percent")
    return name == OF_THE_MASK or value is None or value is False


def covers(area: tuple | list, pixels: tuple[int, int]) -> bool:
    """Whether an area is all of an image of ``pixels`` (height, width): its sides, then its place, as shares or in
    cells."""
    share = area[0] == "percentage"
    numbers = [number * (1 if share else CELL) for number in area[share:]]
    sides, place = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    return not any(place) and all(
        side >= whole for side, whole in zip(sides, (1, 1, 1) if share else pixels, strict=False)
    )
