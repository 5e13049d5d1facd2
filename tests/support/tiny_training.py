"""A training setting small enough for a test, and images to train on."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from comfyui_specar.models.networks.vq import VQConfig
from comfyui_specar.tools.training.data import Images
from comfyui_specar.tools.training.portrait_styles import PORTRAIT_STYLES
from comfyui_specar.tools.training.portraits import Portraits, portrait
from comfyui_specar.tools.training.settings import EMOJI, STYLES
from PIL import Image

CONCEPTS = {
    "2764": {"label": "red heart", "tags": ["emotion", "love"]},
    "1f436": {"label": "dog face", "tags": ["pet", "puppy"]},
    "1f431": {"label": "cat face", "tags": ["pet", "kitten"]},
}
SETTING = replace(
    EMOJI,
    compile=False,
    concepts=tuple(CONCEPTS),
    tokenizer=replace(EMOJI.tokenizer, config=VQConfig(16, 4, (1, 1, 1, 1, 1), 32, 32, 1)),
    model=replace(EMOJI.model, dim=64, layers=2, heads=2),
)

DRAWN = replace(SETTING, portraits=0.5, caption_slots=16, views=2)


def square(side: int = 128, half: int = 32) -> torch.Tensor:
    """A white opaque square in the middle of a transparent canvas, [1, 4, side, side]."""
    rgba = torch.zeros(1, 4, side, side, dtype=torch.uint8)
    rgba[:, :, side // 2 - half : side // 2 + half, side // 2 - half : side // 2 + half] = 255
    return rgba


def images() -> Images:
    codes = [code for code in CONCEPTS for _ in STYLES]
    return Images(square(256, 64).repeat(9, 1, 1, 1), codes, [0, 1, 2] * 3, CONCEPTS, [None] * 9)


def some_portraits(count: int) -> list[tuple[list[str], dict[str, str]]]:
    """Words and options of ``count`` portraits of every style, the styles in turn."""
    rng = random.Random(0)
    return [portrait(style, rng) for _ in range(count) for style in PORTRAIT_STYLES]


def with_portraits(folder: Path) -> Images:
    """Images with 360 portraits, of which the i-th is plain red of i // 2."""
    files, words = [], []
    for i, (said, _) in enumerate(some_portraits(72)):
        file = io.BytesIO()
        Image.new("RGBA", (256, 256), (i // 2, 0, 0, 255)).save(file, "WEBP", lossless=True)
        files.append(file.getvalue())
        words.append(said)
    joined = np.frombuffer(b"".join(files), np.uint8)
    ends = np.cumsum([len(file) for file in files])
    np.savez(folder / "portraits-0000.npz", files=joined, ends=ends, words=json.dumps(words))
    return replace(images(), portraits=Portraits(folder, 360))
