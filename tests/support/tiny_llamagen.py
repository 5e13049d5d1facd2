"""Tiny LlamaGens: as released, as conversions have them, and in the layout of the bundled model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import tiny, tiny_t5
from .tiny import GRID, HEADS, fill, llamagen_shapes
from .tiny_family import Files, Tiny, Workflow


def write(folder: Path, text: bool, seed: int = 0, layers: int = 2) -> Path:
    """A folder with the model alone. seed 0: the weights of ``tiny.llamagen_weights``."""
    header = {"specar": json.dumps({"heads": HEADS, "grid": GRID})}
    weights = {
        name: fill(name if seed == 0 else f"{seed} {name}", shape)
        for name, shape in llamagen_shapes(text, layers=layers).items()
    }
    save_file(weights, folder / "model.safetensors", metadata=header)
    return folder


def write_with_t5(folder: Path) -> None:
    tiny.write_llamagen(folder / "t2i_XL_stage2_512.safetensors", True)
    torch.save(tiny.vq_weights(), folder / "vq_ds16_t2i.pt")
    tiny_t5.write(folder / "flan-t5-xl")


def write_with_words(folder: Path) -> None:
    """In the layout of the bundled model."""
    defaults = {"cfg": 2.0, "temperature": 1.0, "top_k": 8, "top_p": 1.0}
    tiny.write_llamagen(
        folder / "model.safetensors", True, caption_slots=tiny.SLOTS, defaults=defaults, pixels_per_token=2
    )
    save_file(tiny.vq_weights(), str(folder / "vq.safetensors"), metadata={"specar": json.dumps({"margin": 1})})
    tiny.write_words(folder, tiny.CAPTION)


def write_converted(folder: Path) -> None:
    """A pickle with config.json, as conversions have them."""
    torch.save({"model": tiny.llamagen_weights(False), "steps": 5}, folder / "pytorch_model.bin")
    settings = {"num_attention_heads": HEADS, "block_size": 16, "rms_norm_eps": 1e-5, "model_type": "llamagen"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def install(models: Path, name: str, decoder: str, text: bool) -> None:
    """A pickle tells neither heads nor grid of a size that was never released, so this one is no .pt."""
    tiny.write_llamagen(models / "ar_models" / f"{name}.safetensors", text)
    file = models / "vae" / decoder
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tiny.vq_weights(), file)
    if text:
        tiny_t5.write(models / "text_encoders/flan-t5-xl")


TINY = {"llamagen-t2i": Tiny(partial(write, text=True)), "llamagen-c2i": Tiny(partial(write, text=False))}
FILES = {
    "LlamaGen with T5": Files(write_with_t5, "t2i_XL_stage2_512.safetensors"),
    "LlamaGen with words": Files(write_with_words),
    "LlamaGen of classes": Files(write_converted, prompt="3"),
}
WORKFLOWS = {
    "22 LlamaGen, classes (download)": Workflow(
        "LlamaGen, classes",
        partial(install, name="c2i_L_384", decoder="vq_ds16_c2i.pt", text=False),
        {"model_name": "c2i_L_384.safetensors", "text": "7"},  # of ten classes
    ),
    "21 LlamaGen, text (download)": Workflow(
        "LlamaGen, text",
        partial(install, name="t2i_XL_stage2_512", decoder="vq_ds16_t2i.pt", text=True),
        {"model_name": "t2i_XL_stage2_512.safetensors", "text": "a red cat"},
    ),
}
