"""Writes the files of the bundled models in the published key layouts, with settings that shapes do not show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...device.cpu import unpack
from ...models.networks.backbone import Backbone
from ...models.networks.kl_vae import KLModel
from ...models.networks.vq import VQModel
from . import autoregressive, masked, tokenizer
from .captions import Captions
from .settings import IMAGE_SIZE, Setting


def write(setting: Setting, captions: Captions, trained: Path, out: Path) -> None:
    """``trained``/tokenizer.pt and model.pt -> ``out``/{vq,model,text_encoder}.safetensors (fp16, word table fp32)."""
    out.mkdir(parents=True, exist_ok=True)
    model = autoregressive.restore(setting, len(captions.words), trained)
    factor = setting.tokenizer.config.factor
    side = IMAGE_SIZE // factor
    write_tokenizer(setting, tokenizer.restore(setting, trained), out)
    tensors = llamagen_tensors(model.backbone, model.prefix)
    tensors["cls_embedding.uncond_embedding"] = model.null_caption.detach()
    save(
        out / "model.safetensors",
        half(tensors),
        {
            "family": "llamagen",
            "heads": setting.model.heads,
            "grid": [side, side],
            "pixels_per_token": factor,
            "caption_slots": setting.caption_slots,
            "prompt_keys": setting.prompt_keys,
            "defaults": asdict(setting.sampling),
            "trained_on": setting.name,
        },
    )
    save(
        out / "text_encoder.safetensors",
        {"word_embeddings.weight": model.words.weight.detach().contiguous()},
        {
            "words": captions.words,
            "stop_words": captions.stop_words(),
            "synonyms": captions.synonyms(),
            "nouns": captions.nouns(),
            "fills": captions.fills,
        },
    )


def write_tokenizer(setting: Setting, vq: VQModel, out: Path) -> None:
    """-> ``out``/vq.safetensors (fp16)."""
    out.mkdir(parents=True, exist_ok=True)
    config = {"family": "vq", "config": asdict(vq.config), "margin": setting.tokenizer.margin}
    save(out / "vq.safetensors", half(vq.state_dict()), config)


def write_continuous(
    setting: Setting, vae: KLModel, scale: float, words: Tensor, trained: Path, discrete: Path, out: Path
) -> None:
    """``trained``/masked_{model,drafter}.pt -> ``out``/{vae,model,small/model}.safetensors (fp16); copies the words."""
    (out / "small").mkdir(parents=True, exist_ok=True)
    about = {"family": "kl_vae", "scale": scale, "margin": setting.kl_vae.margin}
    save(out / "vae.safetensors", half(vae.state_dict()), about)
    shutil.copyfile(discrete / "text_encoder.safetensors", out / "text_encoder.safetensors")
    for cfg, name, file in (
        (setting.masked, "masked_model.pt", out / "model.safetensors"),
        (setting.masked_drafter, "masked_drafter.pt", out / "small" / "model.safetensors"),
    ):
        model = masked.restore(setting, cfg, words, trained / name)
        config = model.backbone.config
        head = {f"diffloss.{name}": tensor for name, tensor in model.head.state_dict().items()}
        save(
            file,
            half({**model.backbone.state_dict(), **head}),
            {
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
            },
        )


def llamagen_tensors(backbone: Backbone, prefix: nn.Module) -> dict[str, Tensor]:
    """The weights of a LlamaGen model under the names of the published files."""
    unpack(backbone)
    names = prefix.state_dict().items()
    return split_gates(backbone.state_dict()) | {f"cls_embedding.{name}": tensor for name, tensor in names}


def split_gates(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split w1_w3 of every feed-forward network into w1 (gate) and w3 (input), the inverse of ``join_gates``."""
    apart = {}
    for name, tensor in tensors.items():
        if ".w1_w3." in name:
            for part, half in zip(("w1", "w3"), tensor.chunk(2), strict=True):
                apart[name.replace("w1_w3", part)] = half
        else:
            apart[name] = tensor
    return apart


def half(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in fp16, ready to be written."""
    return {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in tensors.items()}


def save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Writes a safetensors file with settings as JSON metadata."""
    save_file(tensors, file, metadata={"specar": json.dumps(metadata)})
