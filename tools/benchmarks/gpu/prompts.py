"""Stage ``prompts``: a real ComfyUI server generates, unloads, generates again, generates with another model in
between, loads images, and is told to cancel.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from . import packages
from .findings import Findings, NotRun

FIRST, OTHER = "11 Method - EAGLE draft tree", "17 Continuous tokens"
SEED = 11
AGAIN, IMAGE, CANCELLED = "again, unloaded before", "loads an image", "cancelled"
LOADING = (
    "03 Inpaint your image",
    "04 Outpaint",
    "05 Continue an image",
    "18 Continuous tokens, inpaint",
    "27 Emu3.5-Image (download)",
    "28 GLM-Image (download)",
    "29 Describe an image (download)",
    "30 Emu3.5-Image, edit with references (download)",
    "31 GLM-Image, edit with references (download)",
)
SAMPLERS = (  # a workflow of each sampler
    "01 Text to image",
    FIRST,
    "13 Method - LANTERN",
    "14 Method - Cool-SD",
    "15 Method - ADT-Tree",
    "16 Method - VVS",
    OTHER,
)
STEPS = (
    ("first run", FIRST),
    (AGAIN, FIRST),
    ("another model", OTHER),
    ("the first again", FIRST),
    *((step, name) for name in SAMPLERS for step in (CANCELLED, "after that")),
    *((IMAGE, name) for name in LOADING),
)
MANY = 16  # images, so that a run is not over before it is cancelled
FREE = {"unload_models": True, "free_memory": True}
# What the pack logs where something does not work.
WARNINGS = ("without CUDA graphs", "CUDA graphs are off", "The Triton kernel")


def comfyui() -> Path:
    """The tree that the variable names."""
    if "COMFYUI_PATH" not in os.environ:
        raise NotRun("COMFYUI_PATH does not name a ComfyUI tree")
    packages.need("aiohttp", "PIL", "numpy", "safetensors", "einops", "transformers")
    return Path(os.environ["COMFYUI_PATH"])


def memory_management(dry: bool) -> Any:
    """ComfyUI's, in this process."""
    sys.path.insert(0, str(comfyui()))
    if dry:
        import_module("comfy.cli_args").args.cpu = True
    return import_module("comfy.model_management")


def run(findings: Findings) -> None:
    tree = comfyui()
    from tools.comfy_server import ComfyServer

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ComfyServer(tree, log) as server:
            asyncio.run(draw(findings, server.url, server.process.pid, server.base / "models"))
        for line in log.read_text(errors="replace", encoding="utf-8").splitlines():
            if any(warning in line for warning in WARNINGS):
                findings.failure(line[:500])


async def draw(findings: Findings, url: str, pid: int, models: Path, steps: Sequence[tuple[str, str]] = STEPS) -> None:
    """The steps one after the other; images of one workflow must be the same each time. models: ComfyUI's folder, into
    which tiny files of released models are written."""
    import aiohttp

    from tests.support import families, prompts
    from tools.comfy_client import get_json

    known, seen = prompts.workflows([name for _, name in steps]), prompts.Seen()
    missing = [(step, name) for step, name in steps if not findings.has(step=step, workflow=name)]
    for step, name in findings.each(missing, "steps"):
        with findings.item(step=step, workflow=name) as row:
            if step == AGAIN:
                async with aiohttp.ClientSession() as session, session.post(f"{url}/free", json=FREE) as reply:
                    reply.raise_for_status()  # it happens before the next prompt
            if name in families.FAMILIES:
                families.FAMILIES[name](models)
            if step == CANCELLED:
                row["outcome"] = await cancelled(url, known[name])
                continue
            await prompts.run(url, pid, name, known[name], SEED, seen)
            row |= {
                "seconds": round(seen.seconds[-1], 2),
                "MiB": round(seen.memory[-1], 1),
                "different images so far": len(seen.images[name, SEED]),
            }
            gpu = (await get_json(url, "/system_stats"))["devices"][0]
            if gpu["type"] != "cpu":
                row["MiB of the GPU"] = round((gpu["torch_vram_total"] - gpu["torch_vram_free"]) / 2**20, 1)
    for failed in seen.failures:
        findings.failure(failed)
    if any(len(drawn) > 1 for drawn in seen.images.values()):
        findings.failure("the same prompt and seed gave another image")
    drawn = sum(row["step"] != CANCELLED for row in findings.rows)
    findings.content["summary"] = f"{drawn} prompts, and {len(findings.rows) - drawn} that were cancelled"


async def cancelled(url: str, prompt: dict[str, Any]) -> str:
    """The outcome of a prompt that is cancelled as soon as its sampler has made progress."""
    from tools.comfy_client import Run, interrupt, run_prompt

    samplers = {key for key, node in prompt.items() if "Sampler" in node["class_type"]}
    many = {key: node | {"inputs": node["inputs"] | {"batch_size": MANY}} for key, node in prompt.items()}
    asked = False

    async def follow(run: Run, event: str, data: dict[str, Any]) -> None:
        nonlocal asked
        nodes = data["nodes"] if event == "progress_state" and not asked else {}
        if any(0 < state["value"] < state["max"] for key, state in nodes.items() if key in samplers):
            asked = True
            await interrupt(url, run.prompt_id)

    ran = await run_prompt(
        url, {key: many[key] if "batch_size" in node["inputs"] else node for key, node in prompt.items()}, follow=follow
    )
    if ran.outcome not in ("interrupted", "success"):
        raise RuntimeError(ran.message())
    return ran.outcome
