"""Acceptance maps beside the images of a batch: which workflows can have them, and what the files are called."""

import copy
import re
from pathlib import Path
from typing import Any

from .jobs import Job, RowsError
from .overrides import OverrideError, Workflow

SAMPLER = re.compile(r"SpecAR\w*Sampler")  # class of the nodes whose outputs are LATENT and AR_TRACE
LATENT, TRACE = 0, 1  # places of these outputs
MAP, OVERLAY = "_map", "_overlay"  # added to the id of a Save Image node: ids of the nodes that save and draw its map


def with_maps(workflow: Workflow) -> Workflow:
    """A copy in which Acceptance Map draws, and another Save Image saves, a map of every image that is saved and that
    one AR sampler generated. Raises OverrideError where there is no such image."""
    changed = copy.deepcopy(workflow)
    for node, content in workflow.items():
        if content["class_type"] == "SaveImage" and (sampler := sampler_of(workflow, node)):
            image, prefix = content["inputs"]["images"], content["inputs"].get("filename_prefix")
            drawing = {"trace": [sampler, TRACE], "image": image, "metric": "source", "opacity": 0.5}
            named = f"{prefix}{MAP}" if isinstance(prefix, str) else prefix
            saving = {"images": [node + OVERLAY, 0], "filename_prefix": named}
            changed[node + OVERLAY] = {"class_type": "SpecARAcceptanceMap", "inputs": drawing}
            changed[node + MAP] = {"class_type": "SaveImage", "inputs": saving}
    if len(changed) == len(workflow):
        raise OverrideError(
            "--maps: no Save Image of the workflow saves an image of one AR sampler, so there is no "
            "trace to draw maps from. Add such a Save Image, or leave --maps out"
        )
    return changed


def sampler_of(workflow: Workflow, node: str) -> str | None:
    """The AR sampler that generated what reaches a node; None where it is not exactly one, and for charts and other
    images of a trace."""
    found, seen, reached = set(), set(), [node]
    while reached:
        here = reached.pop()
        if here in seen or here not in workflow:
            continue
        seen.add(here)
        for link in workflow[here]["inputs"].values():
            if not isinstance(link, list):
                continue
            origin, output = str(link[0]), link[1]
            if not SAMPLER.fullmatch(workflow.get(origin, {}).get("class_type", "")):
                reached.append(origin)
            elif output == TRACE:
                return None
            else:
                found.add(origin)
    return found.pop() if len(found) == 1 else None


def has_map(record: dict[str, Any]) -> bool:
    """Was the map of a result saved, too?"""
    nodes = (str(file.get("node", "")) for file in record.get("files", []))
    copies = {Path(copy) for copy in record.get("copies", [])}  # Ray names no nodes
    return any(node.endswith(MAP) for node in nodes) or any(map_of(copy) in copies for copy in copies)


def map_of(image: Path) -> Path:
    """Where the map of an image is saved: job_map.png beside job.png."""
    return image.with_name(f"{image.stem}{MAP}.png")


def check_map_names(jobs: list[Job]) -> None:
    """Raises RowsError where a job's image would have the name of another one's map."""
    ids = {job.id.casefold() for job in jobs}
    taken = [job for job in jobs if (job.id + MAP).casefold() in ids]
    if taken:
        why = "with --maps, the map of {0} has the name of the job {0}{1}: give it another id"
        raise RowsError([(job.line, why.format(job.id, MAP)) for job in taken])
