"""Decoded images as the reports take them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from torch import Tensor

from ..samplers.trace import Trace

Images: TypeAlias = (
    Tensor | np.ndarray
)  # [B, H, W, C] or [H, W, C], C >= 3; floating point in 0..1 or uint8; on any device


def as_bytes(images: Images) -> np.ndarray:
    """RGB images [B, H, W, 3] (uint8) of what an image decoder returns, or of an array; further channels are left out.

    Raises ValueError where the shape or the dtype is not that of Images.
    """
    if isinstance(images, Tensor):
        images = (images.float() if images.is_floating_point() else images).cpu().numpy()  # numpy has no bf16
    if images.ndim not in (3, 4) or images.shape[-1] < 3:
        raise ValueError(f"image has the shape {list(images.shape)}; it must be [B, H, W, 3] or [H, W, 3].")
    if np.issubdtype(images.dtype, np.floating):
        images = (images * 255).round().clip(0, 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise ValueError(f"image has the dtype {images.dtype}; it must be floating point (0 to 1) or uint8.")
    return images[None, ..., :3] if images.ndim == 3 else images[..., :3]


def batch_size(trace: Trace) -> int:
    """Images of a run."""
    return trace.positions["source"].shape[0]


def check_images(trace: Trace, count: int) -> None:
    """Raise ValueError unless ``count`` images are as many as the trace has."""
    if count != (expected := batch_size(trace)):
        raise ValueError(
            f"The trace is of {expected} image{'s' * (expected > 1)}, but image has {count}. "
            "Use the images that were decoded from the same run."
        )
