"""How GLM-Image reads source images (zai-org/GLM-Image): a vision transformer, whose features become tokens.

It sees an image at half its size, so that a token stands for twice as many pixels a side as a patch has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...device.placed import Placed
from .siglip import WIDEST
from .vit import Block
from .vq import nearest_codes


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the transformer (the defaults are the release's) and of the codebook.

    side: learned positions a side, which are interpolated to an image's patches.
    """

    dim: int = 1536
    layers: int = 40
    heads: int = 16
    patch: int = 16
    side: int = 128
    codes: int = 16384
    code_dim: int = 2048


class SourceEncoder(Placed):
    """Pixels -> tokens. mean, std: of the three colours in training, on the scale 0..1."""

    def __init__(
        self, config: VisionConfig, mean: tuple[float, float, float], std: tuple[float, float, float], operations=nn
    ):
        super().__init__()
        self.config, self.mean, self.std = config, mean, std
        self.patch_embed = operations.Conv2d(3, config.dim, config.patch, stride=config.patch)
        self.pos_embed = nn.Parameter(torch.zeros(config.side**2, config.dim))
        self.blocks = nn.ModuleList(Block(config.dim, config.heads, operations) for _ in range(config.layers))
        self.quant_conv = operations.Conv2d(config.dim, config.code_dim, 1)
        self.codebook = nn.Parameter(torch.zeros(config.codes, config.code_dim))

    def forward(self, image: Tensor) -> Tensor:
        """Tokens [h, w] (int64) of an image [H, W, 3] in 0..1 of whole patches: codes of the nearest direction."""
        vectors = F.normalize(self.quant_conv(self.features(image)).float(), dim=1)
        return nearest_codes(vectors, F.normalize(self.codebook.float(), dim=-1))[0]

    def features(self, image: Tensor) -> Tensor:
        """Features [1, dim, h, w] of an image [H, W, 3] in 0..1."""
        mean, std = (torch.tensor(each, device=self.device) for each in (self.mean, self.std))
        pixels = ((image.to(self.device) - mean) / std).movedim(-1, 0)[None].contiguous()
        x = self.patch_embed(pixels.to(self.pos_embed.dtype))
        grid = x.shape[2:]
        table = self.pos_embed.float().T.unflatten(1, (self.config.side, self.config.side))[None]
        x = (x + F.interpolate(table, grid, mode="bilinear").to(x)).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x.mT.unflatten(2, grid)

    def activation_bytes(self, patches: int) -> int:
        """Rough bytes of the activations while an image of so many patches is read: of a block, or the vectors and the
        codebook in fp32, which are normalised and compared."""
        config = self.config
        block = patches * config.dim * WIDEST * self.pos_embed.element_size()
        return max(block, 4 * config.code_dim * (2 * patches + 3 * config.codes))
