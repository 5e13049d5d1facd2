"""Generates the contact sheet of an exported model and measures how often backgrounds match the prompt."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ... import api
from ...models.continuous_model import ContinuousBase
from .captions import on_background
from .portrait_styles import NOUNS, PORTRAIT_STYLES
from .portraits import portrait
from .settings import BACKGROUNDS, COMMON_CONCEPTS, IMAGE_SIZE, STYLES

log = logging.getLogger(__name__)

COLUMNS, COUNT = 8, 64
BORDER = IMAGE_SIZE // 21
DETAILS = {"person", "beard", "moustache", "goatee", "earrings", "antenna", "horns", "bulb"}  # not in short prompts


def prompts() -> list[tuple[str, str]]:
    """64 (prompt, background colour): every common concept once, then some in other styles and colours."""
    names, colours = list(COMMON_CONCEPTS.values()), list(BACKGROUNDS)
    chosen = []
    for i in range(COUNT):
        lap, index = divmod(i, len(names))
        colour = colours[(i + 9 * lap + 6) % len(colours)]  # rarely the colour of the object
        chosen.append((f"{names[index]}, {STYLES[(i + lap) % len(STYLES)]}, {on_background(colour)}", colour))
    return chosen


def portrait_prompt(words: Sequence[str], background: str) -> str:
    """The words of a portrait as a prompt that is read as these words, each colour before a noun of its own."""
    colours = dict(word.split("_") for word in words if "_" in word)
    parts, nouns = [], [word for word in words if "_" not in word]
    for place, colour in colours.items():
        worn = next((word for word in nouns if NOUNS.get(word) == place), place)
        nouns = [word for word in nouns if word != worn]
        parts.append(f"{colour} {worn}")
    return ", ".join([*nouns, *parts, on_background(background)])


def first_words(words: Sequence[str]) -> list[str]:
    """Of a portrait's words those that say most: style, hair or hat (or a robot's shape and colour), glasses, and
    expression."""
    unsaid = {"clothes", "skin", *(["hair"] if "bald" in words else [])}  # a bald person's is a beard
    first = (word for word in words if word not in DETAILS and NOUNS.get(word) != "clothes")
    return [word for word in first if word.partition("_")[0] not in unsaid]


def portrait_prompts() -> list[tuple[str, str]]:
    """64 (prompt, background colour): 48 portraits by their first words, the styles in turn, and 16 emoji."""
    rng, styles, colours = random.Random("contact sheet"), list(PORTRAIT_STYLES), list(BACKGROUNDS)
    chosen = []
    for i in range(COUNT - 2 * COLUMNS):
        words = first_words(portrait(styles[i % len(styles)], rng)[0])
        colour = rng.choice([each for each in colours if not {each, f"hair_{each}"}.intersection(words)])
        chosen.append((portrait_prompt(words, colour), colour))
    return chosen + prompts()[: 2 * COLUMNS]


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
    portraits = "person" in getattr(model.prompt_encoder, "words", ())
    asked = portrait_prompts() if portraits else prompts()
    lengths: dict[int, list[int]] = {}  # of prompts with as many words, eight can be a batch
    features = [model.encode_prompt(prompt)[0][0] for prompt, _ in asked]
    for i, each in enumerate(features):
        lengths.setdefault(each.shape[1], []).append(i)
    tiles, right = [np.empty(0)] * COUNT, 0
    for same in lengths.values():
        for first in range(0, len(same), COLUMNS):
            row = same[first : first + COLUMNS]
            conditioning = model.encode_features(torch.cat([features[i] for i in row]))
            out = api.sample(model, conditioning, method, seed=row[0], batch_size=len(row), **sampling)
            for i, pixels in zip(row, decoder.decode(out.latent).cpu(), strict=True):
                right += border_colour(pixels) == asked[i][1]
                tiles[i] = (pixels * 255.0).round().byte().numpy()
    rows = [np.concatenate(tiles[i : i + COLUMNS], axis=1) for i in range(0, COUNT, COLUMNS)]
    Image.fromarray(np.concatenate(rows)).save(file, quality=82)
    log.info("%s: background matches the prompt in %d of %d images", file, right, COUNT)
    return right / COUNT
