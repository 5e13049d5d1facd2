"""Previews of a run at little cost: the colours of its tokens, or decoded images if time allows.

Tokens are read from the device, which synchronises with it, only if a preview is due and within its time budget.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...models.continuous_model import ContinuousBase
from ...models.discrete_model import DiscreteModel
from ...models.image_decoder import Autoencoder
from ...models.latents import typical_latents
from ...reports.timeline_frames import UNDRAWN
from ...samplers.contract import Sketch

log = logging.getLogger(__name__)

SECONDS = 0.25  # minimum interval between two previews ...
SHARE = 0.02  # ... and maximum fraction of the run's time for them and the progress bar
DIMMED = 0.4  # opacity of guesses over the grey
COARSE = 4  # pixels per token side of colour-only previews; ComfyUI enlarges them
PATCH = 3  # tokens per side of an area of one latent, whose colour is measured
RIDGE = 0.01  # regularisation: keeps directions with little data near the mean colour


Sketcher = Callable[[Any], Sketch]  # of a sampler's progress


@dataclass
class Palette:
    """Linear map from a token's latent to its colour: weight [C + 1, 3], for C channels and a 1, to RGB in 0..1.

    pace: seconds of decoding per token, as last measured.
    """

    weight: Tensor
    pace: float

    def colours(self, latent: Tensor) -> Tensor:
        """Mean colours [h, w, 3] (fp32 in 0..1) of the tokens of a latent [1, C, h, w]."""
        values = latent[0].movedim(0, -1).float().cpu()
        return (values @ self.weight[:-1] + self.weight[-1]).clamp(0, 1)


def areas(channels: int) -> int:
    """Areas per side of the image that a palette is fitted on: enough latents for C channels."""
    return min(16, max(6, math.ceil(math.sqrt(2 * channels))))


def measured_tokens(channels: int) -> int:
    """Tokens of that image."""
    return (PATCH * areas(channels)) ** 2


@torch.inference_mode()
def measure_palette(decoder: Autoencoder, model: DiscreteModel | ContinuousBase) -> Palette:
    """Decode one image of areas with one latent each, and fit a linear map from latents to their mean colours."""
    began, side = time.perf_counter(), areas(decoder.channels)
    latents = typical_latents(model, side**2)
    image = latents.T.unflatten(1, (side, side))[None]
    image = image.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    decoder.decode(image[..., :PATCH, :PATCH]).cpu()  # warm-up, so that it is not measured
    warm = time.perf_counter()
    pixels = decoder.decode(image).movedim(-1, 1).cpu()
    pace = (time.perf_counter() - warm) / (PATCH * side) ** 2
    colours = F.avg_pool2d(pixels, PATCH * decoder.factor)[0].flatten(1).T.double()
    known = torch.cat((latents, torch.ones(len(latents), 1)), dim=1).double()
    moments = known.T @ known
    penalty = torch.full((len(moments),), RIDGE * float(moments.diagonal()[:-1].mean()), dtype=torch.float64)
    penalty[-1] = 0
    weight = torch.linalg.solve(moments + penalty.diag(), known.T @ colours).float()
    log.info("Measured the preview colours in %.2f s, once for this image decoder.", time.perf_counter() - began)
    return Palette(weight, pace)


class Previews:
    """The first image of a run so far, guesses dimmed, the rest grey: at most four times a second and for 2 % of the
    run's time.

    If time allows it is decoded, with guesses; tokens sampled or guessed since then are added as colours. decoder: None
    for colours alone. size: longest side in pixels. The time budget is exceeded by one preview at most, and by the one
    of the finished image. spent: seconds so far, to which the callback adds the time of sending previews. unfinished:
    is what was shown last, if anything, less than the finished image. longest: longer side in pixels of what was shown,
    to be enlarged to: that of the finished image, or ``size`` if that is smaller.
    """

    def __init__(self, sketch: Sketcher, palette: Palette, decoder: Autoencoder | None, factor: int, size: int):
        self.sketch, self.palette, self.decoder, self.factor, self.size = sketch, palette, decoder, factor, size
        self.decoded: Image.Image | None = None  # the last decoded image ...
        self.seen: Tensor | None = None  # ... and which decided tokens [h, w] (bool) it shows
        self.began = self.last = time.perf_counter()
        self.spent, self.cost = 0.0, 0.0  # cost: seconds of the last colour preview
        self.unfinished, self.longest = True, size

    def __call__(self, progress: Any) -> Image.Image | None:
        """The preview, if one is due."""
        now = time.perf_counter()
        left = SHARE * (now - self.began) - self.spent
        whole = self.decoder is not None and left >= self.palette.pace * progress.length
        if now - self.last < SECONDS or not (whole or left >= self.cost):
            return None
        self.last = now
        image = self._show(progress, whole)
        cost = time.perf_counter() - now
        self.spent += cost
        if not whole:
            self.cost = cost
        return image

    def show_finished(self, progress: Any) -> Image.Image:
        """The preview of the complete image, decoded if there is a decoder, whatever was spent: ComfyUI leaves the last
        one on the node, beside the image itself."""
        return self._show(progress, self.decoder is not None)

    def _show(self, progress: Any, decode: bool) -> Image.Image:
        sketch = self.sketch(progress)
        decoded = decode or self.decoder is None
        self.unfinished = not (decoded and bool(sketch.known.all()))
        self.longest = min(self.size, self.factor * max(sketch.known.shape))
        if decode:
            self._decode(sketch)
        return self._rendered(sketch, decode)

    def _size(self, known: Tensor) -> tuple[int, int]:
        """Width and height of the preview."""
        most = self.factor if self.decoded else min(self.factor, COARSE)
        scale = max(1, min(most, self.size // max(known.shape)))
        return known.shape[1] * scale, known.shape[0] * scale

    def _decode(self, sketch: Sketch) -> None:
        assert self.decoder is not None, "the caller decodes only if there is a decoder"
        began = time.perf_counter()
        pixels = (self.decoder.decode(sketch.latent)[0] * 255).round().byte().cpu().numpy()
        self.palette.pace = (time.perf_counter() - began) / sketch.known.numel()
        self.decoded = image = Image.fromarray(pixels)
        self.decoded, self.seen = image.resize(self._size(sketch.known)), sketch.known

    def _rendered(self, sketch: Sketch, decoded: bool) -> Image.Image:
        """The preview. decoded: whether this sketch was just decoded."""
        size, strength = self._size(sketch.known), sketch.known + DIMMED * sketch.guessed
        image = Image.new("RGB", size, UNDRAWN)
        if decoded:
            image.paste(self.decoded, mask=stencil(strength, size))
            return image
        seen = torch.zeros_like(sketch.known) if self.seen is None else self.seen
        if bool((strength[~seen] > 0).any()):
            colours = Image.fromarray((self.palette.colours(sketch.latent) * 255).round().byte().numpy())
            image.paste(colours.resize(size, Image.Resampling.BILINEAR), mask=stencil(strength, size))
        if self.decoded is not None:
            image.paste(self.decoded, mask=stencil(seen, size))
        return image


def stencil(strength: Tensor, size: tuple[int, int]) -> Image.Image:
    """A mask for an image (width, height) with the opacity of each token's pixels, strength [h, w] in 0..1."""
    opaque = (strength.float() * 255).round().byte().numpy()
    return Image.fromarray(opaque).resize(size, Image.Resampling.NEAREST)
