"""Where a module computes."""

from __future__ import annotations

import torch
from torch import nn


def numbered(device: torch.device | str) -> torch.device:
    """The device with its number, as tensors on it tell it: cuda is cuda:0, unless another GPU is the current one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class Placed(nn.Module):
    """A module that knows its device, and by its number whoever sets it: ``cuda`` would differ from every weight's."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where it computes; whoever moves the module sets it."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = numbered(device)
