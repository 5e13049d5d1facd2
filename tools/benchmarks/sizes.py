"""Models of released sizes with random weights, built on the spot by the pack's own classes.

Only the cost of a pass can be measured on them: how many guesses such a model accepts means nothing. The head is scaled
so that the distributions have about the entropy of a trained model's (5 of the 9.7 nats of 16384 codes), because
distributions that are nearly even would let every guess pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfyui_specar.model_loaders.families.eagle import EagleDrafter
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.eagle import Eagle
from comfyui_specar.models.networks.janus import CodeEmbedding, CodeHead
from comfyui_specar.models.networks.positions import GridPositions, SequencePositions
from comfyui_specar.models.networks.prefix import CaptionPrefix, TextPrefix
from comfyui_specar.models.networks.quantised import narrow_matrix, narrow_names, put_narrow
from comfyui_specar.models.text.prompt_encoders import MissingEncoder, features_of
from comfyui_specar.samplers.contract import SamplingParams
from torch import nn

PROMPT = 24  # tokens of the prompt
WORDS = 1000  # of the table that prompts are looked up in: a pass does not touch it
CAPTION = 2048  # width of T5's features
LOGIT_SPREAD = 3.0  # standard deviation of the logits


@dataclass(frozen=True)
class Size:
    """A released model's shapes, and the settings its authors generate with. specials: (end of a row?, others)."""

    family: str
    config: BackboneConfig
    grid: tuple[int, int]
    defaults: SamplingParams
    specials: tuple[bool, int] = (False, 0)
    theta: float = 10000.0

    @property
    def codes(self) -> int:
        return self.config.vocab - sum(self.specials)


def _llamagen(dim: int, layers: int, heads: int, ffn: int, side: int) -> Size:
    return Size(
        "llamagen-t2i",
        BackboneConfig(dim, layers, heads, ffn, 16384),
        (side, side),
        SamplingParams(cfg=7.5, top_k=1000),
    )


def _janus(dim: int, layers: int, heads: int, ffn: int) -> Size:
    return Size("janus-pro", BackboneConfig(dim, layers, heads, ffn, 16384, 1e-6), (24, 24), SamplingParams(cfg=5.0))


SIZES = {
    "llamagen-b": _llamagen(768, 12, 12, 2048, 16),
    "llamagen-l": _llamagen(1024, 24, 16, 2816, 16),
    "llamagen-xl": _llamagen(1280, 36, 20, 3584, 32),
    "janus-pro-1b": _janus(2048, 24, 16, 5632),
    "janus-pro-7b": _janus(4096, 30, 32, 11008),
    "lumina-mgpt-7b": Size(
        "lumina-mgpt",
        BackboneConfig(4096, 32, 32, 11008, 8192 + 2, head_norms=1),
        (48, 48),
        SamplingParams(cfg=3.0, top_k=2000),
        (True, 1),
    ),
    "emu3-8b": Size(
        "emu3",
        BackboneConfig(4096, 32, 32, 14336, 32768 + 4, kv_heads=8),
        (90, 90),
        SamplingParams(cfg=3.0, top_k=2048),
        (True, 3),
        theta=1e6,
    ),
}


@contextmanager
def built_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules made meanwhile have this dtype, are on this device, and are the same each time."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build(
    size: Size, dtype: torch.dtype, device: torch.device, storage: torch.dtype | None = None, operations: Any = nn
) -> DiscreteModel:
    """A model with random weights, as the loaders would build it; storage: of the matrices of its layers, as theirs;
    operations: what its layers are made of."""
    config = size.config
    with built_as(dtype, device):
        backbone = Backbone(config, operations)
        if operations is not nn:  # ComfyUI's layers have the numbers that were in their memory
            for weight in backbone.parameters():
                nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else nn.init.ones_(weight)
        if size.family == "janus-pro":
            backbone.tok_embeddings = CodeEmbedding(size.codes, 8, config.dim, nn)
            backbone.output = CodeHead(config.dim, config.dim, size.codes, nn)
        grid_like = size.family.startswith("llamagen")
        prefix = (
            CaptionPrefix(CAPTION, PROMPT, config.dim)
            if grid_like
            else TextPrefix(WORDS, config.dim, lambda features, _grid: features)
        )
    model = DiscreteModel(
        backbone,
        prefix,
        size.family,
        size.grid,
        size.defaults,
        MissingEncoder("Random weights read no prompts."),
        positions=GridPositions() if grid_like else SequencePositions(size.theta),
        row_ends=size.specials[0],
        endings=size.specials[1],
    )
    model.device, model.dtype = device, dtype
    model.attach_codebook(torch.randn(size.codes, 8, generator=torch.Generator().manual_seed(0)), 16)
    with torch.no_grad():
        head = backbone.output.fc2 if size.family == "janus-pro" else backbone.output
        head.weight.normal_()
        sample = backbone.logits(backbone.norm(torch.randn(1, 64, config.dim, dtype=dtype, device=device)))
        head.weight.mul_(LOGIT_SPREAD / sample.std())
    if storage:
        narrow(model, storage)
    return model.eval().requires_grad_(False)


def narrow(model: DiscreteModel, storage: torch.dtype) -> None:
    """Keep the large matrices in a narrow storage."""
    for name in narrow_names(model, storage):
        weight = model.get_submodule(name).weight.detach()
        put_narrow(model, name, *narrow_matrix(weight, storage))


def prompt(model: DiscreteModel) -> list:
    """CONDITIONING of PROMPT random tokens."""
    if isinstance(model.prefix, TextPrefix):
        return model.encode_features(features_of(range(1, PROMPT + 1)))
    return model.encode_features(torch.randn(1, PROMPT, CAPTION, generator=torch.Generator().manual_seed(1)))


def eagle(model: DiscreteModel) -> EagleDrafter:
    """A drafter with random weights for a model: one block of the model's own shapes, as LANTERN's authors train."""
    config = replace(model.backbone.config, layers=1)
    with built_as(model.dtype, model.device):
        module = Eagle(config)
    module.device = model.device
    return EagleDrafter(module.eval().requires_grad_(False), model, model.dtype, padded=False)
