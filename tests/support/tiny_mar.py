"""A MAR-shaped model small enough for a test, with weights that any program can rebuild from a tensor's name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import torch
from comfyui_specar.models.networks import mar as net
from comfyui_specar.models.networks.diffusion_head import DiffusionHead, NoiseSchedule
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel
from comfyui_specar.models.networks.mar import MARConfig
from safetensors.torch import save_file
from torch import Tensor

from .tiny import CAPTION, fill, named_shapes, write_words
from .tiny_family import Files, Tiny

MAR = MARConfig(
    dim=32, encoder_layers=2, decoder_layers=1, heads=4, rows=4, cols=4, channels=16, slots=4, conditions=10
)
WIDTH, DEPTH = 24, 2  # of the diffusion head
KL = KLConfig(channels=16, ch_mult=(1, 1), base_channels=32, num_res_blocks=1)
_TABLES = ("class_emb", "fake_latent", "mask_token", "pos_embed_learned")


def mar_shapes(config: MARConfig = MAR, width: int = WIDTH, depth: int = DEPTH) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released MAR file."""
    return named_shapes(
        lambda: {"": net.MAR(config), "diffloss.": DiffusionHead(config.channels, config.dim, width, depth)}
    )


def mar_fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values as ``fill`` gives them; learned tables (classes, positions, single vectors) have unit variance."""
    return fill(f"{name} embedding" if any(table in name for table in _TABLES) else name, shape)


def mar_weights(config: MARConfig = MAR, **sizes: int) -> dict[str, Tensor]:
    return {name: mar_fill(name, shape) for name, shape in mar_shapes(config, **sizes).items()}


def write_mar(path: Path, config: MARConfig = MAR, **metadata) -> Path:
    """A safetensors file of the tiny model, with the metadata that its size needs."""
    header = {"family": "mar", "heads": config.heads, "grid": (config.rows, config.cols)} | metadata
    save_file(mar_weights(config), str(path), metadata={"specar": json.dumps(header)})
    return path


def last_steps(schedule: NoiseSchedule, count: int) -> NoiseSchedule:
    """The ``count`` last denoising steps of a schedule, from moderate noise.

    With all steps a random network ends at values of 1e5, because nothing cancels the first noise.
    """
    tables = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return replace(schedule, **{name: t[:count] for name, t in tables.items() if isinstance(t, Tensor)})


def write_kl_vae(folder: Path) -> None:
    torch.manual_seed(0)
    save_file(KLModel(KL).state_dict(), str(folder / "kl16.safetensors"))


def write_files(folder: Path) -> None:
    """A model of ours, which reads words, with its text encoder and autoencoder."""
    config = replace(MAR, encoder_layers=1, conditions=CAPTION, captions=True)
    write_mar(folder / "model.safetensors", config, caption_slots=4, defaults={"cfg": 2.0, "steps": 5, "iterations": 4})
    write_words(folder, CAPTION)
    write_kl_vae(folder)


def write_pickle(folder: Path) -> None:
    """No metadata tells the heads of this tiny one: it is refused, though never for another reason while sound."""
    torch.save({"model": mar_weights(), "model_ema": mar_weights()}, folder / "mar.pth")


# An untrained head's tokens stay small from step 500 on.
TINY = {"mar": Tiny(lambda folder: write_mar(folder / "mar.safetensors", first_step=500))}
FILES = {"MAR": Files(write_files), "MAR as released": Files(write_pickle, "mar.pth", "3")}
