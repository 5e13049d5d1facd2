"""Tunes the image decoder alone, on whole pictures and with the tokens fixed, so that trained models stay valid.

A decoder likes to leave a bright spike in a corner of its feature maps, which steers its group norms and shows in the
picture. Here the last resolution learns to take it out again: errors in the corners count extra.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from ..models.vq import VQModel
from . import tokenizer
from .data import Pictures, sheet
from .loop import Average, Budget, autocast, rate, set_rate
from .settings import Setting

log = logging.getLogger(__name__)

CORNER = 12  # pixels


def corner_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over the four corners of pictures [B, 3, H, W]."""
    error = (output - target).abs()
    rows = torch.cat((error[..., :CORNER, :], error[..., -CORNER:, :]), dim=-2)
    return torch.cat((rows[..., :CORNER], rows[..., -CORNER:]), dim=-1).mean()


def train(setting: Setting, pictures: Pictures, out: Path, minutes: float | None = None) -> VQModel:
    """Tunes the tokenizer of ``out``/tokenizer.pt for the budget; the averaged result is ``out``/decoder.pt."""
    cfg, device = setting.tokenizer, torch.device(setting.device)
    model = tokenizer.restore(setting, out).to(device)
    last = (model.decoder.conv_blocks[-1], model.decoder.norm_out, model.decoder.conv_out)
    trained = [parameter for part in last for parameter in part.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    average = Average(model, 0.99)
    optimizer = torch.optim.AdamW(trained, lr=cfg.decoder_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    sampler, mixed = tokenizer.Sampler(setting, pictures, device, seed=7), autocast(setting)
    held_out = tokenizer.Sampler(setting, pictures, device, seed=10**6).whole(48, only_chosen=True)
    log.info("decoder before tuning: %s", tokenizer.evaluate(model, held_out)[0])
    budget, step = Budget(minutes or cfg.decoder_minutes), 0
    while budget.fraction < 1.0:
        set_rate([optimizer], cfg.decoder_learning_rate, rate(budget.fraction, step, warmup_steps=20))
        pixels = sampler.whole(cfg.whole_batch)
        with torch.no_grad(), mixed():
            codes = model.dequantize(model.encode(pixels))
        with mixed():
            output = model.decode(codes).float()
        loss = tokenizer.reconstruction_loss(output, pixels) + corner_error(output, pixels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        average.update(model, step)
        step += 1
        if step % 25 == 0:
            log.info("decoder step %d, %.1f min, loss %.4f", step, budget.spent / 60, float(loss.detach()))
    metrics, output = tokenizer.evaluate(average.module, held_out)
    log.info("decoder step %d, held-out augmentations: %s", step, metrics)
    sheet(torch.cat([held_out[:16], output[:16]]), 16).save(out / "reconstructions.png")
    torch.save(average.module.state_dict(), out / "decoder.pt")
    return average.module


def restore(setting: Setting, out: Path) -> VQModel:
    """The tokenizer with its tuned decoder, on the CPU, for inference."""
    model = VQModel(setting.tokenizer.config)
    model.load_state_dict(torch.load(out / "decoder.pt", map_location="cpu", weights_only=True))
    return model.eval().requires_grad_(False)
