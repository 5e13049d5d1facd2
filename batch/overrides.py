"""Settings of one job put into an API-format workflow: by the input's name, by role, or by node."""

import copy
import hashlib
import json
import math
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..limits.limits import NODES, SETTINGS, parse_json
from .jobs import Job, Scientific, for_each

Workflow = dict[str, dict]
Place = tuple[str, str]  # node id, input

ROLES = {"prompt": "positive", "negative": "negative"}  # column -> the input whose text it is
TEXTS = ("text", "prompt")  # what nodes that read a prompt call it
SEEDS = ("seed", "noise_seed")
LONG = 1e11  # from here on spreadsheets show a whole number in scientific notation, and save what they show
EXACT = 2**53  # below, every whole number is a float
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class OverrideError(ValueError):
    """A setting does not fit the workflow; the message says which, and what the workflow has."""


def read_workflow(path: Path) -> Workflow:
    """A workflow in API format. Raises OverrideError."""
    try:
        if path.stat().st_size > SETTINGS:
            raise ValueError(f"it has more than {SETTINGS} bytes")
        workflow = parse_json(path.read_text(encoding="utf-8-sig"))
        if isinstance(workflow, dict) and len(workflow) > NODES:
            raise ValueError(f"it has {len(workflow)} nodes; {NODES} is the limit")
    except (OSError, ValueError) as error:
        raise OverrideError(f"cannot read the workflow {path}: {error}") from error
    nodes = workflow.values() if isinstance(workflow, dict) else [workflow]
    if not workflow or not all(map(is_node, nodes)):
        raise OverrideError(
            f"{path} is not in API format (in ComfyUI: Workflow > Export (API); those of this pack are "
            "in workflows/api)"
        )
    return workflow


def is_node(node: Any) -> bool:
    """Has it the parts that are read here? A list among its inputs is a link: a node's id, and the index of its
    output."""
    if not isinstance(node, dict) or not isinstance(node.get("inputs"), dict):
        return False
    named = isinstance(node.get("class_type"), str) and isinstance(node.get("_meta", {}), dict)
    return named and all(value for value in node["inputs"].values() if isinstance(value, list))


def make_prompts(workflow: Workflow, jobs: list[Job], whole: Collection[Place] = ()) -> dict[str, Workflow]:
    """Job id -> its workflow. Raises RowsError with the lines of all jobs that do not fit."""
    return for_each(jobs, lambda job: with_overrides(workflow, job.overrides, whole))


def with_overrides(workflow: Workflow, overrides: dict[str, Any], whole: Collection[Place] = ()) -> Workflow:
    """A copy with these settings. A name is `prompt` or `negative` (the texts that feed such inputs), an input's own
    name (in every node that has it), or one node's: `Title.input`, `12.input` or `Class.input`. The latter win. whole:
    inputs that are known to be whole numbers, which a workflow does not show (ComfyUI's page saves 2.0 as 2). Raises
    OverrideError.
    """
    changed = copy.deepcopy(workflow)
    inputs, of_nodes = settable(workflow)
    if unknown := [name for name in overrides if name not in inputs and name not in of_nodes]:
        nodes = ", ".join(f"{key} ({node_title(node)})" for key, node in workflow.items())
        advice = ". For a negative prompt, connect a CLIP Text Encode to it first" if "negative" in unknown else ""
        raise OverrideError(
            f"the workflow has no {', '.join(unknown)} that can be set (what another node computes cannot); it has "
            f"{', '.join(sorted(inputs))}, each also of one node, as NODE.input: {nodes}{advice}"
        )
    for known in (inputs, of_nodes):
        setter: dict[Place, str] = {}
        for name in (name for name in overrides if name in known):
            if known is of_nodes and len(known[name]) > 1:
                by_id = ", ".join(map(".".join, known[name]))
                raise OverrideError(f"{name}: {len(known[name])} nodes are called so; use one of {by_id}")
            for node, field in known[name]:
                current = workflow[node]["inputs"][field]
                value = convert(overrides[name], current, name, (node, field) in whole)
                other = setter.setdefault((node, field), name)
                if other != name and changed[node]["inputs"][field] != value:
                    raise OverrideError(f"{other} and {name} set the same input ({node}.{field}) to different values")
                changed[node]["inputs"][field] = value
    return changed


def name_files(prompt: Workflow, name: str) -> Workflow:
    """A copy whose saved files all begin with their own prefix and `name`: no job writes over another's files, and
    ComfyUI, which would skip the saving of an image it has just made, saves it again."""
    changed = copy.deepcopy(prompt)
    for node in changed.values():
        prefix = node["inputs"].get("filename_prefix", [])
        if not isinstance(prefix, list):
            node["inputs"]["filename_prefix"] = f"{prefix}_{name}"
    return changed


def fingerprint(settings: Any) -> str:
    """The same for equal settings, also after a restart."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def node_title(node: dict) -> str:
    return node.get("_meta", {}).get("title", node["class_type"])


def source(workflow: Workflow, node: str, field: str) -> Place | None:
    """Where an input's value is typed: there, or in one of ComfyUI's primitive nodes (Int, String) that feeds it."""
    value = workflow[node]["inputs"].get(field)
    if not isinstance(value, list):
        return None if value is None else (node, field)
    held = workflow.get(str(value[0]), {"inputs": {}})["inputs"]
    return (str(value[0]), "value") if held.keys() == {"value"} and not isinstance(held["value"], list) else None


def settable(workflow: Workflow) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """Names of columns -> what each sets: those of texts and of inputs in any node, and those of one node's inputs. A
    node is called by its id, else by its title, else by its class; inputs and titles may have dots, too."""
    inputs, by_class, by_title, by_id = {}, {}, {}, {}
    for node, content in workflow.items():
        for field in content["inputs"]:
            if place := source(workflow, node, field):
                of_node = (by_class, content["class_type"]), (by_title, node_title(content)), (by_id, node)
                for names, name in ((inputs, field), *((names, f"{who}.{field}") for names, who in of_node)):
                    if place not in names.setdefault(name, []):
                        names[name].append(place)
    inputs |= {role: found for role in ROLES if (found := texts_of(workflow, role))}
    of_nodes = by_class | by_title | by_id
    return inputs, {name: found for name, found in of_nodes.items() if name not in inputs}


def texts_reaching(workflow: Workflow, role: str) -> list[Place]:
    """The prompts that reach an input of this name, directly or through other nodes."""
    found: list[Place] = []
    links = [node["inputs"][role] for node in workflow.values() if isinstance(node["inputs"].get(role), list)]
    seen: set[str] = set()
    while links:
        node = str(links.pop(0)[0])
        if node in seen or node not in workflow:
            continue
        seen.add(node)
        inputs = workflow[node]["inputs"]
        if texts := [place for field in TEXTS if (place := source(workflow, node, field))]:
            found += texts
        elif isinstance(inputs.get(role), list):  # such as Apply ControlNet, which passes both prompts on
            links.append(inputs[role])
        else:
            links += [value for value in inputs.values() if isinstance(value, list)]
    return list(dict.fromkeys(found))


def texts_of(workflow: Workflow, name: str) -> list[Place]:
    """The prompts that a column of ROLES sets. What feeds both inputs, such as a prompt and its zeroed form, is the
    prompt."""
    own = texts_reaching(workflow, ROLES["prompt"])
    return own if name == "prompt" else [place for place in texts_reaching(workflow, ROLES[name]) if place not in own]


def convert(value: Any, current: Any, name: str, whole: bool = False) -> Any:
    """The value in the type of the current one. whole: it is known to be a whole number. Raises OverrideError."""
    if isinstance(current, bool):
        word = str(value).strip().lower()
        if word not in BOOLEANS:
            raise OverrideError(f"{name} must be true or false, not {value!r}")
        return BOOLEANS[word]
    if isinstance(current, int | float):
        return number(value, name, whole)
    if isinstance(current, str):
        if isinstance(value, bool):
            raise OverrideError(f"{name} must be a string, not {value!r}")
        return str(value)
    return value


def number(value: Any, name: str, whole: bool) -> int | float:
    """An int for every whole number: seeds have up to 64 bits, more than a float.

    Raises OverrideError for what is no number; for a fraction where a whole one is needed, which ComfyUI would cut off
    silently; and where a whole number may have lost digits, so that different ones of a table became equal: in
    scientific notation, and as a float that stands for several. Of inputs that may be fractions, those called a seed
    are checked where they are as long as a spreadsheet shows none in full.
    """
    is_seed = name.split(".")[-1] in SEEDS
    text, found = str(value).replace("_", "?"), math.nan  # Python would read 1_0 as 10
    try:
        found = int(text)
    except ValueError:
        with suppress(ValueError):
            found = float(text.replace(",", "."))
    if isinstance(found, float) and not math.isnan(found):
        scientific = isinstance(value, Scientific) or "e" in text.lower()
        rounded = (scientific or abs(found) >= EXACT) if whole or is_seed else abs(found) >= LONG
        if rounded and (whole or "seed" in name.casefold()):
            raise OverrideError(
                f"{name} must be a whole number with all its digits, not {value!r}, as spreadsheets write "
                "one that they have rounded: format the column as text, and enter the numbers again"
            )
        found = int(found) if found.is_integer() else found
    if "," in text or not math.isfinite(found):
        how = f" (a fraction has a decimal point: {text.strip().replace(',', '.')})" if math.isfinite(found) else ""
        raise OverrideError(f"{name} must be a number, not {value!r}{how}")
    if is_seed and not (isinstance(found, int) and 0 <= found < 2**64):
        raise OverrideError(f"{name} must be a whole number from 0 to {2**64 - 1}, not {found!r}")
    if whole and isinstance(found, float):
        raise OverrideError(f"{name} must be a whole number, not {found!r}")
    return found
