"""Launching Triton kernels on what was allocated in a graph that is being captured (see graphs.allocates_in_graphs).

It has an address, but no memory before the graph runs. Triton asks the driver about every tensor that it is given,
learns that this one is not on the GPU, and refuses it. It does not ask about addresses, so kernels are launched with
these.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import graphs


def prepare(module: ModuleType) -> None:
    """Let the Triton kernels of a module be launched in such captures, too."""
    kind = getattr(sys.modules.get("triton.runtime"), "JITFunction", ())  # whoever has kernels has imported it
    for value in vars(module).values():
        if isinstance(value, kind) and "run" not in vars(value):
            prepare_kernel(value)


def prepare_kernel(kernel: Any) -> None:
    """See ``prepare``. kernel: a ``triton.runtime.JITFunction``."""

    def launch(*args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        compiled = type(kernel).run(kernel, *args, grid=grid, warmup=warmup or _without_memory(), **options)
        if not warmup and _without_memory():
            compiled[(*grid, 1, 1)[:3]](*(_address(value) for value in _arguments(kernel, args, options)))
        return compiled

    kernel.run = launch


def _without_memory() -> bool:
    """Has what is allocated now no memory yet?"""
    return graphs.recording() and graphs.allocates_in_graphs(torch.device("cuda"))


def _arguments(kernel: Any, args: tuple, options: dict[str, Any]) -> list[Any]:
    """What a compiled kernel is launched with: up to Triton 3.2, without the constants that it was compiled for."""
    names = kernel.signature.parameters
    bound = kernel.signature.bind(*args, **{name: value for name, value in options.items() if name in names})
    bound.apply_defaults()
    with_constants = hasattr(kernel, "device_caches")
    return [bound.arguments[p.name] for p in kernel.params if with_constants or not p.is_constexpr]


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value
