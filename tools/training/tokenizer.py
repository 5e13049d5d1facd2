"""Trains the VQ tokenizer: an autoencoder first, then a codebook from its latents, then both together."""

import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.vq import VQModel
from . import resume, sharpen
from .data import Images, sheet
from .loop import Average, Budget, Checkpoint, autocast, rate, set_rate
from .muon import Muon, split_parameters
from .perception import Perception
from .pixels import WHOLE_IMAGES_FROM, Sampler, reconstruction_loss
from .settings import Setting

log = logging.getLogger(__name__)

REVIVE_UNTIL = 0.8
COMMITMENT = 0.25
REVIVE_EVERY = 50
SHARPENED = "decoder.pt"


def spherical_kmeans(points: Tensor, clusters: int, generator: torch.Generator, rounds: int = 15) -> Tensor:
    """Unit vectors [N, C] -> unit centres [clusters, C]; empty clusters restart at random points."""
    centres = points[torch.randperm(len(points), generator=generator, device=points.device)[:clusters]]
    for _ in range(rounds):
        owner = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        empty = torch.bincount(owner, minlength=clusters) == 0
        sums[empty] = points[torch.randint(len(points), (int(empty.sum()),), generator=generator, device=points.device)]
        centres = F.normalize(sums, dim=1)
    return centres


class Codes:
    """Usage statistics of the codebook, and restarting unused codes."""

    def __init__(self, model: VQModel) -> None:
        self.usage = torch.ones(model.config.codebook_size, device=model.quantize.embedding.weight.device)

    @torch.no_grad()
    def observe(self, tokens: Tensor) -> None:
        self.usage.mul_(0.99).add_(torch.bincount(tokens.flatten(), minlength=len(self.usage)))

    @torch.no_grad()
    def revive(self, models: list[VQModel], latent: Tensor) -> int:
        """Sets unused codes to random encoder outputs [B, C, h, w], in the model and its average."""
        dead = (self.usage < 0.05).nonzero().flatten()
        unit = F.normalize(latent.float(), dim=1).movedim(1, -1).flatten(0, -2)
        chosen = unit[torch.randint(len(unit), (len(dead),), device=unit.device)]
        for model in models:
            model.quantize.embedding.weight[dead] = chosen
        self.usage[dead] = 1.0
        return len(dead)


@torch.no_grad()
def evaluate(model: VQModel, pixels: Tensor) -> tuple[dict[str, float], Tensor]:
    """PSNR (dB, mean over images) and number of codes in use; also the reconstructions."""
    tokens = torch.cat([model.encode(part) for part in pixels.split(8)])
    output = torch.cat([model.decode(model.dequantize(part)) for part in tokens.split(8)]).clamp(-1, 1)
    mse = ((output - pixels) / 2).square().mean((1, 2, 3))
    share = torch.bincount(tokens.flatten(), minlength=model.config.codebook_size).float() / tokens.numel()
    entropy = -(share * share.clamp_min(1e-12).log()).sum()
    return {
        "psnr": float((-10 * mse.log10()).mean()),
        "codes": int((share > 0).sum()),
        "perplexity": math.exp(float(entropy)),
    }, output


def train(
    setting: Setting, images: Images, out: Path, minutes: float | None = None, weights: dict[str, Tensor] | None = None
) -> VQModel:
    """Trains for the budget (or resumes from ``out``/tokenizer.pt) and returns the averaged model.

    weights: of a tokenizer to start from.
    """
    cfg, device = setting.tokenizer, torch.device(setting.device)
    torch.manual_seed(0)
    model = VQModel(cfg.config).to(device)
    resume.start(model, weights)
    average = Average(model, 0.995)
    matrices, others = split_parameters(model, keep_out=("encoder.conv_in", "decoder.conv_out", "embedding"))
    muon = Muon(matrices, lr=cfg.learning_rate)
    adamw = torch.optim.AdamW(others, lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = Checkpoint(out / "tokenizer.pt", model=model, average=average.module, muon=muon, adamw=adamw)
    counters = checkpoint.resume() or {"step": cfg.warm_start_steps + 1 if weights else 0, "spent": 0.0}
    step, budget = counters["step"], Budget(minutes or cfg.minutes, counters["spent"])
    sampler, codes, mixed = Sampler(setting, cfg, images, seed=step), Codes(model), autocast(setting)
    held_out = Sampler(setting, cfg, images, seed=10**6).whole(48, only_chosen=True)
    perception = Perception().to(device)
    fraction = budget.fraction
    while fraction < 1.0:
        set_rate([muon, adamw], cfg.learning_rate, rate(fraction, step))
        whole = fraction > WHOLE_IMAGES_FROM
        pixels = sampler.whole(cfg.whole_batch) if whole else sampler.crops(cfg.crop_batch)
        if step == cfg.warm_start_steps:
            _start_codebook(model, average, sampler)
        with mixed():
            latent = model.encode_latent(pixels)
        latent = F.normalize(latent.float(), dim=1)
        code_loss = latent.new_zeros(())
        decoder_input = latent
        if step >= cfg.warm_start_steps:
            tokens = model.quantize_latent(latent)
            chosen = model.dequantize(tokens)
            code_loss = (chosen - latent.detach()).square().mean()
            code_loss = code_loss + COMMITMENT * (chosen.detach() - latent).square().mean()
            decoder_input = latent + (chosen - latent).detach()
            codes.observe(tokens)
        with mixed():
            output = model.decode(decoder_input).float()
        loss = reconstruction_loss(output, pixels) + code_loss
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
        if step > cfg.warm_start_steps and step % REVIVE_EVERY == 0 and fraction < REVIVE_UNTIL:
            codes.revive([model, average.module], latent.detach())
        if step % 50 == 0:
            psnr = float(-10 * ((output.detach() - pixels) / 2).square().mean().log10())
            log.info("step %d, %.1f min, loss %.4f, batch psnr %.2f", step, budget.spent / 60, float(loss), psnr)
        fraction = budget.fraction
        if checkpoint.save(force=fraction >= 1.0, step=step, spent=budget.spent):
            metrics, output = evaluate(average.module, held_out)
            log.info("step %d, held-out augmentations: %s", step, metrics)
            sheet(torch.cat([held_out[:16], output[:16]]), 16).save(out / "reconstructions.png")
    return average.module


def sharpen_decoder(setting: Setting, images: Images, out: Path, minutes: float | None = None) -> None:
    """Continues training the decoder, from ``out``/tokenizer.pt or ``out``/decoder.pt; tokens do not change."""
    model, mixed = restore(setting, out), autocast(setting)

    def latents(pixels: Tensor) -> Tensor:
        with mixed():
            latent = model.encode_latent(pixels)
        return model.dequantize(model.quantize_latent(latent.float()))

    sharpen.train(setting, setting.tokenizer, images, model, latents, out / SHARPENED, minutes)


def restore(setting: Setting, out: Path) -> VQModel:
    """The averaged tokenizer of ``out``, sharpened if that was done, on the CPU, for inference."""
    model = VQModel(setting.tokenizer.config)
    file = out / SHARPENED if (out / SHARPENED).exists() else out / "tokenizer.pt"
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["average"])
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _start_codebook(model: VQModel, average: Average, sampler: Sampler) -> None:
    latents = torch.cat([F.normalize(model.encode_latent(sampler.whole(16)).float(), dim=1) for _ in range(16)])
    points = latents.movedim(1, -1).flatten(0, -2)
    centres = spherical_kmeans(points, model.config.codebook_size, sampler.generator)
    for each in (model, average.module):
        each.quantize.embedding.weight.copy_(centres)
