"""Writes the files of the continuous pair in the published key layouts, with settings that shapes do not show."""

import shutil
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from ...models.kl_vae import KLModel
from . import masked
from .export import half, save
from .settings import MaskedSetting, Setting


def write(
    setting: Setting, vae: KLModel, scale: float, words: Tensor, trained: Path, discrete: Path, out: Path
) -> None:
    """``trained``/masked_{model,drafter}.pt -> ``out``/{vae,model,small/model}.safetensors (fp16); copies the words."""
    (out / "small").mkdir(parents=True, exist_ok=True)
    save(
        out / "vae.safetensors",
        half(vae.state_dict()),
        {"family": "kl_vae", "scale": scale, "margin": setting.kl_vae.margin},
    )
    shutil.copyfile(discrete / "text_encoder.safetensors", out / "text_encoder.safetensors")
    for cfg, name, file in (
        (setting.masked, "masked_model.pt", out / "model.safetensors"),
        (setting.masked_drafter, "masked_drafter.pt", out / "small" / "model.safetensors"),
    ):
        model = masked.restore(setting, cfg, words, trained / name)
        save(file, half(mar_tensors(model)), metadata(setting, cfg, model, scale))


def mar_tensors(model: masked.MaskedTextToImage) -> dict[str, Tensor]:
    """The weights under the names of the published MAR files."""
    head = {f"diffloss.{name}": tensor for name, tensor in model.head.state_dict().items()}
    return {**model.backbone.state_dict(), **head}


def metadata(setting: Setting, cfg: MaskedSetting, model: masked.MaskedTextToImage, scale: float) -> dict:
    """Settings that a loader cannot read from the shapes."""
    config = model.backbone.config
    return {
        "family": "mar",
        "heads": cfg.heads,
        "grid": [config.rows, config.cols],
        "pixels_per_token": setting.kl_vae.config.factor,
        "scale": scale,
        "caption_slots": config.slots,
        "head_steps": setting.masked_sampling.steps,
        "first_step": setting.masked_first_step,
        "defaults": asdict(setting.masked_sampling),
        "trained_on": setting.name,
    }
