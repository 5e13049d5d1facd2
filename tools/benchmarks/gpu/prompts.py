"""Stage ``prompts``: a real ComfyUI server generates, unloads, generates again, and generates with another model in
between.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from . import packages
from .findings import Findings, NotRun

FIRST, OTHER = "12 Method - EAGLE draft tree", "18 Continuous tokens"
SEED = 11
STEPS = (("first run", FIRST), ("again, unloaded before", FIRST), ("another model", OTHER), ("the first again", FIRST))
UNLOAD_BEFORE = 1  # number of the step
FREE = {"unload_models": True, "free_memory": True}
# What the pack logs where something does not work.
WARNINGS = ("without CUDA graphs", "CUDA graphs are off", "The Triton kernel")


def run(findings: Findings, **_options: object) -> None:
    if "COMFYUI_PATH" not in os.environ:
        raise NotRun("COMFYUI_PATH does not name a ComfyUI tree")
    packages.need("aiohttp", "PIL", "numpy", "safetensors", "einops", "transformers")
    from tools.comfy_server import ComfyServer

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ComfyServer(Path(os.environ["COMFYUI_PATH"]), log) as server:
            asyncio.run(draw(findings, server.url, server.process.pid))
        for line in log.read_text(errors="replace", encoding="utf-8").splitlines():
            if any(warning in line for warning in WARNINGS):
                findings.failure(line[:500])


async def draw(findings: Findings, url: str, pid: int) -> None:
    """The steps one after the other; images of one workflow must be the same each time."""
    import aiohttp

    from tests.support import prompts
    from tools.comfy_client import get_json

    known, seen = prompts.workflows([FIRST, OTHER]), prompts.Seen()
    for number, (step, name) in enumerate(STEPS):
        if number == UNLOAD_BEFORE:
            async with aiohttp.ClientSession() as session, session.post(f"{url}/free", json=FREE) as reply:
                reply.raise_for_status()  # it happens before the next prompt
        with findings.item(step=step, workflow=name) as row:
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
    findings.content["summary"] = f"{seen.outcomes['success']} of {len(STEPS)} prompts drew their images"
