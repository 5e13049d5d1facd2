"""Trains the KL autoencoder whose latents are the tokens of the continuous model."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from ...models.networks.kl_vae import KLModel
from ...models.networks.vq import VQModel
from . import autoencoder
from .autoencoder import Sampler
from .data import Images
from .loop import Training, autocast, restored
from .settings import Setting

log = logging.getLogger(__name__)

SHARPENED = "kl_decoder.pt"


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence per latent channel from N(0, 1), in nats."""
    return 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()


def noisy(mean: Tensor, log_variance: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A sample of the posterior."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    return mean + (0.5 * log_variance).exp() * noise


def copy_shared_layers(model: KLModel, vq: VQModel) -> int:
    """Copies the shallow levels of a trained VQ tokenizer of the same widths; returns the number of tensors."""
    levels = len(vq.config.ch_mult)

    def renamed(name: str) -> str:
        name = re.sub(r"^encoder\.conv_blocks\.(\d+)\.res", r"encoder.down.\1.block", name)
        name = re.sub(r"^encoder\.conv_blocks\.(\d+)\.", r"encoder.down.\1.", name)
        if match := re.match(r"decoder\.conv_blocks\.(\d+)\.(.*)", name):
            name = f"decoder.up.{levels - 1 - int(match[1])}.{match[2].replace('res.', 'block.', 1)}"
        return name

    mine = model.state_dict()
    shared = {renamed(name): tensor for name, tensor in vq.state_dict().items()}
    shared = {n: t for n, t in shared.items() if n in mine and mine[n].shape == t.shape and "quant_conv" not in n}
    model.load_state_dict({**mine, **shared})
    return len(shared)


@torch.no_grad()
def evaluate(model: KLModel, pixels: Tensor) -> tuple[dict[str, float], Tensor]:
    """PSNR (dB, mean over images) and sharpness from the mean, PSNR from a sampled latent, divergence and spread of the
    latents; also the reconstructions from the mean."""
    generator = torch.Generator(pixels.device).manual_seed(0)
    parts = [model.encode_moments(part) for part in pixels.split(8)]
    mean, log_variance = (torch.cat(each) for each in zip(*parts, strict=True))

    def decoded(latent: Tensor) -> Tensor:
        return torch.cat([model.decode(part) for part in latent.split(8)]).clamp(-1, 1)

    output = decoded(mean)
    return {
        **autoencoder.measure(output, pixels),
        "psnr_sampled": autoencoder.measure(decoded(noisy(mean, log_variance, generator)), pixels)["psnr"],
        "nats": float(divergence(mean, log_variance)),
        "std": float(mean.std()),
    }, output


@torch.no_grad()
def latent_scale(model: KLModel, setting: Setting, images: Images, views: int = 512) -> float:
    """Factor that gives latents unit variance over the training images (deterministic)."""
    sampler = Sampler(setting, setting.kl_vae, images, seed=10**6 + 1)
    device = next(model.parameters()).device
    batches = (sampler.whole(32, only_chosen=True).to(device) for _ in range(views // 32))
    moments = [model.encode_moments(batch) for batch in batches]
    mean, log_variance = (torch.cat(part) for part in zip(*moments, strict=True))
    return float((mean.square() + log_variance.exp()).mean() - mean.mean().square()) ** -0.5


def train(
    setting: Setting, images: Images, out: Path, minutes: float | None = None, vq: VQModel | None = None
) -> KLModel:
    """Train for the time (or resume from ``out``/kl_vae.pt) and return the averaged model.

    vq: the trained tokenizer whose layers it starts from.
    """
    cfg, mixed = setting.kl_vae, autocast(setting)
    torch.manual_seed(0)
    model = KLModel(cfg.config)
    if vq is not None:
        log.info("%d tensors taken from the VQ tokenizer", copy_shared_layers(model, vq))

    def reconstruct(_training: Training[KLModel], _sampler: Sampler, pixels: Tensor, _fraction: float):
        with mixed():
            mean, log_variance = model.encode_moments(pixels)
        mean, log_variance = mean.float(), log_variance.float()
        with mixed():
            output = model.decode(noisy(mean, log_variance)).float()
        return output, cfg.kl_weight * divergence(mean, log_variance)

    return autoencoder.train(setting, cfg, images, model, out / "kl_vae.pt", minutes, reconstruct, evaluate)


def sharpen_decoder(setting: Setting, images: Images, out: Path, minutes: float | None = None) -> None:
    """Continue training the decoder, from ``out``/kl_vae.pt or ``out``/kl_decoder.pt; latents do not change."""
    model, mixed = restore(setting, out), autocast(setting)

    def latents(pixels: Tensor) -> Tensor:
        with mixed():
            mean, log_variance = model.encode_moments(pixels)
        return noisy(mean.float(), log_variance.float())

    torch.manual_seed(3)
    autoencoder.sharpen(setting, setting.kl_vae, images, model, latents, out / SHARPENED, minutes)


def restore(setting: Setting, out: Path) -> KLModel:
    """The averaged autoencoder of ``out``, sharpened if that was done, on the CPU, for inference."""
    file = out / SHARPENED if (out / SHARPENED).exists() else out / "kl_vae.pt"
    return restored(KLModel(setting.kl_vae.config), file)
