"""SigLIP's vision transformer (Zhai et al., arXiv:2303.15343) as Janus-Pro (arXiv:2501.17811) reads images with it.

An image of side * side pixels becomes one vector per patch, in the width of the language model that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .answering import Answering
from .vit import Block

WIDEST = 24  # numbers of a tower's width per patch that are alive at once in a block, rounded up


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of a tower (the defaults are Janus-Pro's, siglip_large_patch16_384) and of the language model behind it.

    patches: of an image, a square number; words: rows of the language model's head.
    """

    dim: int = 1024
    layers: int = 24
    heads: int = 16
    patch: int = 16
    patches: int = 576
    width: int = 2048
    words: int = 102400


class VisionTower(nn.Module):
    """Pixels [B, 3, S, S] in -1..1 -> features [B, patches, dim] of all patches in raster order."""

    def __init__(self, config: VisionConfig, operations=nn):
        super().__init__()
        self.patch_embed = operations.Conv2d(3, config.dim, config.patch, stride=config.patch)
        self.pos_embed = nn.Parameter(torch.zeros(config.patches, config.dim))
        self.blocks = nn.ModuleList(Block(config.dim, config.heads, operations) for _ in range(config.layers))
        self.norm = operations.LayerNorm(config.dim, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels.to(self.pos_embed.dtype)).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Aligner(nn.Module):
    """Features [B, n, dim] of a tower -> embeddings [B, n, width] that a language model reads like words."""

    def __init__(self, dim: int, width: int, operations=nn):
        super().__init__()
        self.fc1 = operations.Linear(dim, width)
        self.fc2 = operations.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features)))


class Reading(Answering):
    """What a language model reads images and answers with: tower, aligner, and the head of its words."""

    def __init__(self, config: VisionConfig, operations=nn):
        super().__init__(config.width, config.words, operations)
        self.config = config
        self.tower = VisionTower(config, operations)
        self.aligner = Aligner(config.dim, config.width, operations)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embeddings [B, patches, width] of images, pixels [B, 3, S, S] in -1..1."""
        return self.aligner(self.tower(pixels.to(self.device)))

    def activation_bytes(self, images: int) -> int:
        """Rough bytes of the activations while so many images are read together."""
        return images * self.config.patches * self.config.dim * WIDEST * self.tower.pos_embed.element_size()
