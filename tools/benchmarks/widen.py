"""The bundled model at a larger one's shapes: its own images and its own acceptance, at the larger one's cost.

Channels, heads and columns that are added are zero, and added layers compute with random weights and write nothing. An
RMSNorm takes its mean square over all channels, so its weights are divided by sqrt(D / d), and its epsilon by D / d. In
exact arithmetic the logits stay what they are, and everything that is added is multiplied all the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import torch
from comfyui_specar.model_loaders.families.eagle import EagleDrafter
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.drafters import ModelDrafter
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.eagle import Eagle
from comfyui_specar.models.networks.prefix import CaptionPrefix
from torch import Tensor, nn

from .sizes import built_as

JOINED = {"wqkv": (3, 0), "w1_w3": (2, 0), "fc": (2, 1)}  # matrices of several parts: how many, along which dimension
SPREAD = 0.02  # standard deviation of the weights of added layers


def config_of(shapes: BackboneConfig, own: BackboneConfig) -> BackboneConfig:
    """``own`` at the width, layers and columns of ``shapes``, with as many heads of its own width as fit.

    Raises ValueError if these are smaller, or if the width is no multiple of a head's.
    """
    if shapes.dim < own.dim or shapes.layers < own.layers or shapes.ffn_dim < own.ffn_dim or shapes.dim % own.head_dim:
        raise ValueError(
            f"The model has {own.layers} layers, a width of {own.dim} with heads of {own.head_dim}, and {own.ffn_dim} "
            f"columns; it can be widened to at least as much, in whole heads, but not to {shapes}."
        )
    return replace(
        own,
        dim=shapes.dim,
        layers=shapes.layers,
        heads=shapes.dim // own.head_dim,
        ffn_dim=shapes.ffn_dim,
        norm_eps=own.norm_eps * own.dim / shapes.dim,
    )


def widen(model: DiscreteModel, shapes: BackboneConfig) -> DiscreteModel:
    """A text-conditional model of LlamaGen's layout, on its device and in its dtype, at the sizes of ``shapes``.

    Raises ValueError if these are smaller, or do not fit its heads.
    """
    config = config_of(shapes, model.backbone.config)
    with built_as(model.dtype, model.device):
        prefix = CaptionPrefix(model.prefix.uncond_embedding.shape[1], model.prefix.slots, config.dim)
        large = DiscreteModel(
            Backbone(config),
            prefix,
            model.family,
            model.grid,
            model.defaults,
            model.prompt_encoder,
            model.pixels_per_token,
            positions=model.positions,
        )
    prefix.uncond_embedding.copy_(model.prefix.uncond_embedding)
    large.device, large.dtype = model.device, model.dtype
    if model.codebook is not None:
        large.attach_codebook(model.codebook, model.pixels_per_token)
    return _filled(large, model, config.dim / model.backbone.config.dim)


def widen_eagle(drafter: EagleDrafter, model: DiscreteModel) -> EagleDrafter:
    """An EAGLE drafter of a model at the sizes of the widened ``model``."""
    own, shapes = drafter.module.config, model.backbone.config
    config = replace(
        own,
        dim=shapes.dim,
        heads=shapes.heads,
        kv_heads=0,
        ffn_dim=shapes.ffn_dim,
        norm_eps=own.norm_eps * own.dim / shapes.dim,
    )
    with built_as(drafter.dtype, drafter.device):
        module = Eagle(config, bias=drafter.module.fc.bias is not None)
    module.device = drafter.device
    return EagleDrafter(_filled(module, drafter.module, config.dim / own.dim), model, drafter.dtype, drafter.padded)


def widen_small(drafter: ModelDrafter, small: BackboneConfig, model: DiscreteModel) -> ModelDrafter:
    """A small model as the drafter of the widened ``model``, wider by the same factor.

    small: of the model before it was widened. Raises ValueError if the factor is no whole number.
    """
    own, (factor, rest) = drafter.module.backbone.config, divmod(model.backbone.config.dim, small.dim)
    if rest:
        raise ValueError(
            f"A small model can be widened by whole numbers, but not from {small.dim} to "
            f"{model.backbone.config.dim} channels."
        )
    return ModelDrafter(widen(drafter.module, replace(own, dim=factor * own.dim, ffn_dim=factor * own.ffn_dim)))


@torch.no_grad()
def _filled(large: nn.Module, small: nn.Module, ratio: float) -> nn.Module:
    """Gives the large module the parameters of the small one. ratio: how many times wider it is."""
    known = dict(small.named_parameters())
    for name, target in large.named_parameters():
        layer = name.rpartition(".")[0]
        if name in known:
            target.zero_()
            for part, values in zip(_parts(layer, target), _parts(layer, known[name]), strict=True):
                part[tuple(map(slice, values.shape))] = values
            if layer.endswith("norm"):
                target /= sqrt(ratio)  # the mean square is taken over more channels
        elif layer.endswith(("attention.wo", "feed_forward.w2")):
            target.zero_()
        elif target.ndim == 2:
            target.normal_(std=SPREAD)
    return large.eval().requires_grad_(False)


def _parts(layer: str, parameter: Tensor) -> tuple[Tensor, ...]:
    count, dim = JOINED.get(layer.rpartition(".")[2], (1, 0))
    return parameter.chunk(count, dim) if parameter.ndim > dim else (parameter,)
