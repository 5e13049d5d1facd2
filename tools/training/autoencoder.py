"""Training of image autoencoders (the VQ tokenizer, the KL autoencoder): their data, their losses, and two stages.

The first stage trains all of it, on crops and then on whole images. The second one sharpens the decoder; the encoder,
and so the tokens of every image, are unchanged. If tokens do not determine the exact position of an edge, a squared
error is minimal for the mean of the possible images, a blur. A power of the error below 1 prefers one of them, which
gives sharp outlines and flat colours. Images are decoded as in use: with a margin of repeated tokens, which is cropped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.networks.kl_vae import KLModel
from ...models.networks.vq import VQModel
from .data import Images, augment, sheet
from .loop import Training, autocast
from .perception import Perception
from .settings import BACKGROUNDS, PLACES, AutoencoderSetting, Setting

WHOLE_IMAGES_FROM = 0.25  # fraction of the time after which whole images, whose statistics differ, replace crops
POWER, FLOOR = 0.6, 0.03  # sharpening: errors below the floor (of pixels in -1..1) are squared again
HELD_OUT = 48  # images to measure on
HELD_OUT_EVERY = 21  # one portrait in so many is held out: no multiple of the number of styles, which take turns
SAVE_MINUTES = 5.0  # measuring takes as long as ten steps
OUTER = ("encoder.conv_in", "decoder.conv_out", "embedding")  # layers that AdamW trains
Model = TypeVar("Model", bound="VQModel | KLModel")


class Sampler:
    """Random augmented batches of portraits and emoji, the emoji mostly of the chosen concepts."""

    def __init__(self, setting: Setting, cfg: AutoencoderSetting, images: Images, seed: int) -> None:
        self.setting, self.cfg, self.device = setting, cfg, torch.device(setting.device)
        chosen = images.select(setting.concepts)
        coloured = chosen.recoloured()
        self.chosen, self.coloured = chosen.rgba.to(self.device), coloured.rgba.to(self.device)
        self.all = images.rgba.to(self.device) if cfg.other_images else self.chosen
        self.portraits = images.portraits
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def _some(self, images: Tensor, count: int) -> Tensor:
        return images[self._integers(len(images), count)]

    def whole(self, count: int, only_chosen: bool = False) -> Tensor:
        """Pixels [count, 3, 256, 256] in [-1, 1].

        ``only_chosen``: held-out portraits, and emoji of these concepts, large and in their own colours.
        """
        portraits = self._round(count * self.setting.portraits) if self.portraits else 0
        emoji = count - portraits
        shares = (self.cfg.other_images, self.setting.recoloured, self.setting.placed)
        others, coloured, placed = (0, 0, 0) if only_chosen else (self._round(emoji * share) for share in shares)
        coloured = min(coloured, emoji - others)
        rgba = torch.cat(
            [
                self._portraits(portraits, only_chosen),
                self._some(self.all, others),
                self._some(self.coloured, coloured),
                self._some(self.chosen, emoji - others - coloured),
            ]
        )
        places = torch.zeros(count, dtype=torch.int64, device=self.device)
        moved = portraits + torch.randperm(emoji, generator=self.generator, device=self.device)[:placed]
        places[moved] = 1 + self._integers(len(PLACES), len(moved))
        return self.placed(rgba, places)

    def placed(self, rgba: Tensor, places: Tensor | None = None) -> Tensor:
        """Drawings uint8 [B, 4, 256, 256], randomly placed on random backgrounds; otherwise as :func:`augment`."""
        backgrounds = self._integers(len(BACKGROUNDS), len(rgba))
        return augment(rgba, backgrounds, self.cfg.augmentation, self.generator, places)

    def _portraits(self, count: int, held_out: bool) -> Tensor:
        """Random portraits, uint8 [count, 4, 256, 256]: one in HELD_OUT_EVERY is held out."""
        if not self.portraits or not count:
            return self.chosen[:0]
        numbers = HELD_OUT_EVERY * self._integers(len(self.portraits) // HELD_OUT_EVERY, count)
        if not held_out:
            numbers = numbers + 1 + self._integers(HELD_OUT_EVERY - 1, count)
        return self.portraits.rgba(numbers).to(self.device)

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


# Losses


def differences(error: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Half the loss ``of`` the differences of neighbouring pixels, for sharp edges."""
    return 0.5 * (of(error.diff(dim=-1)) + of(error.diff(dim=-2)))


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 + L2 + half the L1 distance of differences of neighbouring pixels."""
    error = output - target
    return error.abs().mean() + error.square().mean() + differences(error, lambda x: x.abs().mean())


def sharp_loss(output: Tensor, target: Tensor) -> Tensor:
    """(d^2 + FLOOR^2)^(POWER / 2), the mean over pixels, and half of it over differences of neighbours."""
    error = output - target

    def power(x: Tensor) -> Tensor:
        return (x.square() + FLOOR**2).pow(POWER / 2).mean()

    return power(error) + differences(error, power)


def measure(output: Tensor, wanted: Tensor) -> dict[str, float]:
    """PSNR (dB, mean over images), and sharpness: the ratio of squared differences of neighbouring pixels."""
    psnr = -10 * ((output - wanted) / 2).square().mean((1, 2, 3)).log10().mean()
    edges = [differences(x, lambda x: x.square().mean()) for x in (output, wanted)]
    return {"psnr": float(psnr), "sharpness": float(edges[0] / edges[1])}


# Stages


def train(
    setting: Setting,
    cfg: AutoencoderSetting,
    images: Images,
    model: Model,
    file: Path,
    minutes: float | None,
    reconstruct: Callable[[Training[Model], Sampler, Tensor, float], tuple[Tensor, Tensor]],
    evaluate: Callable[[Model, Tensor], tuple[dict[str, float], Tensor]],
) -> Model:
    """Train for the time (or resume from ``file``) and return the averaged model.

    reconstruct: training, sampler, pixels and elapsed share -> reconstructed pixels, and the model's own loss.
    evaluate: model and held-out pixels -> numbers to report, and reconstructions, which are drawn beside ``file``.
    """
    device, mixed = torch.device(setting.device), autocast(setting)
    training = Training(model.to(device), file, cfg.minutes if minutes is None else minutes, cfg.learning_rate, OUTER)
    sampler = Sampler(setting, cfg, images, seed=training.step)
    held_out = Sampler(setting, cfg, images, seed=10**6).whole(HELD_OUT, only_chosen=True)
    perception = Perception().to(device)

    def losses(fraction: float) -> dict[str, Tensor]:
        whole = fraction > WHOLE_IMAGES_FROM
        pixels = sampler.whole(cfg.whole_batch) if whole else sampler.crops(cfg.crop_batch)
        output, own = reconstruct(training, sampler, pixels, fraction)
        found = {"pixels": reconstruction_loss(output, pixels), "own": own, "perception": own.new_zeros(())}
        if whole:
            with mixed():
                found["perception"] = cfg.perception * perception(output, pixels)
        return {"loss": torch.stack([part.float() for part in found.values()]).sum(), **found}

    def report() -> dict[str, float]:
        numbers, output = evaluate(training.average, held_out)
        sheet(torch.cat([held_out[:16], output[:16]]), 16).save(file.with_suffix(".png"))
        return numbers

    return training.run(losses, report, SAVE_MINUTES)


def sharpen(
    setting: Setting,
    cfg: AutoencoderSetting,
    images: Images,
    model: VQModel | KLModel,
    latents: Callable[[Tensor], Tensor],
    file: Path,
    minutes: float | None,
) -> None:
    """Train ``model.decoder`` and ``model.post_quant_conv`` for the time, or resume from ``file``.

    latents: pixels -> the input of ``model.decode``. At the end, ``file`` has the averaged model.
    """
    device, mixed = torch.device(setting.device), autocast(setting)
    model = model.to(device).requires_grad_(False)
    model.decoder.requires_grad_(True)
    model.post_quant_conv.requires_grad_(True)
    minutes = cfg.sharpening_minutes if minutes is None else minutes
    training = Training(model, file, minutes, cfg.sharpening_rate, ("conv_out",), decay=0.998)
    sampler = Sampler(setting, cfg, images, seed=10**5 + training.step)
    held_out = Sampler(setting, cfg, images, seed=10**6).whole(HELD_OUT, only_chosen=True)
    perception = Perception().to(device)

    def losses(_fraction: float) -> dict[str, Tensor]:
        wanted = sampler.whole(cfg.whole_batch)
        with torch.no_grad():
            latent = latents(wanted)
        with mixed():
            output = decode(model, latent, cfg).float()
            perceived = perception(output, wanted)
        error = sharp_loss(output, wanted)
        return {"loss": error + cfg.perception * perceived, "pixels": error, "perception": perceived}

    @torch.no_grad()
    def report() -> dict[str, float]:
        parts = [decode(training.average, latents(part), cfg) for part in held_out.split(8)]
        output = torch.cat(parts).clamp(-1, 1)
        sheet(torch.cat([held_out[:16], output[:16]]), 8).save(file.with_suffix(".png"))
        return measure(output, held_out)

    training.run(losses, report, SAVE_MINUTES)


def decode(model: VQModel | KLModel, latent: Tensor, cfg: AutoencoderSetting) -> Tensor:
    """Latents [B, C, h, w] -> pixels, with the margin that image decoders give them (ImageDecoder)."""
    cut = cfg.margin * cfg.config.factor
    pixels = model.decode(F.pad(latent, (cfg.margin,) * 4, mode="replicate"))
    return pixels[..., cut : pixels.shape[-2] - cut, cut : pixels.shape[-1] - cut]
