"""Sharpens the decoder of a trained autoencoder; its encoder, and so the tokens of every image, are unchanged.

If tokens do not determine the exact position of an edge, a squared error is minimal for the mean of the possible
images, a blur. A power of the error below 1 prefers one of them, which gives sharp outlines and flat colours. Images
are decoded as in use: with a margin of repeated tokens, which is cropped.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import Images, sheet
from .loop import Average, Budget, Checkpoint, autocast, rate, set_rate
from .muon import Muon, split_parameters
from .perception import Perception
from .pixels import Sampler
from .settings import AutoencoderSetting, Setting

log = logging.getLogger(__name__)

POWER, FLOOR = 0.6, 0.03  # errors below the floor (of pixels in -1..1) are squared again
HELD_OUT = 32


def sharp_loss(output: Tensor, target: Tensor) -> Tensor:
    """(d^2 + FLOOR^2)^(POWER / 2), the mean over pixels, and half of it over differences of neighbours."""
    error = output - target

    def power(x: Tensor) -> Tensor:
        return (x.square() + FLOOR**2).pow(POWER / 2).mean()

    return power(error) + 0.5 * (power(error.diff(dim=-1)) + power(error.diff(dim=-2)))


def train(
    setting: Setting,
    cfg: AutoencoderSetting,
    images: Images,
    model: nn.Module,
    latents: Callable[[Tensor], Tensor],
    file: Path,
    minutes: float | None = None,
) -> None:
    """Trains ``model.decoder`` and ``model.post_quant_conv`` for the budget, or resumes from ``file``.

    latents: pixels -> the input of ``model.decode``. At the end, ``file`` has the averaged model.
    """
    device = torch.device(setting.device)
    torch.manual_seed(3)
    model = model.to(device).requires_grad_(False)
    model.decoder.requires_grad_(True)
    model.post_quant_conv.requires_grad_(True)
    perception = Perception().to(device)
    average = Average(model, 0.998)
    trained = nn.ModuleDict({"decoder": model.decoder, "post_quant_conv": model.post_quant_conv})
    matrices, others = split_parameters(trained, keep_out=("conv_out",))
    muon = Muon(matrices, lr=cfg.sharpening_rate)
    adamw = torch.optim.AdamW(others, lr=cfg.sharpening_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = Checkpoint(file, model=model, average=average.module, muon=muon, adamw=adamw)
    counters = checkpoint.resume() or {"step": 0, "spent": 0.0}
    step, budget = counters["step"], Budget(minutes or cfg.sharpening_minutes, counters["spent"])
    sampler, mixed = Sampler(setting, cfg, images, seed=10**5 + step), autocast(setting)
    held_out = Sampler(setting, cfg, images, seed=10**6).whole(HELD_OUT, only_chosen=True)
    running, fraction = torch.zeros(2), budget.fraction
    while fraction < 1.0:
        set_rate([muon, adamw], cfg.sharpening_rate, rate(fraction, step))
        wanted = sampler.whole(cfg.whole_batch)
        with torch.no_grad():
            latent = latents(wanted)
        with mixed():
            output = decode(model, latent, cfg).float()
            perceived = perception(output, wanted)
        error = sharp_loss(output, wanted)
        model.zero_grad()
        (error + cfg.perception * perceived).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        muon.step()
        adamw.step()
        average.update(model, step)
        step += 1
        running += (torch.stack((error, perceived)).detach().cpu() - running) / min(step - counters["step"], 50)
        if step % 50 == 0:
            log.info("step %d, %.1f min, pixels %.4f, perception %.4f", step, budget.spent / 60, *running)
        fraction = budget.fraction
        if checkpoint.save(force=fraction >= 1.0, step=step, spent=budget.spent):
            output = decoded(average.module, latents, held_out, cfg)
            log.info("step %d, held-out augmentations: psnr %.2f, sharpness %.3f", step, *measure(output, held_out))
            sheet(torch.cat([held_out[:16], output[:16]]), 8).save(file.with_suffix(".png"))


def decode(model: nn.Module, latent: Tensor, cfg: AutoencoderSetting) -> Tensor:
    """Latents [B, C, h, w] -> pixels, with the margin that image decoders give them (see ImageDecoder)."""
    cut = cfg.margin * cfg.config.factor
    pixels = model.decode(F.pad(latent, (cfg.margin,) * 4, mode="replicate"))
    return pixels[..., cut : pixels.shape[-2] - cut, cut : pixels.shape[-1] - cut]


@torch.no_grad()
def decoded(model: nn.Module, latents: Callable[[Tensor], Tensor], pixels: Tensor, cfg: AutoencoderSetting) -> Tensor:
    """Pixels [B, 3, H, W] encoded and decoded again."""
    return torch.cat([decode(model, latents(part), cfg) for part in pixels.split(8)]).clamp(-1, 1)


def measure(output: Tensor, wanted: Tensor) -> tuple[float, float]:
    """PSNR (dB, mean over images), and sharpness: the ratio of squared differences of neighbouring pixels."""
    psnr = -10 * ((output - wanted) / 2).square().mean((1, 2, 3)).log10().mean()
    edges = [x.diff(dim=-1).square().mean() + x.diff(dim=-2).square().mean() for x in (output, wanted)]
    return float(psnr), float(edges[0] / edges[1])
