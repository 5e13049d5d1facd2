"""Muon (Jordan et al., 2024), with the update scaled to AdamW's size (Liu et al., 2025, arXiv:2502.16982).

``torch.optim.Muon`` orthogonalises in bf16, which on CPUs without bf16 matrix units is far slower than fp32, and does
not support convolutions. This one uses bf16 only if it is fast, and treats a convolution as a matrix
[out, in * kernel].
"""

import math
import time
from functools import cache

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the reference implementation


@cache
def multiplies_bf16(device: str) -> bool:
    """Whether the device multiplies bf16 faster than fp32; of CPUs, AMD's with AVX512-BF16, Intel's with AMX."""
    if device != "cpu":
        return True
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(2048, 512, dtype=dtype)
        torch.mm(x, x.mT)
        begin = time.perf_counter()
        for _ in range(5):
            torch.mm(x, x.mT)
        seconds[dtype] = time.perf_counter() - begin
    return seconds[torch.bfloat16] < seconds[torch.float32]


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, rows, columns] -> approximately the nearest semi-orthogonal matrices (singular values near 1)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    x = x.bfloat16() if multiplies_bf16(x.device.type) else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; matrices of the same shape are batched."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for same in shapes.values():
                self._step_together(same, group)

    def _step_together(self, parameters: list[Tensor], group: dict) -> None:
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(parameter.grad, 1.0 - group["momentum"])
            directions.append(parameter.grad.lerp(momentum, group["momentum"]).flatten(1))  # Nesterov
        updates = orthogonalise(torch.stack(directions))
        scale = 0.2 * math.sqrt(max(updates.shape[-2:]))
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.sub_(update.view_as(parameter), alpha=group["lr"] * scale)


def split_parameters(module: nn.Module, keep_out: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices and convolutions for Muon, everything else for AdamW), of the parameters that require a gradient.

    ``keep_out`` names input and output layers, which AdamW trains.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in keep_out)
        (matrices if is_matrix else others).append(parameter)
    return matrices, others
