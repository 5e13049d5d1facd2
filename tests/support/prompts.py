"""Prompts of the shipped workflows, and what a server makes of many of them."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from PIL import Image

from tools.comfy_client import run_prompt, view
from tools.comfy_server import PACK

from .families import CHANGES, FAMILIES, REFINED, SMALL
from .process_memory import held

IMAGES = (".png", ".webp")
TIMED = {"SpecARCompareTraces", "SpecARFindFastest"}  # their charts tell seconds


@dataclass
class Seen:
    """What is noted while prompts run. images: of a workflow and seed; memory: MiB of the server after each prompt."""

    outcomes: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    memory: list[float] = field(default_factory=list)


def workflows(only: Sequence[str] = ()) -> dict[str, dict]:
    """The shipped API workflows by name, fit for the tiny files of the families. The one that refines by a diffusion
    model is left out: there is no tiny one."""
    found = {}
    for path in sorted((PACK / "workflows/api").glob("*.json")):
        if path.stem == REFINED or (only and path.stem not in only):
            continue
        prompt = json.loads(path.read_text(encoding="utf-8"))
        changes = SMALL | CHANGES.get(path.stem, {}) if path.stem in FAMILIES else {}
        for node in prompt.values():
            node["inputs"].update({key: value for key, value in changes.items() if key in node["inputs"]})
        found[path.stem] = prompt
    return found


def models(prompt: dict) -> set[str]:
    """The checkpoints that a prompt loads."""
    return {node["inputs"].get("model_name") for node in prompt.values()} - {None}


def seeded(prompt: dict, seed: int) -> dict:
    """A copy with this seed, wherever a node has one of its own."""
    changed = copy.deepcopy(prompt)
    for node in changed.values():
        for name in ("seed", "value"):
            if isinstance(node["inputs"].get(name), int) and (name == "seed" or node["class_type"] == "PrimitiveInt"):
                node["inputs"][name] = seed
    return changed


async def run(url: str, pid: int, name: str, prompt: dict, seed: int, seen: Seen) -> None:
    """Run a workflow with a seed, note what became of it, and delete its entry of the history, as clients of long
    batches do."""
    prompt, began = seeded(prompt, seed), time.monotonic()
    ran = await run_prompt(url, prompt)
    seen.seconds.append(time.monotonic() - began)
    seen.outcomes[ran.outcome] += 1
    if ran.outcome != "success" or ran.node_errors:
        seen.failures.append(f"{name}, seed {seed}: {ran.message()[:500]}")
    pixels = hashlib.sha256()
    for node, output in ran.outputs.items():
        links = (value for value in prompt[node]["inputs"].values() if isinstance(value, list))
        if TIMED & {prompt[link[0]]["class_type"] for link in links}:
            continue
        for file in output.get("images", []):
            if file["type"] == "output" and file["filename"].endswith(IMAGES):
                image = Image.open(io.BytesIO(await view(url, file)))
                pixels.update(repr(image.size).encode() + image.tobytes())
    seen.images[name, seed].add(pixels.hexdigest())
    async with aiohttp.ClientSession() as session:
        await session.post(f"{url}/history", json={"delete": [ran.prompt_id]})
    seen.memory.append(held("VmRSS", pid) / 2**20)
