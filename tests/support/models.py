"""Models as tests ask them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from comfyui_specar.model_loaders.families.eagle import EagleDrafter
from comfyui_specar.models.continuous_model import MaskedModel
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.positions import rotation_at
from comfyui_specar.models.text.prompt_encoders import features_of
from comfyui_specar.models.text.prompts import Conditioning, Prompted
from torch import Tensor


def of_ids(model: Prompted, ids: Sequence[int]) -> Conditioning:
    """CONDITIONING of a language model's token ids, special tokens included, without a template."""
    return model.encode_features(features_of(ids))


@torch.inference_mode()
def teacher_forced(model: DiscreteModel, conditioning: Conditioning, tokens: Tensor) -> Tensor:
    """The prediction [B, S, V+] (fp32) for each token of the sequence given those before it, in one pass.

    tokens: an image [B, h, w], to which the layout's special tokens are added, or a whole sequence [B, S] of the
    default grid, such as one that begins with a preview.
    """
    tokens = tokens.to(model.device)
    grid = tuple(tokens.shape[1:]) if tokens.ndim == 3 else model.grid
    prompt = model.unpack_prompts(conditioning, None, len(tokens), grid)[0]
    layout = model.layout(*grid, prompt.images)
    if tokens.ndim == 3:
        assert not layout.lead, "the preview is missing"
        tokens = layout.keeping(tokens, torch.ones_like(tokens, dtype=torch.bool)).forced
    return model(model.prefix(prompt.features).expand(len(tokens), -1, -1), tokens, grid, prompt.images)


@torch.inference_mode()
def eagle_features(drafter: EagleDrafter, hidden: Tensor, ids: Tensor, prompt: int = 0) -> Tensor:
    """Features [R, T, D] that an EAGLE drafter predicts from hidden [R, T, D] and ids [R, T] (of its embedding) in one
    causal pass.

    hidden[:, t] is the target's hidden state one position before ids[:, t]; the feature predicts the one at it. The
    first ``prompt`` pairs belong to the prompt (id 0, or text ids), the others to the image tokens from position 0 on.
    """
    model, images, head_dim = drafter.model, ids.shape[1] - prompt, drafter.module.config.head_dim
    rotation = rotation_at(model.positions, prompt, images, model.grid, head_dim, drafter.device)
    return drafter.module(hidden.to(drafter.device, drafter.dtype), ids.to(drafter.device), rotation)


@torch.inference_mode()
def condition_vectors(model: MaskedModel, conditioning: Conditioning, tokens: Tensor, known: Tensor) -> Tensor:
    """z [B, S, D], for the head of a masked model, of tokens [B, S, C], of which only ``known`` [B, S] (bool) are
    visible."""
    state = model.start(conditioning, None, len(tokens), model.grid, guided=False)
    return model.condition_vectors(state, tokens, known[:, None], int(known.sum(1).max()))[0, :, 0]
