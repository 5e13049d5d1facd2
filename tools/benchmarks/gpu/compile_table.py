"""Compile every Triton kernel by several Tritons for several GPUs, none of which is needed.

    python -m tools.benchmarks.gpu.compile_table     # what changed since the published table

For development, on Linux. Writes tools/benchmarks/results/compiled.json with its page next to it. Each Triton is
installed from PyPI once, into a folder of ~/.cache/comfyui-specar (0.5 to 1 GB); torch is that of the development
environment. Triton's own cache keeps what was compiled. A table that was made from other sources (see ``sources``) is
out of date, which a test notices.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.device.dispatch import MIN_CAPABILITY

from ..report import grid, plain_command

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "tools/benchmarks/results/compiled.json"
CACHE = Path(os.environ.get("SPECAR_CACHE") or Path.home() / ".cache/comfyui-specar")
TRITONS = {"3.1.0": "2.5", "3.3.1": "2.7", "3.5.1": "2.9", "3.9.0": "none yet"}  # and torch that comes with it
ARCHS = {75: "RTX 20", 86: "RTX 30", 90: "H100", 120: "RTX 50"}
UNKNOWN = (("3.1.0", "120"),)  # newer than that Triton, which ends the process over them, and than torch 2.5
PAIRS = [(version, str(arch)) for version in TRITONS for arch in ARCHS if (version, str(arch)) not in UNKNOWN]
NEWEST = list(TRITONS)[-1]
LOOPS = NEWEST, "86"  # where instructions of loops are counted
COLUMNS = "registers", "spilled", "shared"
SPILLED = 64  # bytes that a kernel may spill


def sources() -> str:
    """A hash of all that is compiled."""
    files = sorted((ROOT / "kernels").glob("*_triton.py")), [Path(__file__).with_name("compile_cases.py")]
    return sha256("".join(path.read_text(encoding="utf-8") for paths in files for path in paths).encode()).hexdigest()


def main() -> None:
    parser = plain_command(".gpu.compile_table", __doc__)
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)  # of the processes that this starts
    if arch := parser.parse_args().here:
        print(json.dumps(compiled(arch)))
        return
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    made = {pair for pair in PAIRS if table["tritons"].get(pair[0], {}).get(pair[1], {}).get("sources") == sources()}
    wanted = [pair for pair in PAIRS if pair not in made]
    for version in dict.fromkeys(version for version, _ in wanted):
        install(version)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for (version, arch), entry in zip(wanted, threads.map(lambda pair: compiled_by(*pair), wanted), strict=True):
            table["tritons"].setdefault(version, {})[arch] = {"sources": sources()} | entry
            write(table)
            print(
                f"Triton {version}, sm_{arch}: {entry['cases']} cases, {len(entry['failures'])} failures, "
                f"{worst(entry, 'spilled')} bytes spilled",
                flush=True,
            )
    write(table)


def folder_of(version: str) -> Path:
    return CACHE / f"triton-{version}"


def install(version: str) -> None:
    folder = folder_of(version)
    if not folder.exists():
        pip = "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"
        subprocess.run([sys.executable, "-m", *pip, "--target", folder, f"triton=={version}"], check=True)


def compiled_by(version: str, arch: str) -> dict[str, Any]:
    """``compiled`` in a process that finds this version of Triton."""
    folder = folder_of(version)
    there = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "TRITON_CACHE_DIR": str(CACHE / "triton-cache")}
    command = sys.executable, "-m", "tools.benchmarks.gpu.compile_table", "--here", arch
    printed = subprocess.run(command, env=there, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])  # after what Triton says of code that it cannot compile


def compiled(arch: int) -> dict[str, Any]:
    """Compile all cases for an architecture: their number, failures, the most that each kernel takes, and the
    instructions of the main loop of every product."""
    from comfyui_specar.tests.support.triton_kernels import compile_here

    from .compile_cases import cases

    failures, most, loops = {}, {}, {}
    every = list(cases())
    for function, about, given in every:
        try:
            kernels = compile_here(function, given, arch)
        except Exception as error:  # whatever a compiler may raise: it is what is looked for
            why = re.sub(r"\S*/tmp\w+\.ptx", "ptx", str(error))  # a file of this run
            failures[f"{function}, {about}"] = f"{type(error).__name__}: {why}"[-300:]
            continue
        found = [max(getattr(kernel, name) for kernel in kernels) for name in ("registers", "stack", "shared")]
        most[function] = [max(pair) for pair in zip(found, most.get(function, found), strict=True)]
        if function == "linear.few_rows" and given[0].dtype == torch.bfloat16:
            tile = 1 if len(given[0]) <= 16 else 2
            [product] = [kernel for kernel in kernels if kernel.name == "_few_rows"]  # a norm is launched before it
            loops[about] = instructions_per_weight(product.cubin, tile)
    return {"cases": len(every), "failures": failures, "kernels": most, "loops": loops}


def instructions_per_weight(cubin: bytes, row_tiles: int) -> int:
    """Instructions of a warp per 1,000 weights, in the longest loop. A weight is multiplied by ``row_tiles`` times 16
    rows, one instruction of a tensor core multiplies 16 rows by 128 weights, and no two warps multiply the same."""
    from comfyui_specar.tests.support.triton_kernels import read_by

    labels: dict[str, int] = {}
    instructions: list[str] = []
    longest: list[str] = []
    for line in read_by("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            if back := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1]):
                longest = max(longest, instructions[labels.get(back[1], len(instructions)) :], key=len)
    products = sum("HMMA" in instruction for instruction in longest)
    return round(1000 * len(longest) * row_tiles / (128 * products)) if products else 0


def worst(entry: dict[str, Any], column: str) -> int:
    """The most that any kernel takes."""
    return max((numbers[COLUMNS.index(column)] for numbers in entry["kernels"].values()), default=0)


def write(table: dict[str, Any]) -> None:
    """The table and its page."""
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(table, indent=1))
    TABLE.write_text(text + "\n", encoding="utf-8")
    TABLE.with_suffix(".md").write_text(page(table), encoding="utf-8")


def page(table: dict[str, Any]) -> str:
    """The table in words."""
    rows = [
        (
            f"{version} (torch {TRITONS[version]})",
            f"sm_{arch} ({ARCHS[int(arch)]})",
            entry["cases"],
            len(entry["failures"]),
            *(worst(entry, column) for column in COLUMNS),
        )
        for version, arch in PAIRS
        if (entry := table["tritons"].get(version, {}).get(arch))
    ]
    version, arch = LOOPS
    after = table["tritons"].get(version, {}).get(arch, {}).get("loops", {})
    loops = [(name, table["before"].get(name, ""), number) for name, number in after.items()]
    kernels = table["tritons"].get(version, {}).get(arch, {}).get("kernels", {})
    return "\n".join(
        (
            "# Triton kernels, compiled",
            "",
            "Compiled without a GPU and run on none; written by `python -m tools.benchmarks.gpu.compile_table`. A case "
            "is a kernel with the arguments of a model (tools/benchmarks/gpu/compile_cases.py). Registers of a thread, "
            "bytes that it spills to its stack, and bytes of shared memory are the most of all cases. From compute "
            f"capability {'.'.join(map(str, MIN_CAPABILITY))} on no case may fail or spill more than {SPILLED} bytes. "
            "GPUs before that run the torch versions of the kernels (device/dispatch.py): the rows of sm_75 show why. "
            "Triton 3.1 does not know sm_120, nor does torch 2.5.",
            "",
            grid(("Triton", "GPU", "cases", "failures", *COLUMNS), rows),
            "",
            f"## Kernels (Triton {version}, sm_{arch})",
            "",
            grid(("kernel", *COLUMNS), [(name, *numbers) for name, numbers in kernels.items()]),
            "",
            f"## Products: instructions of the main loop (Triton {version}, sm_{arch})",
            "",
            "Instructions of a warp per 1,000 weights, x in bf16. They bound how fast weights are read: an RTX 3060 "
            "starts at most 199 of them in a nanosecond (28 multiprocessors, 4 each, 1.78 GHz). Counted in machine "
            "code, not timed. *Before*: gate and value were two products, tiles of 32 columns had four warps, and "
            "step and minimum of 4 bits were loaded for every number.",
            "",
            grid(("storage, rows, matrix", "before", "now"), loops),
            "",
        )
    )


if __name__ == "__main__":
    main()
