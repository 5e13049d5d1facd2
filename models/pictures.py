"""Images that prompts are about, scaled as their models' authors scale them: in 8 bits, mostly by Pillow."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

LONG = 8  # times as long as what is kept of it: an image that is longer is cut before it is scaled, ...
AROUND = 4  # ... with as many pixels beside that as the bicubic filter reads


def resize(image: Tensor, height: int, width: int, by: str = "bicubic") -> Tensor:
    """An image [H, W, 3] in 0..1 as one of height x width pixels (fp32, CPU): of 8 bits, by Pillow's filter of that
    name, which smooths what becomes smaller."""
    from torchvision.transforms import InterpolationMode, functional

    return _pixels(functional.resize(_picture(image), [height, width], InterpolationMode(by)))


def resize_by_torch(image: Tensor, height: int, width: int) -> Tensor:
    """The same by torchvision's bicubic filter for tensors, as transformers' newer image processors do it."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    size = [height, width]
    resized = functional.resize(_levels(image), size, InterpolationMode.BICUBIC, antialias=True)
    return resized.movedim(0, -1).float() / 255


def scale_to_cover(image: Tensor, height: int, width: int) -> Tensor:
    """An image [H, W, 3] in 0..1 scaled to cover height x width pixels, whose middle of that size is kept (fp32, CPU).

    It is halved by averages while it stays large enough, then scaled by the bicubic filter.
    """
    from torchvision.transforms import InterpolationMode, functional

    picture = _picture(cut_strip(image, height, width))
    while picture.width >= 2 * width and picture.height >= 2 * height:
        picture = functional.resize(picture, [picture.height // 2, picture.width // 2], InterpolationMode.BOX)
    scale = max(width / picture.width, height / picture.height)
    size = [round(picture.height * scale), round(picture.width * scale)]
    picture = functional.resize(picture, size, InterpolationMode.BICUBIC)
    top, left = (picture.height - height) // 2, (picture.width - width) // 2
    return _pixels(functional.crop(picture, top, left, height, width))


def cut_strip(image: Tensor, height: int, width: int, place: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """Images [..., H, W, 3] without what is far from the part of height x width pixels that is kept of them when they
    are scaled to cover it: of a strip of 1 x 800 pixels all would become thousands of times as large.

    place (down, across): position of the part, 0 the start, 1/2 the middle, 1 the end.
    """
    scale = max(height / image.shape[-3], width / image.shape[-2])
    for axis, wanted, at in ((-3, height, place[0]), (-2, width, place[1])):
        length, most = image.shape[axis], ceil(LONG * wanted / scale) + AROUND
        most += (length - most) % 2  # so that the middle stays the middle
        if most < length:
            image = image.narrow(axis, int((length - most) * at), most)
    return image


def _picture(image: Tensor) -> Any:
    """The picture of Pillow: torchvision's own filters round differently."""
    from torchvision.transforms import functional

    return functional.to_pil_image(_levels(image))


def _levels(image: Tensor) -> Tensor:
    """An image [H, W, 3] in 0..1 in 8 bits, [3, H, W]."""
    return (image[..., :3].float().clamp(0, 1) * 255).round().to("cpu", torch.uint8).movedim(-1, 0)


def _pixels(picture: Any) -> Tensor:
    from torchvision.transforms import functional

    return functional.pil_to_tensor(picture).movedim(0, -1).float() / 255
