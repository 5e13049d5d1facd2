"""Trains the KL autoencoder whose latents are the tokens of the continuous model."""

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from ...models.kl_vae import KLModel
from ...models.vq import VQModel
from . import resume, sharpen
from .data import Images, sheet
from .loop import Average, Budget, Checkpoint, autocast, rate, set_rate
from .muon import Muon, split_parameters
from .perception import Perception
from .pixels import WHOLE_IMAGES_FROM, Sampler, reconstruction_loss
from .settings import Setting

log = logging.getLogger(__name__)

HELD_OUT = 48  # images to measure on
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
    """PSNR (dB, mean over images) from the mean and from a sampled latent; spread of the latents; reconstructions."""
    generator = torch.Generator(pixels.device).manual_seed(0)
    parts = [model.encode_moments(part) for part in pixels.split(8)]
    mean, log_variance = (torch.cat(each) for each in zip(*parts, strict=True))

    def decoded(latent: Tensor) -> tuple[Tensor, float]:
        output = torch.cat([model.decode(part) for part in latent.split(8)]).clamp(-1, 1)
        return output, float(-10 * ((output - pixels) / 2).square().mean((1, 2, 3)).log10().mean())

    output, psnr = decoded(mean)
    return {
        "psnr": psnr,
        "psnr_drawn": decoded(noisy(mean, log_variance, generator))[1],
        "nats": float(divergence(mean, log_variance)),
        "std": float(mean.std()),
        "noise": float((0.5 * log_variance).exp().mean()),
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
    setting: Setting,
    images: Images,
    out: Path,
    minutes: float | None = None,
    vq: VQModel | None = None,
    weights: dict[str, Tensor] | None = None,
) -> KLModel:
    """Trains for the budget (or resumes from ``out``/kl_vae.pt) and returns the averaged model.

    vq: the trained tokenizer to start from, if the setting has one; weights: of an autoencoder to start from instead.
    """
    cfg, device = setting.kl_vae, torch.device(setting.device)
    torch.manual_seed(0)
    model = KLModel(cfg.config)
    resume.start(model, weights)
    if vq is not None and weights is None:
        log.info("%d tensors taken from the VQ tokenizer", copy_shared_layers(model, vq))
    model = model.to(device)
    average = Average(model, 0.995)
    matrices, others = split_parameters(model, keep_out=("encoder.conv_in", "decoder.conv_out"))
    muon = Muon(matrices, lr=cfg.learning_rate)
    adamw = torch.optim.AdamW(others, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = Checkpoint(out / "kl_vae.pt", model=model, average=average.module, muon=muon, adamw=adamw)
    counters = checkpoint.resume() or {"step": 0, "spent": 0.0}
    step, budget, mixed = counters["step"], Budget(minutes or cfg.minutes, counters["spent"]), autocast(setting)
    sampler = Sampler(setting, cfg, images, seed=step)
    held_out = Sampler(setting, cfg, images, seed=10**6).whole(HELD_OUT, only_chosen=True)
    perception = Perception().to(device)
    log.info("%.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    fraction = budget.fraction
    while fraction < 1.0:
        set_rate([muon, adamw], cfg.learning_rate, rate(fraction, step))
        whole = fraction > WHOLE_IMAGES_FROM
        pixels = sampler.whole(cfg.whole_batch) if whole else sampler.crops(cfg.crop_batch)
        with mixed():
            mean, log_variance = model.encode_moments(pixels)
        mean, log_variance = mean.float(), log_variance.float()
        with mixed():
            output = model.decode(noisy(mean, log_variance)).float()
        nats = divergence(mean, log_variance)
        loss = reconstruction_loss(output, pixels) + cfg.kl_weight * nats
        if whole:
            with mixed():
                loss = loss + cfg.perception * perception(output, pixels)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        average.update(model, step)
        step += 1
        if step % 50 == 0:
            psnr = float(-10 * ((output.detach() - pixels) / 2).square().mean().log10())
            numbers = step, budget.spent / 60, float(loss.detach()), psnr, float(nats.detach())
            log.info("step %d, %.1f min, loss %.4f, batch psnr %.2f, %.2f nats per channel", *numbers)
        fraction = budget.fraction
        if checkpoint.save(force=fraction >= 1.0, step=step, spent=budget.spent):
            metrics, output = evaluate(average.module, held_out)
            log.info("step %d, held-out augmentations: %s", step, metrics)
            sheet(torch.cat([held_out[:16], output[:16]]), 16).save(out / "kl_reconstructions.png")
    return average.module


def sharpen_decoder(setting: Setting, images: Images, out: Path, minutes: float | None = None) -> None:
    """Continues training the decoder, from ``out``/kl_vae.pt or ``out``/kl_decoder.pt; latents do not change."""
    model, mixed = restore(setting, out), autocast(setting)

    def latents(pixels: Tensor) -> Tensor:
        with mixed():
            mean, log_variance = model.encode_moments(pixels)
        return noisy(mean.float(), log_variance.float())

    sharpen.train(setting, setting.kl_vae, images, model, latents, out / SHARPENED, minutes)


def restore(setting: Setting, out: Path) -> KLModel:
    """The averaged autoencoder of ``out``, sharpened if that was done, on the CPU, for inference."""
    model = KLModel(setting.kl_vae.config)
    file = out / SHARPENED if (out / SHARPENED).exists() else out / "kl_vae.pt"
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["average"])
    return model.eval().requires_grad_(False)
