"""The bundled continuous pair at the widths and depths of MAR-B, -L and -H: its own images at the larger model's cost.

A LayerNorm subtracts a mean, so added channels cannot be zero as in widen.py. Instead, each vector of the wide model is
the narrow model's vector repeated k times: mean and variance stay what they are, and weights are repeated along both
dimensions and divided by k along the inputs. Added layers compute with random weights and write nothing. In exact
arithmetic every prediction stays what it is. The number of tokens stays, too: 64, where the released models have 256.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from comfyui_specar.model_loaders.continuous_model import MaskedModel
from comfyui_specar.models.diffusion_head import DiffusionHead
from comfyui_specar.models.mar import MAR
from torch import Tensor, nn

from .sizes import built_as

WRITES = ("attn.proj", "mlp.fc2", "adaLN_modulation.1")  # the layers of a block that write its result, or its gate
SPREAD = 0.02  # standard deviation of the weights of added layers


class Shapes(NamedTuple):
    """Width of the transformer, blocks in its encoder and in its decoder; width and blocks of the diffusion head."""

    dim: int
    layers: int
    head_width: int
    head_depth: int

    @classmethod
    def of(cls, model: MaskedModel) -> Shapes:
        config, net = model.backbone.config, model.head.net
        return cls(config.dim, config.encoder_layers, net.input_proj.out_features, len(net.res_blocks))


SIZES = {"mar-b": Shapes(768, 12, 1024, 6), "mar-l": Shapes(1024, 16, 1280, 8), "mar-h": Shapes(1280, 20, 1536, 12)}


def shapes_for(pair: tuple[MaskedModel, MaskedModel], size: str) -> tuple[Shapes, Shapes]:
    """Shapes of target and drafter for a released size of the target.

    Widths are rounded up to multiples of the pair's own (MAR-L's 1024 becomes 1152 for a width of 192). The drafter
    grows by the same factors.
    """
    own, small = map(Shapes.of, pair)
    wanted = SIZES[size]
    factors = [-(-there // here) for there, here in zip(wanted, own, strict=True)]
    wide = own.dim * factors[0], wanted.layers, own.head_width * factors[2], wanted.head_depth
    return Shapes(*wide), Shapes(*(here * factor for here, factor in zip(small, factors, strict=True)))


@torch.no_grad()
def widen(model: MaskedModel, shapes: Shapes) -> MaskedModel:
    """A text-conditional MAR, on its device and in its dtypes, at the sizes of ``shapes``, whose widths are multiples
    of its own."""
    own = model.backbone.config
    config = replace(
        own,
        dim=shapes.dim,
        heads=own.heads * shapes.dim // own.dim,
        encoder_layers=shapes.layers,
        decoder_layers=shapes.layers,
    )
    with built_as(model.dtype, model.device):
        backbone = MAR(config)
    with built_as(model.head.dtype, model.device):
        head = DiffusionHead(
            own.channels,
            config.dim,
            shapes.head_width,
            shapes.head_depth,
            model.head.schedule.steps,
            first=model.head.first,
        )
    head.dtype = model.head.dtype
    large = copy(model)  # its prompts, defaults and units
    large._modules = dict(model._modules)
    for name, wide, narrow in (("backbone", backbone, model.backbone), ("head", head, model.head)):
        large._modules[name] = _filled(wide, narrow)
    return large


def _filled(large: nn.Module, small: nn.Module) -> nn.Module:
    """Gives the large module the parameters of the small one."""
    known = dict(small.named_parameters())
    for name, target in large.named_parameters():
        layer = name.rpartition(".")[0]
        if name in known:
            joined = _joined(layer)
            matrix = isinstance(large.get_submodule(layer), nn.Linear) and target.ndim == 2
            for part, values in zip(target.chunk(joined), known[name].chunk(joined), strict=True):
                part.copy_(_repeated(values, part.shape, matrix))
        elif layer.endswith(WRITES):
            target.zero_()
        elif target.ndim == 2:
            target.normal_(std=SPREAD)
    return large.eval().requires_grad_(False)


def _joined(layer: str) -> int:
    """Number of matrices that are joined along a layer's outputs: queries, keys and values; shift, scale and gate."""
    if "adaLN_modulation" in layer:
        return 2 if "final_layer" in layer else 3
    return 3 if layer.endswith("qkv") else 1


def _repeated(values: Tensor, shape: torch.Size, matrix: bool) -> Tensor:
    """``values`` as often as they fit into ``shape``; those of a matrix divided along its inputs."""
    times = [there // here for there, here in zip(shape, values.shape, strict=True)]
    return values.repeat(times) / (times[1] if matrix else 1)
