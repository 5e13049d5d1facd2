"""Queue workflows with one invalid input on a real ComfyUI server: it must say what is wrong and keep running.

    COMFYUI_PATH=/path/to/ComfyUI python -m tools.benchmarks faults [--minutes 15] [--seed 0] [--out FILE.json]

Uses every shipped workflow of the bundled models. One input of one node is removed or set to an invalid value, and the
prompt is queued. The server may reject it, fail with an error of this pack that names the problem, or generate an
image. Anything else is reported as a defect: another exception in a node of this pack, no answer, a crashed server, a
valid prompt whose image changes.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hashlib
import io
import json
import math
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from comfyui_specar.batch.answers import UnexpectedAnswerError
from comfyui_specar.batch.client import Run, interrupt, run_prompt, view
from PIL import Image

from tools.comfy_server import ComfyServer

from .report import commit, machine, versions, write
from .soak import seeded, workflows

SCHEMA = "specar.faults/1"
ALLOWED = ("ValueError", "FileNotFoundError", "CheckpointError")  # what a node of ours may raise ...
OF_COMFYUI = ("DependencyCycleError",)  # ... and what ComfyUI raises in its name
CHECKED_EVERY = 20  # prompts between two sound ones
PATIENCE = 240.0  # seconds for a prompt
ENOUGH = 8  # tokens after which a prompt may be interrupted, for its spoiled node was content
LONG_RUN = 12  # a batch or a number of passes beyond which a prompt would only be slow

JUNK: dict[str, list[Any]] = {
    "text": [
        "",
        " ",
        "\0",
        "nonsense",
        "ü" * 5000,
        "../../etc/passwd",
        None,
        3,
        -1.5,
        True,
        [],
        {},
        ["1"],
        ["999", 0],
        {"__value__": [1, 2]},
        {"a": {"b": []}},
        "NaN",
        "🍎 apple",
        "[1, 0]",
    ],
    "number": [
        -1,
        0,
        1,
        -(2**63),
        2**31,
        2**64,
        10**30,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
        0.5,
        "5",
        "abc",
        "",
        None,
        True,
        [],
        {},
        [1, 2],
        ["999", 0],
        {"__value__": "x"},
        "NaN",
        "1e400",
    ],
    "switch": [None, 0, 2, "true", "", "no", [], {}, math.nan, ["999", 0]],
    "link": [
        None,
        "",
        0,
        True,
        {},
        [],
        ["999", 0],
        ["1", 99],
        ["1", -1],
        ["1", "x"],
        [None, 0],
        [[], 0],
        "1",
        1.5,
        {"samples": 1},
        {"__value__": [1, 2]},
        ["1", 0, 0],
    ],
}


@dataclass(frozen=True)
class Fault:
    """A prompt with one thing spoiled: in which workflow, node (its class, and its ``key``) and input, of what kind,
    and how."""

    workflow: str
    node: str
    name: str
    kind: str
    value: str
    prompt: dict
    key: str = ""


@dataclass
class Seen:
    outcomes: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    raised: Counter = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    unnamed: Counter = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0
    sound: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    sounds: int = 0


def kind_of(value: Any) -> str:
    """Which sort of input holds this value."""
    if isinstance(value, list):
        return "link"
    return "switch" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "text"


def spoiled(name: str, prompt: dict, dice: random.Random) -> Fault:
    """The prompt with one input of one node spoiled."""
    prompt = copy.deepcopy(prompt)
    key = dice.choice([key for key, node in prompt.items() if node["inputs"]])
    node = prompt[key]
    wanted = dice.choice(sorted(node["inputs"]))
    kind, how = kind_of(node["inputs"][wanted]), dice.random()
    if how < 0.04:
        kind, value = "missing", node["inputs"].pop(wanted)
    elif how < 0.07:
        kind, wanted, value = "extra", "nonsense", dice.choice([1, None, [key, 0]])
        node["inputs"][wanted] = value
    elif how < 0.09:
        kind, wanted, value = "class", "class_type", dice.choice(["Nonsense", None, 3, ""])
        node["class_type"] = value
    else:
        values = JUNK[kind]
        if kind == "link":  # to itself, and to any other node: a wrong type, or a ring
            values = values + [[key, 0]] + [[other, dice.randrange(3)] for other in dice.sample(sorted(prompt), 3)]
        if wanted == "batch_size":
            values = [value for value in values if not isinstance(value, int) or value <= LONG_RUN]
        value = node["inputs"][wanted] = dice.choice(values)
    return Fault(name, str(prompt[key]["class_type"]), wanted, kind, repr(value)[:60], prompt, key)


def faults(prompts: dict[str, dict], seed: int) -> Iterator[Fault]:
    """Spoiled prompts without end."""
    dice = random.Random(seed)
    while True:
        name = dice.choice(sorted(prompts))
        yield spoiled(name, prompts[name], dice)


def problem_of(fault: Fault, run: Run) -> str | None:
    """What is not as it should be in how a spoiled prompt ended, or None."""
    if run.outcome != "error":
        return None
    ours = str(run.error["node_type"]).startswith("SpecAR")
    kind = run.error["exception_type"].rsplit(".", 1)[-1]
    if ours and kind not in (*ALLOWED, *OF_COMFYUI):
        return f"{run.error['node_type']} raised {kind}: {run.message()[:300]}"
    return f"{run.error['node_type']} shows a traceback" if ours and "Traceback" in run.message() else None


async def queue(url: str, fault: Fault, seen: Seen) -> None:
    """Queue a spoiled prompt and note how it ended."""
    began, what = time.monotonic(), f"{fault.workflow}: {fault.node}.{fault.name} = {fault.value}"
    begun = set()

    async def follow(run: Run, event: str, data: dict) -> None:
        """Most prompts whose spoiled node was content need not be generated to the end."""
        begun.update(data["nodes"] if event == "execution_cached" else [data.get("node")])
        if event == "progress_state" and fault.key in begun and hash(run.prompt_id) % 4:
            if any(ENOUGH <= state["value"] < state["max"] for state in data["nodes"].values()):
                await interrupt(url, run.prompt_id)

    try:
        run = await run_prompt(url, fault.prompt, follow=follow, timeout=PATIENCE)
    except TimeoutError:
        seen.outcomes[fault.kind]["no end"] += 1
        seen.defects.append(f"{what}: no end after {PATIENCE:.0f} s")
        await interrupt(url, "")
        return
    except UnexpectedAnswerError:  # ComfyUI's own answer to what it cannot read at all
        seen.outcomes[fault.kind]["HTTP error"] += 1
        return
    outcome = "some outputs only" if run.outcome == "success" and run.node_errors else run.outcome
    seen.outcomes[fault.kind][outcome] += 1
    seen.slowest = max(seen.slowest, time.monotonic() - began)
    if problem := problem_of(fault, run):
        seen.defects.append(f"{what}: {problem}")
    if run.outcome == "error":
        kind = f"{run.error['node_type']}: {run.error['exception_type'].rsplit('.', 1)[-1]}"
        seen.raised[kind] += 1
        seen.messages.setdefault(f"{fault.node}.{fault.name} = {fault.value}", run.message()[:300])
        seen.unnamed[
            "names the input or value"
            if fault.name in run.message() or fault.value.strip("'\"")[:20] in run.message()
            else "names something else"
        ] += 1


async def sound(url: str, prompt: dict, seed: int, seen: Seen) -> None:
    """Queue a sound prompt and note the image: that of a seed must be the same in the whole run. (Of two seeds, for
    ComfyUI would answer the same prompt from its cache.)"""
    run = await run_prompt(url, seeded(prompt, seed), timeout=PATIENCE)
    seen.sounds += 1
    if run.outcome != "success":
        seen.defects.append(f"a sound prompt ended with {run.outcome}: {run.message()[:300]}")
        return
    for file in run.collect("images"):
        if file["type"] == "output":
            pixels = Image.open(io.BytesIO(await view(url, file))).tobytes()
            seen.sound[seed].add(hashlib.sha256(pixels).hexdigest())


async def measure(server: ComfyServer, minutes: float, seed: int) -> Seen:
    seen, prompts = Seen(), bundled()
    good, until = prompts["01 Text to image"], time.monotonic() + 60 * minutes
    for number, fault in enumerate(faults(prompts, seed)):
        if number % CHECKED_EVERY == 0:
            await sound(server.url, good, number // CHECKED_EVERY % 2, seen)
            print(f"{number} prompts, {len(seen.defects)} defects", flush=True)
            if time.monotonic() > until:
                break
        try:
            await queue(server.url, fault, seen)
        except (aiohttp.ClientError, ConnectionError) as error:
            seen.defects.append(f"{fault.workflow}: {fault.node}.{fault.name} = {fault.value}: {error!r}")
        if server.process.poll() is not None:
            seen.defects.append(f"the server ended with code {server.process.returncode}")
            break
    return seen


def bundled() -> dict[str, dict]:
    """The workflows of bundled models, but for those that would take minutes."""
    found = {}
    for name, prompt in workflows().items():
        models = str({node["inputs"].get("model_name") for node in prompt.values()})
        if "(bundled)" in models and name not in ("27 Compare all methods", "07 Find the fastest method"):
            found[name] = prompt
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=15, help="duration (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ComfyServer(Path(os.environ["COMFYUI_PATH"]), log) as server:
            seen = asyncio.run(measure(server, options.minutes, options.seed))
            alive = server.process.poll() is None
    total = Counter()
    for counts in seen.outcomes.values():
        total.update(counts)
    report = {
        "schema": SCHEMA,
        "minutes": options.minutes,
        "seed": options.seed,
        "spoiled_prompts": total.total(),
        "server_alive_at_the_end": alive,
        "outcomes": dict(total),
        "outcomes_by_kind": {kind: dict(counts) for kind, counts in sorted(seen.outcomes.items())},
        "raised": dict(seen.raised.most_common()),
        "errors": dict(seen.unnamed),
        "defects": seen.defects,
        "sound_prompts": seen.sounds,
        "pictures_per_seed": [len(kinds) for kinds in seen.sound.values()],
        "slowest_seconds": round(seen.slowest, 1),
        "some_messages": {
            what: text.replace(str(server.base), "BASE") for what, text in list(seen.messages.items())[:60]
        },
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        write(report, options.out)


if __name__ == "__main__":
    main()
