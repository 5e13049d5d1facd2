"""Random views of the pictures, with captions: what both kinds of models learn from."""

import torch
from torch import Tensor

from .captions import Captions
from .data import Pictures, augment
from .loop import autocast
from .settings import BACKGROUNDS, Augmentation, Setting

HELD_OUT_EVERY = 20  # one of so many (picture, background) pairs is never shown


class Views:
    """Draws pictures on backgrounds, and words for them; all randomness is seeded."""

    def __init__(
        self, setting: Setting, augmentation: Augmentation, pictures: Pictures, captions: Captions,
        device: torch.device, seed: int,
    ) -> None:
        self.setting, self.augmentation, self.pictures, self.captions = setting, augmentation, pictures, captions
        self.device = device
        self.rgba = pictures.rgba.to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.mixed = autocast(setting)

    def pairs(self, count: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Numbers of pictures and backgrounds, int64 [count] each; held-out pairs are never drawn otherwise."""
        total = len(self.rgba) * len(BACKGROUNDS)
        draws = torch.randint(total, (64 * count,), generator=self.generator, device=self.device)
        picture, colour = draws // len(BACKGROUNDS), draws % len(BACKGROUNDS)
        kept = (((7 * picture + 3 * colour) % HELD_OUT_EVERY == 0) == held_out).nonzero().flatten()[:count]
        return picture[kept], colour[kept]

    def pixels(self, picture: Tensor, colour: Tensor) -> Tensor:
        """Freshly placed and coloured pictures [count, 3, 128, 128] in [-1, 1]."""
        return augment(self.rgba[picture], colour, self.augmentation, self.generator)

    def words(self, picture: Tensor, colour: Tensor, held_out: bool = False) -> list[list[int]]:
        """Word numbers of a random caption for each; held-out captions are whole."""
        drop = 0.0 if held_out else self.setting.drop_part
        return [
            self.captions.sample(self.pictures.code[p], self.pictures.style[p], c, drop)
            for p, c in zip(picture.tolist(), colour.tolist())
        ]

    def dropped(self, count: int, held_out: bool = False) -> Tensor:
        """Which captions to leave out altogether, for guidance: bool [count]."""
        share = 0.0 if held_out else self.setting.drop_caption
        return torch.rand(count, generator=self.generator, device=self.device) < share
