"""Modules that know their device."""

from __future__ import annotations

import torch
from torch import nn


def with_index(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors report it: cuda is cuda:0, or the current GPU."""
    given = torch.device(device)
    if given.type == "cuda" and given.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return given


class Placed(nn.Module):
    """A module that knows its device, with its index: ``cuda`` would differ from the device of every weight."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """The device it computes on. Set it when you move the module."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = with_index(device)
