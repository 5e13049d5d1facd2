"""Writes the files of the bundled model in the published key layouts, with settings that shapes do not show."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...models.backbone import split_gates
from . import autoregressive, tokenizer
from .captions import COLOUR_SYNONYMS, STOP_WORDS, Captions
from .settings import BACKGROUNDS, IMAGE_SIZE, Setting


def write(setting: Setting, captions: Captions, trained: Path, out: Path) -> None:
    """``trained``/tokenizer.pt and model.pt -> ``out``/{vq,model,text_encoder}.safetensors (fp16, word table fp32)."""
    out.mkdir(parents=True, exist_ok=True)
    vq = tokenizer.restore(setting, trained)
    model = autoregressive.restore(setting, len(captions.words), trained)
    side = IMAGE_SIZE // vq.config.factor
    save(
        out / "vq.safetensors",
        half(vq.state_dict()),
        {"family": "vq", "config": asdict(vq.config), "margin": setting.tokenizer.margin},
    )
    tensors = split_gates(model.backbone.state_dict())
    tensors |= {f"cls_embedding.{name}": tensor for name, tensor in model.prefix.state_dict().items()}
    tensors["cls_embedding.uncond_embedding"] = model.null_caption.detach()
    save(
        out / "model.safetensors",
        half(tensors),
        {
            "family": "llamagen",
            "heads": setting.model.heads,
            "grid": [side, side],
            "pixels_per_token": vq.config.factor,
            "caption_slots": setting.caption_slots,
            "defaults": asdict(setting.sampling),
            "trained_on": setting.name,
        },
    )
    save(
        out / "text_encoder.safetensors",
        {"word_embeddings.weight": model.words.weight.detach().contiguous()},
        {
            "words": captions.words,
            "stop_words": STOP_WORDS,
            "synonyms": captions.synonyms(),
            "backgrounds": [*BACKGROUNDS, *COLOUR_SYNONYMS],
        },
    )


def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in fp16, ready to be written."""
    return {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in tensors.items()}


def save(file: Path, tensors: dict[str, Tensor], metadata: dict) -> None:
    """Writes a safetensors file with settings as JSON metadata."""
    save_file(tensors, file, metadata={"specar": json.dumps(metadata)})
