"""Sharpens the decoder of a trained autoencoder; its encoder, and so the tokens of every picture, stay what they are.

Pixel losses alone leave edges soft: where a token does not tell where exactly an edge runs, the best guess is its blur.
So the decoder is trained on with perceptual features, and, ramped in later, a patch discriminator (Esser et al., 2021,
arXiv:2012.09841, section 3.1), whose weight follows the size of the other losses' gradient as in equation 7 there. That
gradient is taken at the picture instead of at the last layer: the size of a step is what matters, and it is free.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import Pictures, sheet
from .loop import Average, Budget, Checkpoint, autocast, rate, set_rate
from .muon import Muon, split_parameters
from .perception import Perception
from .pixels import Sampler, reconstruction_loss
from .settings import AutoencoderSetting, Setting

log = logging.getLogger(__name__)

ADVERSARY_FROM, ADVERSARY_FULL = 0.15, 0.5  # shares of the budget between which its weight grows
HELD_OUT = 32


class PatchDiscriminator(nn.Module):
    """Real or decoded? One answer per patch of 34 pixels (pix2pix's, Isola et al., 2017, one layer shallower)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2),
            normed(nn.Conv2d(width, 2 * width, 4, 2, 1)), nn.LeakyReLU(0.2),
            normed(nn.Conv2d(2 * width, 2 * width, 4, 1, 1)), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4, 1, 1),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> logits [B, 1, h, w], above 0 for real."""
        return self.layers(pixels).float()


def gradient_at(picture: Tensor, loss: Tensor) -> Tensor:
    """The gradient of a loss with respect to the decoded picture."""
    return torch.autograd.grad(loss, picture)[0]


def train(
    setting: Setting, cfg: AutoencoderSetting, pictures: Pictures, model: nn.Module,
    latents: Callable[[Tensor], Tensor], file: Path, minutes: float | None = None,
) -> None:
    """Trains ``model.decoder`` and ``model.post_quant_conv`` for the budget, or goes on from ``file``.

    latents: pixels -> what ``model.decode`` is to decode. The averaged model is in ``file`` at the end.
    """
    device = torch.device(setting.device)
    torch.manual_seed(3)
    model = model.to(device).requires_grad_(False)
    model.decoder.requires_grad_(True)
    model.post_quant_conv.requires_grad_(True)
    adversary, perception = PatchDiscriminator().to(device), Perception().to(device)
    average = Average(model, 0.998)
    trained = nn.ModuleDict({"decoder": model.decoder, "post_quant_conv": model.post_quant_conv})
    matrices, others = split_parameters(trained, keep_out=("conv_out",))
    muon = Muon(matrices, lr=cfg.sharpening_rate)
    adamw = torch.optim.AdamW(others, lr=cfg.sharpening_rate, betas=(0.9, 0.95), weight_decay=0.0)
    against = torch.optim.AdamW(adversary.parameters(), lr=cfg.sharpening_rate, betas=(0.5, 0.9), weight_decay=0.0)
    parts = {"muon": muon, "adamw": adamw, "adversary": adversary, "against": against}
    checkpoint = Checkpoint(file, model=model, average=average.module, **parts)
    counters = checkpoint.resume() or {"step": 0, "spent": 0.0}
    step, budget = counters["step"], Budget(minutes or cfg.sharpening_minutes, counters["spent"])
    sampler, mixed = Sampler(setting, cfg, pictures, seed=10**5 + step), autocast(setting)
    held_out = Sampler(setting, cfg, pictures, seed=10**6).whole(HELD_OUT, only_chosen=True)
    running, fraction = torch.zeros(4), budget.fraction
    while fraction < 1.0:
        set_rate([muon, adamw, against], cfg.sharpening_rate, rate(fraction, step))
        strength = min(max(fraction - ADVERSARY_FROM, 0.0) / (ADVERSARY_FULL - ADVERSARY_FROM), 1.0)
        real = sampler.whole(cfg.whole_batch)
        with torch.no_grad():
            latent = latents(real)
        with mixed():
            output = model.decode(latent).float()
        drawn = output.detach().requires_grad_(True)
        adversary.requires_grad_(False)
        with mixed():
            perceived = perception(drawn, real)
            fooled = -adversary(drawn).mean()
        pixel_loss = reconstruction_loss(drawn, real)
        gradient = gradient_at(drawn, pixel_loss + cfg.perception * perceived)
        pull = gradient_at(drawn, fooled)
        weight = cfg.adversary * strength * gradient.norm() / pull.norm().clamp_min(1e-8)
        output.backward(gradient + weight * pull)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        muon.step()
        adamw.step()
        model.zero_grad()
        average.update(model, step)
        adversary.requires_grad_(True)
        with mixed():
            verdicts = adversary(torch.cat((real, drawn.detach()))).chunk(2)
        hinge = F.relu(1.0 - verdicts[0]).mean() + F.relu(1.0 + verdicts[1]).mean()
        hinge.backward()
        against.step()
        against.zero_grad()
        step += 1
        losses = torch.stack((pixel_loss, perceived, fooled, hinge)).detach().cpu()
        running += (losses - running) / min(step - counters["step"], 50)
        if step % 50 == 0:
            log.info("step %d, %.1f min, pixels %.4f, perception %.4f, fooled %.2f, hinge %.2f",
                     step, budget.spent / 60, *running)
        fraction = budget.fraction
        if checkpoint.save(force=fraction >= 1.0, step=step, spent=budget.spent):
            output = decoded(average.module, latents, held_out)
            psnr = -10 * ((output - held_out) / 2).square().mean((1, 2, 3)).log10().mean()
            log.info("step %d, held-out augmentations: psnr %.2f", step, psnr)
            sheet(torch.cat([held_out[:16], output[:16]]), 8).save(file.with_suffix(".png"))


@torch.no_grad()
def decoded(model: nn.Module, latents: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] encoded and decoded again."""
    return torch.cat([model.decode(latents(part)) for part in pixels.split(8)]).clamp(-1, 1)
