"""What networks say of images: the features in which sets are compared, and what an image shows."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.tools.training.classifier import FILE, Classifier, labels_for
from comfyui_specar.tools.training.perception import Backbone
from comfyui_specar.tools.training.settings import Setting
from torch import Tensor

FOLDER = Path(__file__).parent / "classifier"
SPACES = ("own", "imagenet")  # the classifier of tools/training/classifier.py; EfficientNet-Lite0 with ImageNet weights


class Spaces:
    """The networks for images of a setting. names: those of SPACES that are used, the second one only if ``imagenet``,
    as it needs packages (see tools/training/perception.py); accuracy: the classifier's, as its file says; checksum: of
    its weights."""

    def __init__(self, setting: Setting, imagenet: bool = True):
        file, self.setting, self.names = FOLDER / setting.name / FILE, setting, SPACES[: 1 + imagenet]
        self.classifier, self.backbone = Classifier.load(file, labels_for(setting)), Backbone() if imagenet else None
        self.accuracy = open_checkpoint(file).metadata["held_out"]
        self.checksum = str(zlib.crc32(file.read_bytes()))

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> dict[str, Tensor]:
        """Features [B, D] (fp32) of pixels [B, 3, H, W] in [-1, 1] in every space, and "shown" [B, 3] (int64): the
        subject, style and background that the classifier sees."""
        found = {"own": self.classifier.features(pixels)}
        found["shown"] = self.classifier.classes(found["own"])
        if self.backbone is not None:
            found["imagenet"] = self.backbone(pixels)
        return found
