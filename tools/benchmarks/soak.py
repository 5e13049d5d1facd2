"""Queue hundreds of prompts on one real ComfyUI server and check for growing memory and leftover files.

    COMFYUI_PATH=/path/to/ComfyUI python -m tools.benchmarks soak [--prompts 500] [--clients 2] [--out FILE.json]

Uses all shipped workflows; models that do not ship are replaced by tiny random files in the released layouts. Each
prompt uses another model than the one before. Seeds repeat, so images of the same workflow and seed are compared over
the whole run (except those that depend on time: charts, and the image of Find Fastest, which may choose another method
each time). The history entry of each prompt is deleted afterwards, as clients of long batches do.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from comfyui_specar.batch.client import get_json, run_prompt, view
from PIL import Image

from tests.support.families import CHANGES, FAMILIES, REFINED, SMALL
from tools.comfy_server import PACK, ComfyServer

from .report import commit, machine, versions, write

SCHEMA = "specar.soak/1"
SEEDS = (11, 12, 13)
SETTLED = 0.2  # share of the run after which memory is expected to have stopped growing
IMAGES = (".png", ".webp")
TIMED = {"SpecARCompareTraces", "SpecARFindFastest"}  # their charts tell seconds
VARYING = ("07 Find the fastest method",)  # what these generate depends on the clock
FILES = ("images", "files", "specar_tokens")  # what nodes say of the files that they have written


@dataclass(frozen=True)
class Job:
    workflow: str
    seed: int
    prompt: dict


@dataclass
class Seen:
    """What is noted while prompts run. memory: after each prompt, by the order in which they ended."""

    outcomes: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    images: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    files: set[Path] = field(default_factory=set)
    memory: list[dict[str, float]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=500, help="number of prompts (default: %(default)s)")
    parser.add_argument(
        "--clients", type=int, default=2, help="prompts queued or running at any time (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", help="workflows to use (default: all)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ComfyServer(Path(os.environ["COMFYUI_PATH"]), log) as server:
            for name in ("ar_models", "ar_drafters"):
                (server.base / "models" / name).mkdir(exist_ok=True)
            for write_files in FAMILIES.values():
                write_files(server.base / "models")
            before = files_below(server.base)
            began = time.monotonic()
            jobs = itertools.islice(switching(options.only), options.prompts)
            seen = asyncio.run(soak(server.url, server.process.pid, jobs, options.clients, progress=options.prompts))
            seconds = time.monotonic() - began
            report = result(seen, server, before, log) | {"seconds": round(seconds), "clients": options.clients}
    report |= {
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        write(report, options.out)


def workflows(only: list[str] | None = None) -> dict[str, dict]:
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


def switching(only: list[str] | None = None) -> Iterator[Job]:
    """Jobs without end: by turns one of the default model and one of any other. The seed changes with every round."""
    prompts = workflows(only)
    default, others = [], []
    for name, prompt in prompts.items():
        models = {node["inputs"].get("model_name") for node in prompt.values()}
        (default if "default (bundled)" in models else others).append(name)
    shuffled = random.Random(0)

    def endless(names: list[str]) -> Iterator[Job]:
        for seed in itertools.cycle(SEEDS):
            shuffled.shuffle(names)
            for name in names:
                yield Job(name, seed, seeded(prompts[name], seed))

    lists = [endless(names) for names in (default, others) if names]
    for one in itertools.cycle(lists):
        yield next(one)


def seeded(prompt: dict, seed: int) -> dict:
    """A copy with this seed, wherever a node has one of its own."""
    copy = json.loads(json.dumps(prompt))
    for node in copy.values():
        for name in ("seed", "value"):
            if isinstance(node["inputs"].get(name), int) and (name == "seed" or node["class_type"] == "PrimitiveInt"):
                node["inputs"][name] = seed
    return copy


async def soak(url: str, pid: int, jobs: Iterator[Job], clients: int, progress: int = 0) -> Seen:
    """Run the jobs on a server, so many at once; returns what was seen."""
    seen = Seen()

    async def client() -> None:
        for job in jobs:  # one iterator for all clients
            await one(url, pid, job, seen)
            if progress and len(seen.memory) % 10 == 0:
                print(f"{len(seen.memory)} of {progress}: {seen.memory[-1]} {dict(seen.outcomes)}", flush=True)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


async def one(url: str, pid: int, job: Job, seen: Seen) -> None:
    began = time.monotonic()
    run = await run_prompt(url, job.prompt)
    seen.seconds[job.workflow].append(time.monotonic() - began)
    seen.outcomes[run.outcome] += 1
    if run.outcome != "success" or run.node_errors:
        seen.failures.append(f"{job.workflow}, seed {job.seed}: {run.message()[:500]}")
    written = [file for key in FILES for file in run.collect(key)]
    seen.files |= {Path(file["type"], file["subfolder"], file["filename"]) for file in written}
    drawn = hashlib.sha256()
    for node, output in run.outputs.items():
        if feeders(job.prompt, node) & TIMED:
            continue
        for file in output.get("images", []):
            if file["type"] == "output" and Path(file["filename"]).suffix in IMAGES:
                pixels = Image.open(io.BytesIO(await view(url, file)))
                drawn.update(repr(pixels.size).encode() + pixels.tobytes())
    seen.images[job.workflow, job.seed].add(drawn.hexdigest())
    async with aiohttp.ClientSession() as session:
        await session.post(f"{url}/history", json={"delete": [run.prompt_id]})
    seen.memory.append(await memory(url, pid))


def feeders(prompt: dict, node: str) -> set[str]:
    """Classes of the nodes that a node is linked to."""
    links = (value for value in prompt[node]["inputs"].values() if isinstance(value, list))
    return {prompt[link[0]]["class_type"] for link in links}


async def memory(url: str, pid: int) -> dict[str, float]:
    """MiB of the server's main memory, and of a GPU's that PyTorch has allocated."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    [resident] = [int(line.split()[1]) for line in status if line.startswith("VmRSS")]
    found = {"rss": round(resident / 1024, 1)}
    device = (await get_json(url, "/system_stats"))["devices"][0]
    if device["type"] != "cpu":
        found["gpu"] = round((device["torch_vram_total"] - device["torch_vram_free"]) / 2**20, 1)
    return found


def files_below(folder: Path) -> set[Path]:
    return {
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.is_relative_to(folder / "custom_nodes")
    }


def growth(values: list[float]) -> dict[str, float]:
    """Of memory in MiB after each prompt, once it has settled: first, last, largest, and what 100 prompts add (slope of
    a straight line, with its standard error)."""
    settled = values[int(SETTLED * len(values)) :]
    places = range(len(settled))
    slope, intercept = statistics.linear_regression(places, settled)
    rest = [y - slope * x - intercept for x, y in zip(places, settled, strict=True)]
    error = (sum(r * r for r in rest) / max(len(rest) - 2, 1)) ** 0.5 / (statistics.pstdev(places) * len(rest) ** 0.5)
    numbers = {
        "first": settled[0],
        "last": settled[-1],
        "largest": max(values),
        "per_100_prompts": 100 * slope,
        "standard_error": 100 * error,
    }
    return {name: round(number, 2) for name, number in numbers.items()}


def result(seen: Seen, server: ComfyServer, before: set[Path], log: Path) -> dict[str, Any]:
    """The report. Call it while the server still runs."""
    history, queue = (asyncio.run(get_json(server.url, path)) for path in ("/history", "/queue"))
    listed = {
        (server.output if file.parts[0] == "output" else server.base / "temp") / Path(*file.parts[1:])
        for file in seen.files
    }
    left = [
        str(path.relative_to(server.base))
        for path in files_below(server.base) - before - listed
        if not path.is_relative_to(server.base / "user")
    ]  # ComfyUI's own database
    steady = {key: len(kinds) for key, kinds in seen.images.items() if key[0] not in VARYING}
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines()
    return {
        "schema": SCHEMA,
        "prompts": sum(seen.outcomes.values()),
        "workflows": len(seen.seconds),
        "outcomes": dict(seen.outcomes),
        "failures": seen.failures,
        "memory_mib": {name: growth([m[name] for m in seen.memory]) for name in seen.memory[0]},
        "memory_mib_every_tenth": [m["rss"] for m in seen.memory[9::10]],
        "pictures_compared": len(steady),
        "pictures_that_differed": [f"{name}, seed {seed}" for (name, seed), kinds in steady.items() if kinds > 1],
        "files_told": len(seen.files),
        "files_left_behind": sorted(left),
        "history_entries": len(history),
        "queued": len(queue["queue_running"]) + len(queue["queue_pending"]),
        "log_warnings": Counter(line[:200] for line in lines if "WARNING" in line or "memory leak" in line),
        "seconds_per_prompt": {name: round(statistics.median(times), 2) for name, times in seen.seconds.items()},
    }


if __name__ == "__main__":
    main()
