"""Triton kernels on a machine without a GPU: what they compute, by Triton's interpreter, and whether they compile.

    interpreted("noise.uniform", *given)     runs kernels/noise_triton.py:uniform on CPU tensors, also in place
    compiled("noise.uniform", *given)        compiles what that call would launch, down to machine code for a GPU

Triton decides once per process which of the two it does, and must be told before it is imported, which half of the
world does. So each has a process of its own, started at the first use. There this module is known by its name in the
pack: ComfyUI's tree, which is on the path once its nodes are tested, has a package ``tests`` too.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its name, PTX, warps and shared memory (bytes)."""

    name: str
    ptx: str
    warps: int
    shared: int


def interpreted(twin: str, *given: Any) -> Any:
    """The result of a twin, named ``module.function``. Tensors are shared with it: what it writes is seen here."""
    return _process("1").submit(_there("_call"), twin, given).result()


def compiled(twin: str, *given: Any) -> list[Kernel]:
    """The kernels that a call of a twin launches, compiled for compute capability 9.0. Nothing is run."""
    return _process("0").submit(_there("_compile"), twin, given).result()


def _there(name: str) -> Callable[..., Any]:
    return getattr(import_module("comfyui_specar.tests.unit.twins"), name)


@cache
def _process(interpret: str) -> ProcessPoolExecutor:
    process = ProcessPoolExecutor(1, get_context("spawn"), _there("_begin"), (interpret,))
    atexit.register(process.shutdown)
    return process


def _begin(interpret: str) -> None:
    os.environ["TRITON_INTERPRET"] = interpret
    torch.set_num_threads(1)


def _call(twin: str, given: tuple) -> Any:
    module, name = twin.split(".")
    return getattr(import_module(f"comfyui_specar.kernels.{module}_triton"), name)(*given)


def _compile(twin: str, given: tuple) -> list[Kernel]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    class Absent:
        """As much of a GPU's driver as compiling needs."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        assert all(1 <= n < limit for n, limit in zip(grid, (2**31, 2**16, 2**16))), f"{self.__name__}: grid {grid}"
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(Kernel(kernel.name, kernel.asm["ptx"], kernel.metadata.num_warps, kernel.metadata.shared))

    driver.set_active(Absent())
    with patch.object(JITFunction, "run", compile_only):
        _call(twin, given)
    return kernels
