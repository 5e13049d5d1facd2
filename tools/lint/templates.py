"""Templates and blueprints: subgraphs that every front end shows, packs that exist, canvases that can be read."""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "workflows"
TEMPLATES = sorted(WORKFLOWS.glob("*.json"))
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
OTHER_ITALICS = {"panda", "rocket", "flat", "i", "fps"}  # words of prompts, a number, an output


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def proxies_of_subgraphs() -> Iterator[str]:
    """The widgets of a subgraph have names of their own, and its prompt is an input.

    Of two proxies with one name, front end 1.58.1 keeps the first. An input has the name that it gets. A prompt that is
    named among the proxyWidgets too is drawn over the outputs by front end 1.32.9.
    """
    for path in (*TEMPLATES, *BLUEPRINTS):
        graph = read(path)
        for subgraph in graph.get("definitions", {"subgraphs": []})["subgraphs"]:
            [node] = [node for node in graph["nodes"] if node["type"] == subgraph["id"]]
            proxies = [name for _, name in node["properties"]["proxyWidgets"]]
            inputs = [each["name"] for each in subgraph["inputs"]]
            inside = {each["id"]: each for each in subgraph["nodes"]}
            right = len(proxies) == len({*proxies}) and "text" not in proxies and "text" in inputs
            right = right and [each["name"] for each in node["inputs"]] == inputs
            for link in subgraph["links"]:
                if link["target_id"] in inside:
                    right = right and inside[link["target_id"]]["inputs"][link["target_slot"]]["link"] == link["id"]
            if not right:
                yield f"{path.name}: the inputs of {subgraph['name']} are not those of its node, or two share a name"


def packs() -> Iterator[str]:
    """ComfyUI Manager offers to install the pack that a node names, so that it must be one of the registry's."""
    for path in (*TEMPLATES, *BLUEPRINTS):
        for pack in set(re.findall(r'"cnr_id": "([^"]*)"', path.read_text(encoding="utf-8"))) - {"comfy-core"}:
            yield f"{path.name} names the pack {pack}"


def box(node: dict, preview: bool = False) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a node with its title; with a ``preview``, if it is a sampler."""
    (x, y), (width, height) = node["pos"], node["size"]
    samples = [output["type"] for output in node["outputs"]] == ["LATENT", "AR_TRACE"]
    return x, y - 30, x + width, y + height + 235 * (preview and samples)


def canvases() -> Iterator[str]:
    """A template opens large enough to read, and no node covers another.

    The front end fits all nodes into three quarters of the page, here of 1400 x 800 pixels, and draws no text below
    57 %. Above a node is its title; below the widgets of a sampler ComfyUI shows its preview.
    """
    for path in TEMPLATES:
        nodes = read(path)["nodes"]
        lefts, tops, rights, bottoms = zip(*map(box, nodes), strict=True)
        if min(1050 / (max(rights) - min(lefts) + 20), 600 / (max(bottoms) - min(tops) + 20)) < 0.58:
            yield f"{path.name} opens too small to be read"
        for one, other in itertools.combinations([box(node, preview=True) for node in nodes], 2):
            beside = max(one[0], other[0]) >= min(one[2], other[2])
            if not (beside or max(one[1], other[1]) >= min(one[3], other[3])):
                yield f"{path.name}: a node covers another, at {one} and {other}"


def notes() -> Iterator[str]:
    """A note names widgets that its template has."""
    words = read(ROOT / "locales/en/nodeDefs.json")
    for path in TEMPLATES:
        graph = read(path)
        inner = (node for sub in graph.get("definitions", {}).get("subgraphs", ()) for node in sub["nodes"])
        nodes = [*graph["nodes"], *inner]
        known = {name for node in nodes for name in words.get(node["type"], {}).get("inputs", ())} | OTHER_ITALICS
        [note] = [node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote"]
        for change in re.findall(r"\*\*Change\*\*.*", note):
            for word in {*re.findall(r"(?<!\*)\*([a-z][a-z_]*)\*(?!\*)", change)} - known:
                yield f"{path.name}: the note names {word}, which no node has"


def help_pictures() -> Iterator[str]:
    """Pictures of the help show nodes that their templates have."""
    sys.path.insert(0, str(ROOT / "tools"))  # pictures.py is a program of that folder
    from pictures import SCENES

    for name, scene in SCENES.items():
        wired = {end for source, _, target, _ in scene.wires for end in (source, target)}
        named = {node.split("#")[0] for node in {*scene.shown, *scene.values, *wired}}
        nodes = {node["type"] for node in read(WORKFLOWS / f"{scene.workflow}.json")["nodes"]}
        for node in named - nodes - {*scene.added} - {"SpecARLoadTrace"}:
            yield f"the picture {name} shows {node}, which {scene.workflow} does not have"


CHECKS = (proxies_of_subgraphs, packs, canvases, notes, help_pictures)
