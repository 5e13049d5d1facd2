"""Trains the VQ tokenizer: an autoencoder first, then a codebook from its latents, then both together."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.detect import load_image_decoder
from ...models.networks.vq import VQModel
from . import autoencoder
from .autoencoder import Sampler
from .data import Images, sheet
from .loop import Training, autocast, restored
from .portrait_styles import PORTRAIT_STYLES
from .settings import Setting

log = logging.getLogger(__name__)

REVIVE_UNTIL = 0.8  # of the time
COMMITMENT = 0.25
REVIVE_EVERY = 50  # steps
SHARPENED = "decoder.pt"


def spherical_kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Unit vectors [N, C] -> unit centres [clusters, C]; empty clusters restart at random points."""
    centres = points[torch.randperm(len(points), generator=generator, device=points.device)[:clusters]]
    for _ in range(15):
        owner = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        empty = torch.bincount(owner, minlength=clusters) == 0
        sums[empty] = points[torch.randint(len(points), (int(empty.sum()),), generator=generator, device=points.device)]
        centres = F.normalize(sums, dim=1)
    return centres


def unit_vectors(latent: Tensor) -> Tensor:
    """Latents [B, C, h, w] -> unit vectors [B * h * w, C]."""
    return F.normalize(latent.float(), dim=1).movedim(1, -1).flatten(0, -2)


class Codes:
    """Usage statistics of the codebook of a model, of which unused codes are restarted."""

    def __init__(self, model: VQModel) -> None:
        self.usage = torch.ones(model.config.codebook_size, device=model.quantize.embedding.weight.device)

    @torch.no_grad()
    def observe(self, tokens: Tensor) -> None:
        self.usage.mul_(0.99).add_(torch.bincount(tokens.flatten(), minlength=len(self.usage)))

    @torch.no_grad()
    def revive(self, models: list[VQModel], latent: Tensor) -> None:
        """Set unused codes to random encoder outputs [B, C, h, w], in the model and its average."""
        dead = (self.usage < 0.05).nonzero().flatten()
        unit = unit_vectors(latent)
        chosen = unit[torch.randint(len(unit), (len(dead),), device=unit.device)]
        for model in models:
            model.quantize.embedding.weight[dead] = chosen
        self.usage[dead] = 1.0


@torch.no_grad()
def start_codebook(models: list[VQModel], sampler: Sampler) -> None:
    """Set the codes of the models to the centres of the first one's latents."""
    points = torch.cat([unit_vectors(models[0].encode_latent(sampler.whole(16))) for _ in range(16)])
    centres = spherical_kmeans(points, models[0].config.codebook_size, sampler.generator)
    for model in models:
        model.quantize.embedding.weight.copy_(centres)


@torch.no_grad()
def evaluate(model: VQModel, pixels: Tensor) -> tuple[dict[str, float], Tensor]:
    """PSNR (dB, mean over images), sharpness and number of codes in use; also the reconstructions."""
    tokens = torch.cat([model.encode(part) for part in pixels.split(8)])
    output = torch.cat([model.decode(model.dequantize(part)) for part in tokens.split(8)]).clamp(-1, 1)
    share = torch.bincount(tokens.flatten(), minlength=model.config.codebook_size).float() / tokens.numel()
    perplexity = math.exp(float(torch.special.entr(share).sum()))
    return {**autoencoder.measure(output, pixels), "codes": int((share > 0).sum()), "perplexity": perplexity}, output


def take_weights(model: VQModel, file: Path) -> bool:
    """Copy the weights of a VQ file of the same structure; returns whether its codebook, too, has the same size."""
    trained = load_image_decoder(file).module.state_dict()
    book = "quantize.embedding.weight"
    if same := trained[book].shape == model.quantize.embedding.weight.shape:
        log.info("codebook taken from %s", file)
    else:
        trained[book] = model.quantize.embedding.weight.detach()
    model.load_state_dict(trained)
    return same


def train(
    setting: Setting, images: Images, out: Path, minutes: float | None = None, start: Path | None = None
) -> VQModel:
    """Train for the time (or resume from ``out``/tokenizer.pt) and return the averaged model.

    start: the file of a trained tokenizer to begin from; a codebook of another size is made from its latents.
    """
    cfg, mixed = setting.tokenizer, autocast(setting)
    torch.manual_seed(0)
    model = VQModel(cfg.config)
    has_codes = start is not None and take_weights(model, start)
    model.to(setting.device)
    codes, warm_start_steps = Codes(model), 0 if start else cfg.warm_start_steps

    def reconstruct(
        training: Training[VQModel], sampler: Sampler, pixels: Tensor, fraction: float
    ) -> tuple[Tensor, Tensor]:
        step, models = training.step, [training.module, training.average]
        if step == warm_start_steps and not has_codes:
            start_codebook(models, sampler)
        with mixed():
            latent = model.encode_latent(pixels)
        latent = F.normalize(latent.float(), dim=1)
        code_loss, decoded = latent.new_zeros(()), latent
        if step >= warm_start_steps:
            if step > warm_start_steps and step % REVIVE_EVERY == 0 and fraction < REVIVE_UNTIL:
                codes.revive(models, latent.detach())
            tokens = model.quantize_latent(latent)
            chosen = model.dequantize(tokens)
            code_loss = (chosen - latent.detach()).square().mean()
            code_loss = code_loss + COMMITMENT * (chosen.detach() - latent).square().mean()
            decoded = latent + (chosen - latent).detach()
            codes.observe(tokens)
        with mixed():
            return model.decode(decoded).float(), code_loss

    return autoencoder.train(setting, cfg, images, model, out / "tokenizer.pt", minutes, reconstruct, evaluate)


@torch.no_grad()
def measure_styles(setting: Setting, images: Images, model: VQModel, file: Path, count: int = 8) -> dict[str, float]:
    """PSNR (dB) of held-out portraits by style, and of emoji; ``file``: two of each, and beside them as decoded."""
    sampler = Sampler(replace(setting, portraits=0.0), setting.tokenizer, images, seed=10**6)
    shown = {"emoji": sampler.whole(2 * count, only_chosen=True)}
    if portraits := images.portraits:
        held_out = range(0, len(portraits), autoencoder.HELD_OUT_EVERY)
        for style in PORTRAIT_STYLES:
            numbers = [i for i in held_out if portraits.words[i][0] == style][:count]
            shown[style] = sampler.placed(portraits.rgba(torch.tensor(numbers)))
    found, rows = {}, []
    for style, pixels in shown.items():
        latents = [model.dequantize(model.encode(part)) for part in pixels.split(4)]
        output = torch.cat([autoencoder.decode(model, part, setting.tokenizer) for part in latents]).clamp(-1, 1)
        found[style] = autoencoder.measure(output, pixels)["psnr"]
        rows.append(torch.stack([pixels[:2], output[:2]], dim=1).flatten(0, 1))
    sheet(torch.cat(rows), len(rows[0])).save(file)
    return found


def sharpen_decoder(setting: Setting, images: Images, out: Path, minutes: float | None = None) -> None:
    """Continue training the decoder, from ``out``/tokenizer.pt or ``out``/decoder.pt; tokens do not change."""
    model, mixed = restore(setting, out), autocast(setting)

    def latents(pixels: Tensor) -> Tensor:
        with mixed():
            latent = model.encode_latent(pixels)
        return model.dequantize(model.quantize_latent(latent.float()))

    torch.manual_seed(3)
    autoencoder.sharpen(setting, setting.tokenizer, images, model, latents, out / SHARPENED, minutes)


def restore(setting: Setting, out: Path) -> VQModel:
    """The averaged tokenizer of ``out``, sharpened if that was done, on the CPU, for inference."""
    file = out / SHARPENED if (out / SHARPENED).exists() else out / "tokenizer.pt"
    return restored(VQModel(setting.tokenizer.config), file)
