"""A training setting small enough for a test, and images to train on."""

from dataclasses import replace

import torch
from comfyui_specar.models.networks.vq import VQConfig
from comfyui_specar.tools.training.data import Images
from comfyui_specar.tools.training.settings import CPU, STYLES

CONCEPTS = {
    "2764": {"label": "red heart", "tags": ["emotion", "love"]},
    "1f436": {"label": "dog face", "tags": ["pet", "puppy"]},
    "1f431": {"label": "cat face", "tags": ["pet", "kitten"]},
}
SETTING = replace(
    CPU,
    compile=False,
    concepts=tuple(CONCEPTS),
    tokenizer=replace(CPU.tokenizer, config=VQConfig(16, 4, (1, 1, 1, 1, 1), 32, 32, 1)),
    model=replace(CPU.model, dim=64, layers=2, heads=2),
)


def square(side: int = 128, half: int = 32) -> torch.Tensor:
    """A white opaque square in the middle of a transparent canvas, [1, 4, side, side]."""
    rgba = torch.zeros(1, 4, side, side, dtype=torch.uint8)
    rgba[:, :, side // 2 - half : side // 2 + half, side // 2 - half : side // 2 + half] = 255
    return rgba


def images() -> Images:
    codes = [code for code in CONCEPTS for _ in STYLES]
    return Images(square(256, 64).repeat(9, 1, 1, 1), codes, [0, 1, 2] * 3, CONCEPTS, [None] * 9)
