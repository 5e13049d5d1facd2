"""Random views of the images, with captions: what both kinds of models learn from."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .captions import Captions
from .data import Images, augment
from .settings import BACKGROUNDS, PLACES, Augmentation, Setting

HELD_OUT_EVERY = 20  # one of so many (image, background) pairs is never shown


class Scenes(NamedTuple):
    """What a batch of images shows, int64 [B] each: an image, its background, and its place (0 = large)."""

    image: Tensor
    background: Tensor
    place: Tensor


class Views:
    """Draws images on backgrounds, encodes them, and finds words for them; all randomness is seeded.

    Every view is shown once. Encoding costs a small model as much as a third of its step, but one that sees the same
    tokens four times learns them by heart.
    """

    def __init__(
        self, setting: Setting, augmentation: Augmentation, images: Images, captions: Captions,
        device: torch.device, encode: Callable[[Tensor], tuple[Tensor, ...]], seed: int,
    ) -> None:
        """encode: pixels [B, 3, H, W] in [-1, 1] -> what is learnt of them, a few tensors [B, ...]."""
        self.setting, self.augmentation, self.captions = setting, augmentation, captions
        self.own = len(images.code)  # the images in their own colours; after them, the recoloured ones
        self.images = images + images.recoloured()
        self.rgba = self.images.rgba.to(device)
        self.device, self.encode = device, encode
        self.generator = torch.Generator(device).manual_seed(seed)

    def scenes(self, count: int, held_out: bool = False) -> Scenes:
        """Random scenes. Held-out pairs of image and background are never drawn otherwise; they are shown large and
        in the image's own colours.
        """
        setting, coloured = self.setting, len(self.images.code) - self.own
        draws = 64 * count
        recoloured, placed = (self._share(draws, 0.0 if held_out else share) for share in
                              (setting.recoloured if coloured else 0.0, setting.placed))
        image = torch.where(recoloured, self.own + self._integers(max(coloured, 1), draws),
                              self._integers(self.own, draws))
        background = self._integers(len(BACKGROUNDS), draws)
        place = torch.where(placed, 1 + self._integers(len(PLACES), draws), 0)
        kept = (((7 * image + 3 * background) % HELD_OUT_EVERY == 0) == held_out).nonzero().flatten()[:count]
        return Scenes(image[kept], background[kept], place[kept])

    def pixels(self, scenes: Scenes) -> Tensor:
        """Freshly placed and coloured images [B, 3, 256, 256] in [-1, 1]."""
        rgba = self.rgba[scenes.image]
        return augment(rgba, scenes.background, self.augmentation, self.generator, scenes.place)

    @torch.no_grad()
    def encoded(self, count: int, held_out: bool = False) -> tuple[Scenes, list[Tensor]]:
        """New scenes and their encodings."""
        scenes, parts = self.scenes(count, held_out), []
        for few in zip(*(values.split(32) for values in scenes)):
            pixels = self.pixels(Scenes(*few))
            parts.append(self.encode(pixels.contiguous(memory_format=torch.channels_last)))
        return scenes, [torch.cat(part) for part in zip(*parts)]

    def words(self, scenes: Scenes, held_out: bool = False) -> list[list[int]]:
        """Word numbers of a random caption for each; held-out captions are whole."""
        drop, shown = 0.0 if held_out else self.setting.drop_part, self.images
        return [
            self.captions.sample(shown.code[p], shown.style[p], background, drop, shown.colour[p], place)
            for p, background, place in zip(*(values.tolist() for values in scenes))
        ]

    def dropped(self, count: int, held_out: bool = False) -> Tensor:
        """Which captions to leave out altogether, for guidance: bool [count]."""
        return self._share(count, 0.0 if held_out else self.setting.drop_caption)

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def _share(self, count: int, share: float) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device) < share
