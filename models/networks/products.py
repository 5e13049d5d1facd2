"""A linear layer with its norm, gate and residual, in the fewest launches on a GPU that runs Triton."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...device import batch_invariant, cpu, dispatch
from ...kernels.gating import gated
from ...kernels.linear import FEW, few_rows, rms_norm
from .quantised import NarrowLinear

FEW_WIDE = 16  # rows; for more of them torch's own kernels multiply a 16-bit matrix faster
Operands = tuple[Tensor, Tensor | None, Tensor | None]  # weight, scale and bias of a linear layer


def product(
    linear: nn.Module,
    x: Tensor,
    norm: nn.Module | None = None,
    gate: bool = False,
    residual: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """linear(norm(x)) for x [..., K], ``gated`` with gate, plus residual. norm: an RMSNorm or Identity.

    in_place: nobody needs ``residual`` afterwards, so it may be overwritten, which saves a launch.
    """
    x = x if norm is None else apply_norm(norm, x)
    own = isinstance(linear, nn.Linear) and _own_weights(linear, x)
    if _fast(x):
        rows, added = x.flatten(0, -2), None if residual is None else residual.flatten(0, -2)
        if operands := _operands(linear, rows, own):
            return few_rows(rows, *operands, gate, added).unflatten(0, x.shape[:-1])
        if own and added is not None and not gate and linear.bias is None:
            add = added.addmm_ if in_place else added.addmm
            return add(rows, linear.weight.t()).unflatten(0, x.shape[:-1])
    y = cpu.linear(linear, x, own) if x.device.type == "cpu" else linear(x)
    if gate:
        y = gated(y)
    return y if residual is None else residual + y


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x) for x [..., K]. norm: an RMSNorm or Identity. (In some versions of torch the order of sums depends on the
    number of rows.)"""
    if isinstance(norm, nn.Identity):
        return x
    return rms_norm(x, norm.weight, norm.eps) if _fast(x) and _own_weights(norm, x) else norm(x)


def _fast(x: Tensor) -> bool:
    """Do the Triton kernels compute what is made of x?"""
    return x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled() and dispatch.runs_triton(x.device)


def _operands(linear: nn.Module, x: Tensor, own: bool) -> Operands | None:
    """The operands of ``few_rows`` for a layer, or None if the layer must be called: for many rows, for layers of other
    classes, and where ComfyUI patches or moves the weights on use. own: see ``_own_weights``, of a Linear."""
    if isinstance(linear, NarrowLinear):
        if linear.weight.device == x.device and (len(x) <= FEW or batch_invariant.is_wanted()):
            return linear.weight, linear.scale, linear.bias
    elif own and (len(x) <= FEW_WIDE or batch_invariant.is_wanted()):
        return linear.weight, None, linear.bias
    return None


def _own_weights(layer: nn.Module, x: Tensor) -> bool:
    """Are the parameters of a layer unpatched, on the device of x and in its dtype?"""
    if getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None):  # by ComfyUI, as for LoRA
        return False
    parameters = layer.weight, getattr(layer, "bias", None)
    return all(p is None or p.device == x.device and p.dtype == x.dtype for p in parameters)
