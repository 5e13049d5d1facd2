"""The schema of a node, with its English words from ``locales/en/nodeDefs.json``, where translators find them, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from comfy_api.latest import io

ENGLISH = Path(__file__).resolve().parent.parent / "locales/en/nodeDefs.json"


@cache
def english() -> dict[str, Any]:
    """For each node id: its display_name and description, and the name and tooltip of its inputs and outputs."""
    return json.loads(ENGLISH.read_text(encoding="utf-8"))


def schema(
    node_id: str,
    category: str,
    search: Sequence[str],
    inputs: list[io.Input],
    outputs: list[io.Output],
    is_output_node: bool = False,
) -> io.Schema:
    """The schema of a node of this pack. Raises KeyError where the node, a visible input or an output has no words.

    search: words by which ComfyUI's search finds the node besides its name, in versions that search in more than names.
    """
    words = english()[node_id]
    for field in (field for field in inputs if not field.extra_dict.get("hidden")):
        if field.id not in words["inputs"]:
            raise KeyError(f"{node_id}.{field.id} has no words in {ENGLISH}")
        text = words["inputs"][field.id]
        field.tooltip = text["tooltip"]
        field.display_name = text["name"] if text["name"] != field.id else None
    for index, output in enumerate(outputs):
        text = words["outputs"][str(index)]
        output.tooltip, output.display_name = text["tooltip"], text["name"]
    samples = [output.io_type for output in outputs] == [
        "LATENT",
        "AR_TRACE",
    ]  # what a run took is sent again if cached
    newer = {"search_aliases": list(search), "has_intermediate_output": samples}
    known = {field.name for field in fields(io.Schema)}
    return io.Schema(
        node_id=node_id,
        display_name=words["display_name"],
        category=category,
        description=words["description"],
        inputs=inputs,
        outputs=outputs,
        is_output_node=is_output_node,
        **{name: value for name, value in newer.items() if name in known},
    )
