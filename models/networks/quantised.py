"""Linear layers whose matrix takes a byte per number or half of one: see kernels/linear.py for the formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ...kernels.linear import GROUP, linear_narrow, stored_as

NARROW = {  # storage -> parts of the names of the matrices kept in it. fp8 and 4 bits are too coarse for heads.
    torch.int8: (".layers.", "backbone.output"),
    torch.float8_e4m3fn: (".layers.",),
    torch.uint4: (".layers.",),
}
_TOGETHER = 2**20  # numbers rounded at once: rounding makes several copies


@contextmanager
def fetch(weight: Tensor, scale: Tensor | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weight and scale of a NarrowLinear on a device, for use in this context."""
    yield weight.to(device), None if scale is None else scale.to(device)


class NarrowLinear(nn.Module):
    """Replaces a Linear [N, K] and takes over its bias. weight: as of ``to_bits``, ``quantise`` or ``quantise_groups``,
    scale: see kernels.linear.linear_narrow. inner: K, which groups may be padded to (None: that of the weight).
    fetch: how weight and scale come to the device of x, as the function of this name.

    comfy_cast_weights tells ComfyUI that it may leave the weights in main memory.
    """

    comfy_cast_weights = True

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: nn.Parameter | None,
        inner: int | None = None,
        fetch: Callable[..., AbstractContextManager[tuple[Tensor, Tensor | None]]] = fetch,
    ):
        super().__init__()
        self.fetch = fetch
        self.out_features, self.in_features = len(weight), inner or weight[0].numel()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    @property
    def format(self) -> str:
        """Of its numbers: int8, float8_e4m3fn or int4."""
        format = stored_as(self.weight)
        assert format is not None, "the weight is stored in few bits"
        return format

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        with self.fetch(self.weight, self.scale, x.device) as (weight, scale):
            product = linear_narrow(x, weight, scale)
        return product if self.bias is None else product + self.bias.to(x)


def narrow_names(module: nn.Module, storage: torch.dtype) -> list[str]:
    """Names of the Linear modules in a model whose matrices may be kept in ``storage``."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and any(part in name for part in NARROW[storage])
    ]


def largest_matrix(module: nn.Module) -> int:
    """Numbers in the largest matrix of a model's linear layers."""
    return max(
        layer.out_features * layer.in_features
        for layer in module.modules()
        if isinstance(layer, (nn.Linear, NarrowLinear))
    )


def bytes_in(module: nn.Module, dtype: torch.dtype, storage: torch.dtype | None, apart: nn.Module | None = None) -> int:
    """Bytes of a model's weights in ``dtype``, its large matrices in ``storage`` (None: as the others), in whatever the
    model itself is loaded, or on the meta device. apart: a module of it that is left out."""
    total, shared = 0, set()
    for name, layer in module.named_modules():
        if layer is apart:
            continue
        matrix = isinstance(layer, (nn.Linear, NarrowLinear))
        for part, parameter in layer.named_parameters(recurse=False):
            if isinstance(layer, NarrowLinear) and part == "scale":
                continue
            if part == "weight" and matrix and storage and any(kept in name for kept in NARROW[storage]):
                total += _bytes_of(layer.out_features, layer.in_features, storage)
            elif parameter not in shared:  # a head in 8 bits no longer shares the weights of the embedding
                shared.add(parameter)
                whole = matrix and part == "weight"
                total += (layer.out_features * layer.in_features if whole else parameter.numel()) * dtype.itemsize
    return total


def _bytes_of(rows: int, columns: int, storage: torch.dtype) -> int:
    """Bytes of a narrow matrix with its scales."""
    if storage == torch.uint4:
        return rows * math.ceil(columns / GROUP) * (GROUP // 2 + 4)
    return rows * columns + (4 * rows if storage == torch.int8 else 0)


def to_bits(weight: Tensor) -> Tensor:
    """A matrix as it is kept: int8 itself, or the bits of fp8 as uint8, which every device supports."""
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight


def narrow_matrix(weight: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and scale of a NarrowLinear for a matrix, rounded to ``storage``."""
    if storage == torch.float8_e4m3fn:
        return to_bits(weight.to(storage)), None
    return quantise(weight) if storage == torch.int8 else quantise_groups(weight)


def put_narrow(module: nn.Module, name: str, weight: Tensor, scale: Tensor | None) -> None:
    """Replace a Linear by a NarrowLinear. weight and scale: see there. It keeps the ``fetch`` of the Linear's class."""
    above, _, last = name.rpartition(".")
    linear = module.get_submodule(name)
    narrow = NarrowLinear(weight, scale, linear.bias, linear.in_features, getattr(linear, "fetch", fetch))
    setattr(module.get_submodule(above), last, narrow)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] rounded to the nearest of 255 levels between -m and m, m the largest magnitude of the row.

    Returns int8 [N, K] and scales [N] (fp32): the level is int8 x scale, and the largest error half a scale. A row with
    values that are not finite has a scale that is not finite.
    """
    return _in_parts(_quantise, weight)


def quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] rounded to the nearest of 16 levels between minimum and maximum of each group.

    Returns numbers and scales as kernels/linear.py describes them: a number is its level x step + minimum, and the
    largest error half a step, but for the rounding of step and minimum to bf16. A group with values that are not finite
    has a scale that is not finite.
    """
    return _in_parts(_quantise_groups, weight)


def fits_groups(columns: int, groups: int) -> bool:
    """Whether a matrix of 4 bits with ``groups`` along its columns can be kept: see ``join_groups``."""
    return columns % groups == 0 and columns // groups % GROUP == 0


def join_groups(levels: Tensor, step: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and scale of a NarrowLinear for a matrix that is in 4 bits already.

    levels: uint8 [N, K], 0 to 15; a number is level x step + minimum [N, groups]. All groups have one size, a multiple
    of GROUP. Step and minimum are rounded to bf16.
    """
    lower, upper = levels.unflatten(1, (-1, GROUP)).chunk(2, dim=-1)
    scale = torch.stack((step, minimum), dim=-1).bfloat16()
    return lower | upper << 4, scale.repeat_interleave(levels.shape[1] // GROUP // step.shape[1], dim=1)


def _in_parts(round_rows: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    parts = [round_rows(part) for part in weight.split(max(1, _TOGETHER // max(1, weight.shape[1])))]
    rounded, scales = zip(*parts, strict=True)
    return torch.cat(rounded), torch.cat(scales)


def _quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    if short := -wide.shape[1] % GROUP:  # the last number is repeated, which does not change its group's range
        wide = torch.cat((wide, wide[:, -1:].expand(-1, short)), dim=1)
    groups = wide.unflatten(1, (-1, GROUP))
    minimum, maximum = groups.aminmax(dim=-1, keepdim=True)
    minimum = minimum.bfloat16()
    step = ((maximum - minimum) / 15).bfloat16().clamp(min=torch.finfo(torch.float32).tiny)  # > 0 if all are equal, too
    lower, upper = (groups - minimum).div_(step).round_().clamp_(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return lower | upper << 4, torch.cat((step, minimum), dim=-1)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # > 0 for rows of zeros, too
    return (wide / scale[:, None]).round_().to(torch.int8), scale
