"""Switches for machines on which something that only saves time does harm: environment variables, read when needed."""

from __future__ import annotations

import os

NO_GRAPHS = "SPECAR_DISABLE_CUDA_GRAPHS"
NO_TRITON = "SPECAR_DISABLE_TRITON"


def on(name: str) -> bool:
    """Is an environment variable set to anything but 0?"""
    return os.environ.get(name, "0") not in ("", "0")
