"""Rotations of ComfyUI's ConvRot formats, which spread outliers over a group before it is rounded.

Documented by Comfy-Org/comfy-kitchen, comfy_kitchen/tensor/int8_utils.py: a weight [N, K] is stored as W @ H^T, in
groups of 4^n numbers along K, where H is the Kronecker product of n matrices H4 / 2. Row i of H4 has a -1 at 3 - i, and
else ones. H is symmetric and orthogonal, so it is its own inverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...limits.limits import FileError, quote

GROUP = 256  # numbers that are rotated together, if a file does not tell


def rotate_groups(weight: Tensor, group: int) -> Tensor:
    """A matrix [N, K] (fp32) times the rotation of every ``group`` (see ``rotation_of``) along K, which undoes itself.

    Each of the n steps adds four numbers and halves, so an error of n x 2^-22 of the largest number is possible.
    """
    within = 1
    while within < group:
        first, second, third, fourth = weight.unflatten(1, (-1, 4, within)).unbind(2)
        half = ((first + second) + (third + fourth)) / 2
        weight = torch.stack((half - fourth, half - third, half - second, half - first), dim=2).flatten(1)
        within *= 4
    return weight


def rotation_of(name: str, options: dict[str, Any], columns: int) -> int:
    """The size of the groups that a layer's description ``name`` states. Raises FileError for one that is no power of
    4, or does not divide K."""
    group = options.get("convrot_groupsize", GROUP)
    fits = type(group) is int and 4 <= group <= columns and columns % group == 0
    if not fits or group & (group - 1) or group.bit_length() % 2 == 0:
        raise FileError(
            f"{name} cannot be read: convrot_groupsize is {quote(group)}, not a power of 4 that divides {columns} "
            "columns. Download it again."
        )
    return group
