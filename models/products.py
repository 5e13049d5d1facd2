"""A linear layer with its norm, gate and residual: one launch on a GPU that runs Triton."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch
from ..kernels.gating import gated
from ..kernels.linear import FEW, few_rows
from .quantised import NarrowLinear

FEW_WIDE = 64  # rows; for more of them torch's own kernels multiply a 16-bit matrix faster
Operands = tuple[Tensor, Tensor | None, Tensor | None]  # weight, scale and bias of a linear layer


def product(
    linear: nn.Module, x: Tensor, norm: nn.Module | None = None, gate: bool = False, residual: Tensor | None = None
) -> Tensor:
    """linear(norm(x)) for x [..., K], ``gated`` with gate, plus residual. norm: an RMSNorm or Identity."""
    norm = None if isinstance(norm, nn.Identity) else norm
    operands = _operands(linear, x)
    if operands is not None and (norm is None or _own_weights(norm, x)):
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        added = None if residual is None else residual.flatten(0, -2)
        return few_rows(x.flatten(0, -2), *operands, weight, eps, gate, added).unflatten(0, x.shape[:-1])
    y = x if norm is None else norm(x)
    if y.device.type == "cpu":
        y = cpu.linear(linear, y, isinstance(linear, nn.Linear) and _own_weights(linear, y))
    else:
        y = linear(y)
    if gate:
        y = gated(y)
    return y if residual is None else residual + y


def _operands(linear: nn.Module, x: Tensor) -> Operands | None:
    """The operands of ``few_rows`` for a layer, or None if the layer must be called: for many rows, on other devices,
    in training, for layers of other classes, and where ComfyUI patches or moves the weights on use."""
    if x.dtype not in (torch.bfloat16, torch.float16) or torch.is_grad_enabled() or not dispatch.runs_triton(x.device):
        return None
    rows = x.numel() // x.shape[-1]
    if isinstance(linear, NarrowLinear):
        here = linear.weight.device == x.device and rows <= FEW
        return (linear.weight, linear.scale, linear.bias) if here else None
    if isinstance(linear, nn.Linear) and rows <= FEW_WIDE and _own_weights(linear, x):
        return linear.weight, None, linear.bias
    return None


def _own_weights(layer: nn.Module, x: Tensor) -> bool:
    """Are the parameters of a layer unpatched, on the device of x and in its dtype?"""
    if getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None):  # by ComfyUI, as for LoRA
        return False
    parameters = layer.weight, getattr(layer, "bias", None)
    return all(p is None or p.device == x.device and p.dtype == x.dtype for p in parameters)
