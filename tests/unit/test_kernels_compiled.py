"""Every Triton kernel compiles at the sizes of released models, and its machine code is what its sources promise.

For the oldest kind of GPU that they run on and, a case of each, for the newest. The published table (see
test_compiled_table.py) has others, and other Tritons.
"""

import re

import pytest
import torch
from comfyui_specar.tools.benchmarks.gpu.calls import accelerated
from comfyui_specar.tools.benchmarks.gpu.compile_cases import cases

from ..support.triton_kernels import Kernel, compiled

HALF = {torch.bfloat16: "bf16", torch.float16: "f16"}
CASES: dict[str, list[tuple]] = {}
for name, _, arguments in cases():
    CASES.setdefault(name, []).append(arguments)


def multiplies(kernel: Kernel, given: tuple) -> None:
    """Tensor cores sum in the same order by the same instruction, whatever the number of rows, which keeps a row's
    result what it is. GPUs before 8.9 do not know fp8."""
    assert "e4m3" not in kernel.ptx
    if kernel.name in ("_prepare", "_combine"):  # before and after the products
        return
    if number := HALF.get(given[0].dtype):
        assert "cp.async" in kernel.ptx, "loading ahead"
        instructions = set(re.findall(r"\bw?g?mma[.\w]*", kernel.ptx))
        assert instructions == {f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32"}


def keeps_the_digits_of_logarithms(kernel: Kernel, given: tuple) -> None:
    assert "lg2.approx" not in kernel.ptx


def multiplies_whole_numbers(kernel: Kernel, given: tuple) -> None:
    assert "mul.hi.u32" in kernel.ptx


PROMISES = {
    "attention.attend_few": multiplies,
    "linear.few_rows": multiplies,
    "noise.uniform": multiplies_whole_numbers,
    "noise.gumbel": keeps_the_digits_of_logarithms,
    "noise.normal": keeps_the_digits_of_logarithms,
}


@pytest.mark.whole
@pytest.mark.parametrize("function", CASES)
def test_every_case_compiles(function):
    promise = PROMISES.get(function, lambda kernel, given: None)
    for number, given in enumerate(CASES[function]):
        for capability in (80, 120) if number == 0 else (80,):
            kernels = compiled(function, *given, capability=capability)
            assert kernels
            for kernel in kernels:
                promise(kernel, given)


def test_every_kernel_has_cases():
    assert CASES.keys() == accelerated().keys()
