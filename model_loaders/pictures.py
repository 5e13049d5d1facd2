"""Images that prompts are about, scaled as their models' authors scale them: by Pillow, in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """An image [H, W, 3] in 0..1 as one of height x width pixels (fp32, CPU): of 8 bits, by Pillow's bicubic filter,
    which smooths what becomes smaller."""
    from torchvision.transforms import InterpolationMode, functional

    return _pixels(functional.resize(_picture(image), [height, width], InterpolationMode.BICUBIC))


def covering(image: Tensor, height: int, width: int) -> Tensor:
    """An image [H, W, 3] in 0..1 scaled to cover height x width pixels, whose middle of that size is kept (fp32, CPU).

    It is halved by averages while it stays large enough, then scaled by the bicubic filter.
    """
    from torchvision.transforms import InterpolationMode, functional

    picture = _picture(image)
    while picture.width >= 2 * width and picture.height >= 2 * height:
        picture = functional.resize(picture, [picture.height // 2, picture.width // 2], InterpolationMode.BOX)
    scale = max(width / picture.width, height / picture.height)
    size = [round(picture.height * scale), round(picture.width * scale)]
    picture = functional.resize(picture, size, InterpolationMode.BICUBIC)
    top, left = (picture.height - height) // 2, (picture.width - width) // 2
    return _pixels(functional.crop(picture, top, left, height, width))


def _picture(image: Tensor) -> Any:
    """The picture of Pillow: torchvision's own filters round differently."""
    from torchvision.transforms import functional

    levels = (image[..., :3].float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return functional.to_pil_image(levels.movedim(-1, 0))


def _pixels(picture: Any) -> Tensor:
    from torchvision.transforms import functional

    return functional.pil_to_tensor(picture).movedim(0, -1).float() / 255
