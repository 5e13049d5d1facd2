"""The packages that stages need, and going on without those that only files and images need.

A bare machine may have nothing but torch and Triton. The pack's modules import ``safetensors`` and ``einops`` at their
top, as both come with ComfyUI; models with random weights use neither. So where they are missing an empty package takes
their place, whose functions raise NotRun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .findings import NotRun

WANTED = {  # package -> what is not run without it
    "triton": "the Triton kernels",
    "safetensors": "whatever reads the bundled models, and LANTERN",
    "einops": "whatever decodes images",
    "numpy": "LANTERN, ComfyUI",
    "PIL": "ComfyUI",
    "aiohttp": "ComfyUI",
    "transformers": "ComfyUI",
}
_IMPORTED = {  # module -> functions that the pack imports from it
    "safetensors": ("safe_open",),
    "safetensors.torch": ("load", "load_file", "save", "save_file"),
    "einops": ("rearrange", "repeat"),
}


def missing() -> dict[str, str]:
    """Packages that are not here, with what is not run for that reason."""
    return {name: what for name, what in WANTED.items() if not here(name)}


def here(name: str) -> bool:
    """Is a package installed?"""
    module = sys.modules.get(name)
    return bool(module.__spec__ if module else find_spec(name))


def need(*names: str) -> None:
    """Raise NotRun if one of the packages is not here."""
    absent = [name for name in names if not here(name)]
    if absent:
        raise NotRun(f"needs {', '.join(absent)}, which is not installed")


def go_on_without() -> None:
    """Put empty packages in the place of the missing ones that the pack imports."""
    for name in [name for name in _IMPORTED if not here(name.partition(".")[0])]:
        module = sys.modules[name] = ModuleType(name)  # without a spec, by which ``here`` knows it
        for function in _IMPORTED[name]:
            setattr(module, function, _refusing(name.partition(".")[0]))
        if name == "safetensors":
            vars(module)["SafetensorError"] = OSError


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_given: Any, **_named: Any) -> Any:
        need(name)

    return refuse
