"""Triton kernels on a machine without a GPU: what they compute, by Triton's interpreter, and whether they compile.

    interpreted("noise.uniform", *given)     runs kernels/noise_triton.py:uniform on CPU tensors, also in place
    agrees("noise.uniform", *given)          the same, compared with its torch reference
    compiled("noise.uniform", *given)        compiles what that call would launch, down to machine code for a GPU

Triton decides once per process which of the two it does, and must know before it is imported, which half of the
world does. So each has a process of its own, started at the first use. There this module is known by its name in the
pack: ComfyUI's tree, which is on the path once its nodes are tested, has a package ``tests`` too.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from comfyui_specar.device.graphs import leaves

from . import execution

SHARED = 99 * 2**10  # bytes of shared memory that a program can have on every GPU of capability 8.0 or higher


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its name, PTX, machine code, warps and shared memory (bytes), registers of a thread, and bytes
    of its stack, to which it spills what its registers do not hold."""

    name: str
    ptx: str
    cubin: bytes
    warps: int
    shared: int
    registers: int
    stack: int

    @property
    def overflows(self) -> bool:
        """Does it spill although it has as many registers as it can have, which are given out by eight? (With fewer,
        the assembler has put one or two aside so that more programs run at once.)"""
        return self.stack > 0 and self.registers > min(2**16 // (32 * self.warps), 256) - 8


def interpreted(function: str, *given: Any, **constants: Any) -> Any:
    """The result of a Triton kernel's ``module.function``. Tensors are shared with it: what it writes is seen here.

    constants: what its module holds meanwhile. Where ttsem is installed, it executes what the compiler makes of the
    kernel (see execution.py), in one order.
    """
    if execution.HERE:
        return execution.executed(lambda: _call(function, given, constants))
    return _process("1").submit(_there("_call"), function, given, constants).result()


def agrees(function: str, *given: Any, rtol: float = 1e-5, atol: float = 1e-6) -> Any:
    """The result of a Triton kernel, which is that of its torch reference; both write the same into what they are
    given. Whole numbers are equal."""
    module, name = function.split(".")
    reference = getattr(import_module(f"comfyui_specar.kernels.{module}"), name)
    copies = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in given)
    wanted, found = reference(*copies), interpreted(function, *given)
    for ours, its in zip(leaves((found, given)), leaves((wanted, copies)), strict=True):
        exact = {} if its.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(ours, its, equal_nan=True, **{"rtol": rtol, "atol": atol} | exact)
    return found


def compiled(function: str, *given: Any, capability: int = 90) -> list[Kernel]:
    """The kernels that a call launches, compiled for a compute capability (90: 9.0). Nothing is run. None may overflow
    its registers, or ask for more shared memory than every kind of GPU since 2020 has."""
    kernels = _process("0").submit(_there("compile_here"), function, given, capability).result()
    for kernel in kernels:
        assert not kernel.overflows, f"{kernel.name} spills {kernel.stack} bytes"
        assert kernel.shared <= SHARED, f"{kernel.name} needs {kernel.shared} bytes of shared memory"
    return kernels


def _there(name: str) -> Callable[..., Any]:
    return getattr(import_module("comfyui_specar.tests.support.triton_kernels"), name)


@cache
def _process(interpret: str) -> ProcessPoolExecutor:
    process = ProcessPoolExecutor(1, get_context("spawn"), _there("_begin"), (interpret,))
    atexit.register(process.shutdown)
    return process


def _begin(interpret: str) -> None:
    os.environ["TRITON_INTERPRET"] = interpret
    torch.set_num_threads(1)
    if interpret == "1":
        _teach_products()


def _product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Matrix product [..., M, N] that sums every element in the same order, as a tensor core does. With np.matmul a
    row's last bits depend on its place among the rows on some processors (seen on AMD, Zen 5)."""
    return (a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]).sum(-2, dtype=dtype)


def _teach_products() -> None:
    """Triton's interpreter keeps bf16 as whole numbers, its bits, and would multiply these."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        with patch.object(np, "matmul", _product):
            return multiply(self, *(self.cast_impl(x, float32) if x.dtype == bfloat16 else x for x in (a, b)), *rest)

    InterpreterBuilder.create_dot = create_dot


def _call(function: str, given: tuple, constants: dict[str, Any]) -> Any:
    name, function = function.split(".")
    module = import_module(f"comfyui_specar.kernels.{name}_triton")
    with patch.multiple(module, **constants) if constants else nullcontext():
        return getattr(module, function)(*given)


def compile_here(function: str, given: tuple, capability: int) -> list[Kernel]:
    """``compiled``, in this process and with the Triton it finds: any from 3.1 on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    class Absent:
        """As much of a GPU's driver as compiling needs."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: capability)  # what is compiled is kept by device
        get_current_stream = staticmethod(lambda device: 0)

    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        assert all(1 <= n < limit for n, limit in zip(grid, (2**31, 2**16, 2**16), strict=False)), (
            f"{self.__name__}: grid {grid}"
        )
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        meta = kernel.metadata
        ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        kernels.append(Kernel(kernel.name, ptx, cubin, meta.num_warps, meta.shared, *_resources(cubin)))

    driver.set_active(Absent())
    with patch.object(JITFunction, "run", compile_only):
        _call(function, given, {})
    return kernels


def _resources(machine_code: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    usage = read_by("cuobjdump", "--dump-resource-usage", machine_code)
    return tuple(int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())


def read_by(tool: str, option: str, machine_code: bytes) -> str:
    """What a tool in Triton's wheel prints about machine code."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = Path(triton.__file__).parent / "backends/nvidia/bin" / tool, option, file.name
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
