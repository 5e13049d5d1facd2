"""Generates the contact sheet of an exported model and measures how often backgrounds match the prompt."""

import logging
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ... import api
from ...models.continuous_model import ContinuousBase
from .settings import BACKGROUNDS, COMMON_CONCEPTS, IMAGE_SIZE, STYLES

log = logging.getLogger(__name__)

COLUMNS, COUNT = 8, 64
BORDER = IMAGE_SIZE // 21


def prompts() -> list[tuple[str, str]]:
    """64 (prompt, background colour): every common concept once, then some in other styles and colours."""
    names, colours = list(COMMON_CONCEPTS.values()), list(BACKGROUNDS)
    chosen = []
    for i in range(COUNT):
        lap, index = divmod(i, len(names))
        colour = colours[(i + 9 * lap + 6) % len(colours)]  # rarely the colour of the object
        article = "an" if colour == "orange" else "a"
        chosen.append((f"{names[index]}, {STYLES[(i + lap) % len(STYLES)]}, on {article} {colour} background", colour))
    return chosen


def border_colour(pixels: Tensor) -> str:
    """Name of the background colour nearest to the median of the outer BORDER pixels; pixels [H, W, 3] in 0..1."""
    inner = torch.zeros(pixels.shape[:2], dtype=torch.bool)
    inner[BORDER:-BORDER, BORDER:-BORDER] = True
    median = (pixels[~inner] * 255.0).median(dim=0).values
    palette = torch.tensor(list(BACKGROUNDS.values()), dtype=torch.float32)
    return list(BACKGROUNDS)[int((palette - median).norm(dim=1).argmin())]


def draw(folder: Path, file: Path, method=None, **sampling) -> float:
    """Samples all prompts (seed = position in the sheet) and writes the sheet; returns the background accuracy.

    method: default: next token.
    """
    model, decoder = api.load_model(folder), api.load_image_decoder(folder)
    continuous = isinstance(model, ContinuousBase)
    method = method or (api.methods.ContinuousNextToken() if continuous else api.methods.NextToken())
    tiles, right = [], 0
    for first in range(0, COUNT, COLUMNS):  # all prompts have three words, so that a row can be a batch
        row = prompts()[first : first + COLUMNS]
        features = torch.cat([model.encode_prompt(prompt)[0][0] for prompt, _ in row])
        conditioning = model.encode_features(features)
        out = api.sample(model, conditioning, method, seed=first, batch_size=len(row), **sampling)
        for pixels, (_, colour) in zip(decoder.decode(out.latent).cpu(), row, strict=True):
            right += border_colour(pixels) == colour
            tiles.append((pixels * 255.0).round().byte().numpy())
    rows = [np.concatenate(tiles[i : i + COLUMNS], axis=1) for i in range(0, COUNT, COLUMNS)]
    Image.fromarray(np.concatenate(rows)).save(file, quality=82)
    log.info("%s: background matches the prompt in %d of %d images", file, right, COUNT)
    return right / COUNT
