"""Random augmented images with captions: the training data of both kinds of models."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .captions import Captions, View
from .data import AS_DRAWN, Images, augment
from .settings import BACKGROUNDS, PLACES, Augmentation, Setting

HELD_OUT_EVERY = 20  # one (image, background) pair in so many is held out


class Scenes(NamedTuple):
    """Content of a batch, int64 [B] each: image, background, and place (0 = large; AS_DRAWN).

    Images are numbered: emoji in their own colours, recoloured ones, portraits. Portraits are not moved: a pixel to the
    side exchanges most tokens of a face, and a small model has to learn each.
    """

    image: Tensor
    background: Tensor
    place: Tensor


class Views:
    """Places images on backgrounds, encodes them, and generates captions; all randomness is seeded.

    Every view is used once. Encoding takes up to a third of a step of a small model, but models that see the same
    tokens four times overfit.
    """

    def __init__(
        self,
        setting: Setting,
        augmentation: Augmentation,
        images: Images,
        captions: Captions,
        device: torch.device,
        encode: Callable[[Tensor], tuple[Tensor, ...]],
        seed: int,
    ) -> None:
        """encode: pixels [B, 3, H, W] in [-1, 1] -> the training targets, tensors [B, ...]."""
        self.setting, self.augmentation, self.captions = setting, augmentation, captions
        self.own = len(images.code)
        self.images = images + images.recoloured()
        self.emoji = len(self.images.code)
        self.rgba = self.images.rgba.to(device)
        self.device, self.encode = device, encode
        self.generator = torch.Generator(device).manual_seed(seed)

    def scenes(self, count: int, held_out: bool = False) -> Scenes:
        """Random scenes. Held-out pairs of image and background are sampled only if ``held_out``, large and in the
        image's own colours.
        """
        setting, coloured = self.setting, self.emoji - self.own
        candidates = 64 * count
        recoloured, placed = (
            self._share(candidates, 0.0 if held_out else share)
            for share in (setting.recoloured if coloured else 0.0, setting.placed)
        )
        image = torch.where(
            recoloured, self.own + self._integers(max(coloured, 1), candidates), self._integers(self.own, candidates)
        )
        background = self._integers(len(BACKGROUNDS), candidates)
        place = torch.where(placed, 1 + self._integers(len(PLACES), candidates), 0)
        if portraits := self.images.portraits:
            drawn = self._share(candidates, setting.portraits)
            image = torch.where(drawn, self.emoji + self._integers(len(portraits), candidates), image)
            place = torch.where(drawn, AS_DRAWN, place)
        kept = (((7 * image + 3 * background) % HELD_OUT_EVERY == 0) == held_out).nonzero().flatten()[:count]
        return Scenes(image[kept], background[kept], place[kept])

    def pixels(self, scenes: Scenes) -> Tensor:
        """Placed images [B, 3, 256, 256] in [-1, 1]."""
        rgba, drawn = self.rgba[scenes.image % self.emoji], scenes.image >= self.emoji
        if self.images.portraits and drawn.any():
            rgba[drawn] = self.images.portraits.rgba(scenes.image[drawn] - self.emoji).to(self.device)
        return augment(rgba, scenes.background, self.augmentation, self.generator, scenes.place)

    @torch.no_grad()
    def encoded(self, count: int, held_out: bool = False) -> tuple[Scenes, list[Tensor]]:
        """New scenes and their encodings."""
        scenes, parts = self.scenes(count, held_out), []
        for few in zip(*(values.split(32) for values in scenes), strict=True):
            pixels = self.pixels(Scenes(*few))
            parts.append(self.encode(pixels.contiguous(memory_format=torch.channels_last)))
        return scenes, [torch.cat(part) for part in zip(*parts, strict=True)]

    def words(self, scenes: Scenes, held_out: bool = False) -> list[list[int]]:
        """Word numbers of a random caption for each scene; held-out captions are complete."""
        drop = 0.0 if held_out else self.setting.drop_part
        return [self.captions.of(view, drop) for view in self.views(scenes)]

    def views(self, scenes: Scenes) -> list[View]:
        """What captions say of the scenes."""
        return [self._view(*scene) for scene in zip(*(values.tolist() for values in scenes), strict=True)]

    def _view(self, image: int, background: int, place: int) -> View:
        shown = self.images
        if shown.portraits and image >= self.emoji:
            return View(background, words=shown.portraits.words[image - self.emoji])
        return View(background, shown.code[image], shown.style[image], shown.colour[image], place)

    def dropped(self, count: int, held_out: bool = False) -> Tensor:
        """Which captions to drop, for guidance: bool [count]."""
        return self._share(count, 0.0 if held_out else self.setting.drop_caption)

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def _share(self, count: int, share: float) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device) < share
