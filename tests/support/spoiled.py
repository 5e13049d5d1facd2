"""Prompts with one invalid input, and what a server may answer to them."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

from tools.comfy_client import Run

ALLOWED = ("ValueError", "FileNotFoundError", "CheckpointError")  # what a node of ours may raise ...
OF_COMFYUI = ("DependencyCycleError",)  # ... and what ComfyUI raises in its name
LARGEST_BATCH = 12  # a larger one would only be slow

NESTED: list[Any] = [[], {}, ["999", 0]]
WORDS: list[Any] = ["", " ", "\0", "nonsense", "ü" * 5000, "../../etc/passwd", "NaN", "🍎 apple", "[1, 0]"]
NUMBERS: list[Any] = [-1, 0, 1, -(2**63), 2**31, 2**64, 10**30, 1e308, math.nan, math.inf, -math.inf, 0.5]
JUNK: dict[str, list[Any]] = {
    "text": [*WORDS, None, 3, -1.5, True, *NESTED, ["1"], {"__value__": [1, 2]}, {"a": {"b": []}}],
    "number": [*NUMBERS, "5", "abc", "", "NaN", "1e400", None, True, *NESTED, [1, 2], {"__value__": "x"}],
    "switch": [None, 0, 2, "true", "", "no", math.nan, *NESTED],
    "link": [None, "", 0, True, "1", 1.5, *NESTED, ["1", 99], ["1", -1], ["1", "x"], [None, 0], [[], 0], ["1", 0, 0]]
    + [{"samples": 1}, {"__value__": [1, 2]}],
}


def kind_of(value: Any) -> str:
    """Which sort of input holds this value."""
    if isinstance(value, list):
        return "link"
    return "switch" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "text"


def spoiled(prompt: dict, dice: random.Random) -> tuple[dict, str]:
    """The prompt with one input of one node spoiled, and what was done."""
    prompt = copy.deepcopy(prompt)
    key = dice.choice([key for key, node in prompt.items() if node["inputs"]])
    node = prompt[key]
    name, what, how = dice.choice(sorted(node["inputs"])), node["class_type"], dice.random()
    if how < 0.04:
        del node["inputs"][name]
        return prompt, f"{what} without {name}"
    if how < 0.07:
        node["inputs"]["nonsense"] = dice.choice([1, None, [key, 0]])
        return prompt, f"{what} with nonsense"
    if how < 0.09:
        node["class_type"] = dice.choice(["Nonsense", None, 3, ""])
        return prompt, f"{what} is a {node['class_type']!r}"
    kind = kind_of(node["inputs"][name])
    values = JUNK[kind]
    if kind == "link":  # to itself, and to any other node: a wrong type, or a ring
        values = values + [[key, 0]] + [[other, dice.randrange(3)] for other in dice.sample(sorted(prompt), 3)]
    if name == "batch_size":
        values = [value for value in values if not isinstance(value, int) or value <= LARGEST_BATCH]
    node["inputs"][name] = dice.choice(values)
    return prompt, f"{what}.{name} = {node['inputs'][name]!r:.60}"


def problem_of(run: Run) -> str | None:
    """What is not as it should be in how a spoiled prompt ended, or None."""
    if run.outcome != "error":
        return None
    ours = str(run.error["node_type"]).startswith("SpecAR")
    kind = run.error["exception_type"].rsplit(".", 1)[-1]
    if ours and kind not in (*ALLOWED, *OF_COMFYUI):
        return f"{run.error['node_type']} raised {kind}: {run.message()[:300]}"
    return f"{run.error['node_type']} shows a traceback" if ours and "Traceback" in run.message() else None
