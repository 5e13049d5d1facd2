"""Continue Image: keep one side of an image and let a sampler generate the rest."""

from __future__ import annotations

from math import log
from typing import Any

import torch
import torch.nn.functional as F
from comfy_api.latest import io
from torch import Tensor

from ..models.pictures import cut_strip
from .comfy_runtime import models
from .latents import Latent, Model
from .schema import schema
from .sockets import ARModel
from .widgets import choose

SIDES = {"top": (0, 0.0), "bottom": (0, 1.0), "left": (1, 0.0), "right": (1, 1.0)}  # axis, and position on it


def nearest_grid(model: Model, height: int, width: int) -> tuple[int, int]:
    """The supported grid (rows, cols) closest to an image, first in its aspect ratio and then in its size."""
    side = model.pixels_per_token

    def distance(grid: tuple[int, int]) -> tuple[float, float]:
        taller, wider = log(grid[0] * side / height), log(grid[1] * side / width)
        return round(abs(taller - wider), 3), abs(taller + wider)

    return min(model.grids, key=distance)


def crop_to_fit(image: Tensor, height: int, width: int, place: tuple[float, float]) -> Tensor:
    """Images [B, H, W, 3] scaled to cover height x width pixels, and cropped.

    place (down, across): position of the crop, 0 the start, 1/2 the middle, 1 the end.
    """
    image = cut_strip(image, height, width, place)
    scale = max(height / image.shape[1], width / image.shape[2])
    size = max(height, round(image.shape[1] * scale)), max(width, round(image.shape[2] * scale))
    planes = image.movedim(-1, 1)
    if size != planes.shape[2:]:
        planes = F.interpolate(planes, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (int((have - wanted) * at) for have, wanted, at in zip(size, (height, width), place, strict=True))
    return planes[..., top : top + height, left : left + width].movedim(1, -1).contiguous()


def generation_mask(rows: int, cols: int, side: str, keep: float) -> Tensor:
    """The noise mask [1, 1, rows, cols] (fp32; 1: generate) that keeps whole rows or columns of tokens at a side."""
    axis, end = SIDES[side]
    count = (rows, cols)[axis]
    kept = int(keep * count + 0.5)
    place = torch.arange(count)
    mask = (place < count - kept if end else place >= kept).float()
    return (mask[:, None] if axis == 0 else mask[None, :]).expand(rows, cols)[None, None].contiguous()


class ContinueImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARContinuePicture",
            category="SpecAR/latent",
            search=("outpaint", "extend image", "complete", "inpaint"),
            inputs=[
                ARModel.Input("model"),
                io.Vae.Input("vae"),
                io.Image.Input("image"),
                io.Float.Input("keep", default=0.5, min=0, max=1, step=0.01, round=0.001),
                io.Combo.Input("side", options=list(SIDES), default="top"),
            ],
            outputs=[io.Latent.Output("latent")],
        )

    @classmethod
    def execute(cls, model: models.LoadedModel, vae: Any, image: Tensor, keep: float, side: str) -> io.NodeOutput:
        axis, end = choose("side", side, SIDES)
        rows, cols = nearest_grid(model.model, *image.shape[1:3])
        place = (end, 0.5) if axis == 0 else (0.5, end)
        patch = model.model.pixels_per_token
        samples = vae.encode(crop_to_fit(image[..., :3].float(), rows * patch, cols * patch, place))
        if samples.ndim != 4 or samples.shape[2:] != (rows, cols):
            raise ValueError(
                f"The VAE encodes the image to a latent of shape {list(samples.shape)}, but this model needs "
                f"{rows} x {cols} tokens: they do not belong together. Connect the VAE of Load AR Checkpoint."
            )
        latent: Latent = {"samples": samples, "noise_mask": generation_mask(rows, cols, side, keep)}
        return io.NodeOutput(latent)
