"""The published table of compiled kernels is that of these sources, and nothing in it is wrong where kernels are used.

After a change of a kernel, write it again: python -m tools.benchmarks.gpu.compile_table
"""

import json

import pytest
import torch
from comfyui_specar.device.dispatch import MIN_CAPABILITY
from comfyui_specar.tests.support.triton_kernels import SHARED, Kernel
from comfyui_specar.tools.benchmarks.gpu import compile_cases, compile_table

TABLE = json.loads(compile_table.TABLE.read_text(encoding="utf-8"))
USED = [pair for pair in compile_table.PAIRS if divmod(int(pair[1]), 10) >= MIN_CAPABILITY]


@pytest.mark.parametrize(("version", "arch"), compile_table.PAIRS)
def test_the_table_was_made_from_these_sources(version, arch):
    made = TABLE["tritons"][version][arch]["sources"]
    assert made == compile_table.sources(), "kernels have changed: run python -m tools.benchmarks.gpu.compile_table"


@pytest.mark.parametrize(("version", "arch"), USED)
def test_every_kernel_compiles_and_fits(version, arch):
    entry = TABLE["tritons"][version][arch]
    assert entry["cases"] > 50 and not entry["failures"]
    for kernel, (_, spilled, shared) in entry["kernels"].items():
        assert spilled <= compile_table.SPILLED, f"{kernel} spills"
        assert shared <= SHARED, f"{kernel} does not fit into shared memory"


def test_the_page_is_that_of_the_table():
    assert compile_table.TABLE.with_suffix(".md").read_text(encoding="utf-8") == compile_table.page(TABLE)


def test_another_source_is_noticed(monkeypatch, tmp_path):
    before = compile_table.sources()
    (tmp_path / "kernels").mkdir()
    for path in (compile_table.ROOT / "kernels").glob("*_triton.py"):
        (tmp_path / "kernels" / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(compile_table, "ROOT", tmp_path)
    assert compile_table.sources() == before
    changed = tmp_path / "kernels/gating_triton.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert compile_table.sources() != before


def test_instructions_of_a_loop(monkeypatch):
    """Of the longest one: four instructions, one of which multiplies 16 rows by 128 weights."""
    short, long = [".L_x_0:", "MOV", "BRA `(.L_x_0)"], [".L_x_1:", "LDS", "HMMA", "IADD3", "@P0 BRA `(.L_x_1)"]
    text = "\n".join(line if line.startswith(".") else f"  /*0010*/  {line} ;" for line in (*short, *long, "EXIT"))
    monkeypatch.setattr("comfyui_specar.tests.support.triton_kernels.read_by", lambda *given: text)
    assert compile_table.instructions_per_weight(b"", 1) == round(1000 * 4 / 128)
    assert compile_table.instructions_per_weight(b"", 2) == round(1000 * 8 / 128)


def test_instructions_are_those_of_the_product_whatever_is_launched_beside_it(monkeypatch):
    def kernel(name: str) -> Kernel:
        return Kernel(name, "", name.encode(), 4, 0, 0, 0)

    x = torch.empty(2, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(compile_cases, "cases", lambda: [("linear.few_rows", "a product", (x,))])
    launched = [kernel("_rms_norm"), kernel("_few_rows"), kernel("_sum")]
    monkeypatch.setattr("comfyui_specar.tests.support.triton_kernels.compile_here", lambda *given: launched)
    monkeypatch.setattr(compile_table, "instructions_per_weight", lambda cubin, tiles: (cubin, tiles))
    assert compile_table.compiled(86)["loops"] == {"a product": (b"_few_rows", 1)}
