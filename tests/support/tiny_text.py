"""A language model that generates, of no family: every switch of the backbone, forced tokens after rows and image."""

from __future__ import annotations

import torch
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.positions import SequencePositions
from comfyui_specar.models.networks.prefix import TextPrefix
from comfyui_specar.models.text.prompt_encoders import TokenEncoder
from comfyui_specar.samplers.contract import SamplingParams
from torch import Tensor

from .tiny import fill

CODES, WORDS, FIRST = 12, 40, 8  # image codes; words of the language model, of which the codes are 8 .. 19
ROW_END, ENDINGS = 30, (31, 33)
BEGIN = 5  # the word before every image
GRIDS = ((2, 3), (3, 2), (4, 3))  # the first is the default


class Letters:
    """A tokenizer without special tokens."""

    def specials_in(self, text: str) -> list[str]:
        return []


def null(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """The prompt without a prompt: two words and the image's size."""
    return torch.tensor([1.0, *grid, BEGIN]).view(1, -1, 1)


def write(text: str, grid: tuple[int, int]) -> list[int]:
    """A letter is a word; the size of the image is part of every prompt."""
    return [34 + ord(letter) % 6 for letter in text] + [*grid, BEGIN]


def text_model(
    codes: int = CODES, head_norms: int = 4, sharpness: float = 1.0, family: str = "text", **config
) -> DiscreteModel:
    """The model with fixed weights; ``config``: entries of BackboneConfig. sharpness scales the logits."""
    sizes = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "kv_heads": 2, "qkv_bias": True} | config
    word_ids = (*range(FIRST, FIRST + codes), ROW_END, *ENDINGS)
    backbone = Backbone(BackboneConfig(vocab=len(word_ids), head_norms=head_norms, **sizes))
    model = DiscreteModel(
        backbone,
        TextPrefix(WORDS, backbone.config.dim, null),
        family,
        GRIDS[0],
        SamplingParams(cfg=3.0, top_k=min(8, codes)),
        TokenEncoder(Letters(), write, GRIDS[0]),
        positions=SequencePositions(500.0),
        grids=GRIDS,
        row_ends=True,
        endings=len(ENDINGS),
        longest=64,
        word_ids=word_ids,
    )
    weights = {name: fill(name.replace("backbone.", ""), tuple(p.shape)) for name, p in model.state_dict().items()}
    weights["backbone.tok_embeddings.weight"] = weights["prefix.embedding.weight"][list(word_ids)]
    weights["backbone.output.weight"] *= sharpness
    model.load_state_dict(weights)
    model.attach_codebook(fill("codebook embedding", (codes, 4)), 16)
    return model.eval().requires_grad_(False)
