"""Images that prompts are about, scaled as their models' authors scale them: by Pillow, in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """An image [H, W, 3] in 0..1 as one of height x width pixels (fp32, CPU): of 8 bits, by Pillow's bicubic filter,
    which smooths what becomes smaller."""
    from torchvision.transforms import InterpolationMode, functional

    levels = (image[..., :3].float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    picture = functional.to_pil_image(levels.movedim(-1, 0))  # torchvision's own filter rounds differently
    made = functional.resize(picture, [height, width], InterpolationMode.BICUBIC)
    return functional.pil_to_tensor(made).movedim(0, -1).float() / 255
