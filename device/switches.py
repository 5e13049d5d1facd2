"""Environment variables that switch off optimisations on machines where they fail. They are read when needed."""

from __future__ import annotations

import os

NO_GRAPHS = "SPECAR_DISABLE_CUDA_GRAPHS"
NO_TRITON = "SPECAR_DISABLE_TRITON"


def on(name: str) -> bool:
    """Is an environment variable set to anything but 0?"""
    return os.environ.get(name, "0") not in ("", "0")
