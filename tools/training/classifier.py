"""Train the small network that says what an image shows.

A measuring tool of ``python -m tools.benchmarks quality``, not a part of any model: it names the subject, the style and
the background of an image, and its features are one of the spaces in which sets of images are compared. It is trained
on newly composed views of a setting's emoji or, if it has them, portraits, of which one (image, background) pair in
twenty is held out. Training takes a fixed number of steps from a fixed seed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from comfyui_specar.model_loaders.detect import bundled, load_image_decoder
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.tools.training.captions import Captions, View
from comfyui_specar.tools.training.command import command, parsed
from comfyui_specar.tools.training.data import Images, load_images
from comfyui_specar.tools.training.export import half, save
from comfyui_specar.tools.training.loop import Average, autocast, rate, set_rate
from comfyui_specar.tools.training.portrait_styles import HAIR, PORTRAIT_STYLES, ROBOT
from comfyui_specar.tools.training.settings import (
    BACKGROUNDS,
    BUNDLED,
    COMMON_CONCEPTS,
    SETTINGS,
    STYLES,
    Augmentation,
    Setting,
)
from comfyui_specar.tools.training.views import Scenes, Views
from torch import Tensor, nn

log = logging.getLogger(__name__)

Labels = Mapping[str, Sequence[str]]  # "subject", "style", "background" -> their names
EMOJI_LABELS = {"subject": (*COMMON_CONCEPTS.values(),), "style": STYLES, "background": (*BACKGROUNDS,)}
NO_HAIR = "no hair"
PORTRAIT_LABELS = {
    "subject": (*(f"{colour} hair" for colour in HAIR), *(f"{colour} robot" for colour in ROBOT), NO_HAIR),
    "style": (*PORTRAIT_STYLES,),
    "background": (*BACKGROUNDS,),
}
SIDE = 128  # pixels that the network reads
WIDTHS = (24, 48, 80, 128)  # channels at strides 2, 4, 8, 16; the last ones, averaged, are the features
GROUPS = 8
AUGMENTATION = Augmentation(scale=(0.9, 1.08), shift=0.05, colour_jitter=10.0)  # wider than that of the image models
NOISE = 0.1  # most, as a standard deviation of pixels in [-1, 1]
BATCH, LEARNING_RATE, SMOOTHING = 64, 2e-3, 0.05
HELD_OUT_SEED = 10**6
FILE = "classifier.safetensors"


def labels_for(setting: Setting) -> Labels:
    """What the classifier of a setting tells apart."""
    return PORTRAIT_LABELS if setting.portraits else EMOJI_LABELS


class Classifier(nn.Module):
    """A convolutional network with a head for each of ``labels``. Its features are [B, 128]."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels
        self.stem = _layer(3, WIDTHS[0], stride=2)
        self.down = nn.ModuleList(_layer(few, many, stride=2) for few, many in pairwise(WIDTHS))
        self.residual = nn.ModuleList(_layer(width, width) for width in WIDTHS[1:])
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTHS[-1], len(names)) for name, names in labels.items()})

    def features(self, pixels: Tensor) -> Tensor:
        """[B, 128] (fp32) of pixels [B, 3, H, W] in [-1, 1], H and W being multiples of SIDE."""
        factor = pixels.shape[-1] // SIDE
        x = self.stem(F.avg_pool2d(pixels, factor) if factor > 1 else pixels)
        for down, residual in zip(self.down, self.residual, strict=True):
            x = down(x)
            x = x + residual(x)
        return x.float().mean((2, 3))

    def logits(self, features: Tensor) -> list[Tensor]:
        """Of each head, in the order of the labels."""
        return [head(features) for head in self.heads.values()]

    def forward(self, pixels: Tensor) -> list[Tensor]:
        return self.logits(self.features(pixels))

    def classes(self, features: Tensor) -> Tensor:
        """The most likely subject, style and background [B, 3] (int64)."""
        return torch.stack([logits.argmax(1) for logits in self.logits(features)], dim=1)

    @classmethod
    def load(cls, file: Path, labels: Labels) -> Classifier:
        """Raises ValueError for a file that was trained with other labels."""
        checkpoint = open_checkpoint(file)
        if checkpoint.metadata["labels"] != {name: list(names) for name, names in labels.items()}:
            raise ValueError(f"{file} knows other subjects, styles or backgrounds: train it again.")
        model = cls(labels)
        model.load_state_dict({name: tensor.float() for name, tensor in checkpoint.tensors.items()})
        return model.eval().requires_grad_(False)


def _layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(GROUPS, outputs), nn.ReLU())


def views_of(images: Images, setting: Setting, augmentation: Augmentation, seed: int) -> Views:
    """Random views whose encodings are their pixels: of portraits alone, if the setting has them."""
    captions = Captions(setting, images.words)
    chosen, setting = images.select(setting.concepts), replace(setting, portraits=float(setting.portraits > 0))
    return Views(setting, augmentation, chosen, captions, torch.device("cpu"), lambda pixels: (pixels,), seed)


def shown(view: View) -> tuple[str, str, str]:
    """Subject, style and background of a view."""
    background, words = list(BACKGROUNDS)[view.background], view.words
    if view.code:
        return COMMON_CONCEPTS[view.code], STYLES[view.style], background
    if "robot" in words:
        subject = f"{next(word for word in words if word in ROBOT)} robot"
    else:
        hair = (word.removeprefix("hair_") for word in words if word.startswith("hair_"))
        subject = next((f"{colour} hair" for colour in hair), NO_HAIR)
    return subject, words[0], background


def numbered(rows: Iterable[Sequence[str]], labels: Labels) -> Tensor:
    """Names of a subject, a style and a background in each row -> their numbers [B, 3] (int64)."""
    return torch.tensor([[names.index(name) for names, name in zip(labels.values(), row, strict=True)] for row in rows])


def damaged(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Pixels [B, 3, H, W], each image with its own amount of blur and of noise, as decoders leave them."""
    blurred = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    blur, noise = torch.rand(2, len(pixels), 1, 1, 1, generator=generator)
    return pixels.lerp(blurred, blur) + NOISE * noise * torch.randn(pixels.shape, generator=generator)


def train(images: Images, setting: Setting, steps: int) -> Classifier:
    """The averaged network after ``steps`` batches of new views."""
    torch.manual_seed(0)
    labels = labels_for(setting)
    model, mixed = Classifier(labels), autocast(setting)
    average = Average(model, 0.998)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    views, begun = views_of(images, setting, AUGMENTATION, 0), time.monotonic()
    for step in range(steps):
        set_rate([optimizer], LEARNING_RATE, rate(step / steps, step))
        scenes, [pixels] = views.encoded(BATCH)
        wanted = numbered(map(shown, views.views(scenes)), labels)
        with mixed():
            found = model(damaged(pixels, views.generator).contiguous())  # faster than channels last
        losses = [
            F.cross_entropy(logits.float(), right, label_smoothing=SMOOTHING)
            for logits, right in zip(found, wanted.unbind(1), strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        average.update(model, step)
        if (step + 1) % 100 == 0:
            log.info(
                "step %d of %d, %.1f min, losses %s",
                step + 1,
                steps,
                (time.monotonic() - begun) / 60,
                " ".join(f"{float(loss.detach()):.3f}" for loss in losses),
            )
    return average.module


@torch.inference_mode()
def accuracy(model: Classifier, pixels: Iterable[Tensor], wanted: Tensor) -> dict[str, float]:
    """Fraction of right answers of each head, and of images with all of them ("all"). wanted [N, 3] (int64)."""
    right = torch.cat([model.classes(model.features(few)) for few in pixels]) == wanted
    return {
        **dict(zip(model.labels, right.double().mean(0).tolist(), strict=True)),
        "all": float(right.all(1).double().mean()),
    }


def held_out_accuracy(
    model: Classifier, images: Images, setting: Setting, count: int, change: Callable[[Tensor], Tensor] = lambda x: x
) -> dict[str, float]:
    """``accuracy`` on ``count`` views of pairs that were not trained on, augmented as the training views of the image
    models are. change: pixels [B, 3, 256, 256] -> the same after something was done to them."""
    views = views_of(images, setting, setting.model.augmentation, HELD_OUT_SEED)
    scenes = views.scenes(count, held_out=True)
    parts = (change(views.pixels(Scenes(*few))) for few in zip(*(values.split(32) for values in scenes), strict=True))
    return accuracy(model, parts, numbered(map(shown, views.views(scenes)), model.labels))


def decoded(name: str) -> Callable[[Tensor], Tensor]:
    """Pixels [B, 3, H, W] in [-1, 1] as the image decoder of a bundled model shows them at best: encoded and
    decoded."""
    decoder = load_image_decoder(bundled(name))

    def change(pixels: Tensor) -> Tensor:
        shown = decoder.decode(decoder.encode_latent(pixels.permute(0, 2, 3, 1) / 2 + 0.5))
        return shown.permute(0, 3, 1, 2) * 2 - 1

    return change


def main() -> None:
    parser = command("tools.training.classifier", __doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="emoji")
    parser.add_argument("--steps", type=int, default=1600, help=f"batches of {BATCH} views (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=2400, help="held-out views (default: %(default)s)")
    arguments = parsed(parser)
    setting = SETTINGS[arguments.setting]
    images, labels = load_images(arguments.cache, setting.portrait_count), labels_for(setting)
    model = train(images, setting, arguments.steps)
    file, about = arguments.out / FILE, {"labels": labels, "steps": arguments.steps}
    save(file, half(model.state_dict()), about)
    model = Classifier.load(file, labels)  # whose weights were rounded
    found = {"views": held_out_accuracy(model, images, setting, arguments.held_out)}
    for name in (name for name, of in BUNDLED.items() if of == setting):
        found[f"decoded, {name}"] = held_out_accuracy(model, images, setting, arguments.held_out // 5, decoded(name))
    for name, shares in found.items():
        log.info("held out, %s: %s", name, ", ".join(f"{head} {share:.2%}" for head, share in shares.items()))
    save(file, half(model.state_dict()), {**about, "held_out": found})


if __name__ == "__main__":
    main()
