"""Training data and loss of image autoencoders: random augmented images, and a pixel loss."""

import torch
from torch import Tensor

from .data import Images, augment
from .settings import BACKGROUNDS, PLACES, AutoencoderSetting, Setting

WHOLE_IMAGES_FROM = 0.4  # fraction of the budget after which whole images, whose statistics differ, replace crops


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 + L2 + half the L1 distance of differences of neighbouring pixels (for sharp edges)."""
    error = output - target
    gradients = (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()) * 0.5
    return error.abs().mean() + error.square().mean() + gradients


class Sampler:
    """Random augmented batches, mostly of the chosen concepts."""

    def __init__(self, setting: Setting, cfg: AutoencoderSetting, images: Images, seed: int) -> None:
        self.setting, self.cfg, self.device = setting, cfg, torch.device(setting.device)
        chosen = images.select(setting.concepts)
        coloured = chosen.recoloured()
        self.chosen, self.coloured = chosen.rgba.to(self.device), coloured.rgba.to(self.device)
        self.all = images.rgba.to(self.device) if cfg.other_images else self.chosen
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def _some(self, images: Tensor, count: int) -> Tensor:
        return images[self._integers(len(images), count)]

    def whole(self, count: int, only_chosen: bool = False) -> Tensor:
        """Pixels [count, 3, 256, 256] in [-1, 1]; ``only_chosen``: these concepts, large and in their own colours."""
        shares = (self.cfg.other_images, self.setting.recoloured, self.setting.placed)
        others, coloured, placed = (0, 0, 0) if only_chosen else (self._round(count * share) for share in shares)
        coloured = min(coloured, count - others)
        rgba = torch.cat(
            [
                self._some(self.all, others),
                self._some(self.coloured, coloured),
                self._some(self.chosen, count - others - coloured),
            ]
        )
        places = torch.zeros(count, dtype=torch.int64, device=self.device)
        moved = torch.randperm(count, generator=self.generator, device=self.device)[:placed]
        places[moved] = 1 + self._integers(len(PLACES), placed)
        return augment(rgba, self._integers(len(BACKGROUNDS), count), self.cfg.augmentation, self.generator, places)

    def _round(self, number: float) -> int:
        """Rounds up or down at random, so that fractions are right on average in small batches."""
        return int(number + float(torch.rand((), generator=self.generator, device=self.device)))

    def crops(self, count: int) -> Tensor:
        """Pixels [count, 3, crop, crop] in [-1, 1], two of each image; corners are aligned to the token grid."""
        side, factor = self.cfg.crop, self.cfg.config.factor
        pixels = self.whole(-(-count // 2)).repeat(2, 1, 1, 1)[:count]
        corners = self._integers((pixels.shape[-1] - side) // factor + 1, 2 * count).view(count, 2) * factor
        return torch.stack(
            [p[:, y : y + side, x : x + side] for p, (y, x) in zip(pixels, corners.tolist(), strict=True)]
        )
