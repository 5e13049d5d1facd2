"""Templates and blueprints, read from their files: subgraphs that every front end shows, and packs that exist."""

import itertools
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
TEMPLATES = sorted(WORKFLOWS.glob("*.json"))
OTHER_ITALICS = {"panda", "rocket", "flat", "i", "fps"}  # words of prompts, a number, an output
BLUEPRINTS = sorted((WORKFLOWS.parent / "subgraphs").glob("*.json"))


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_the_widgets_of_a_subgraph_have_names_of_their_own_and_its_prompt_is_an_input(path):
    """Of two proxies with one name, front end 1.58.1 keeps the first. An input has the name that it gets. A prompt
    that is named among the proxyWidgets too is drawn over the outputs by front end 1.32.9."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    for subgraph in graph.get("definitions", {"subgraphs": []})["subgraphs"]:
        [node] = [node for node in graph["nodes"] if node["type"] == subgraph["id"]]
        proxies = [name for _, name in node["properties"]["proxyWidgets"]]
        assert len(proxies) == len({*proxies}) and "text" not in proxies
        assert "text" in [each["name"] for each in subgraph["inputs"]]
        assert [each["name"] for each in node["inputs"]] == [each["name"] for each in subgraph["inputs"]]
        inside = {each["id"]: each for each in subgraph["nodes"]}
        for link in subgraph["links"]:
            if link["target_id"] in inside:
                assert inside[link["target_id"]]["inputs"][link["target_slot"]]["link"] == link["id"]


def test_nodes_name_no_pack_that_the_registry_does_not_have():
    """ComfyUI Manager offers to install the pack of that name."""
    for path in [*TEMPLATES, *BLUEPRINTS]:
        assert set(re.findall(r'"cnr_id": "([^"]*)"', path.read_text(encoding="utf-8"))) <= {"comfy-core"}


def box(node: dict, preview: bool = False) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a node with its title; with a ``preview``, if it is a sampler."""
    (x, y), (width, height) = node["pos"], node["size"]
    samples = [output["type"] for output in node["outputs"]] == ["LATENT", "AR_TRACE"]
    return x, y - 30, x + width, y + height + 235 * (preview and samples)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_opens_large_enough_to_read_and_no_node_covers_another(path):
    """The front end fits all nodes into three quarters of the page, here of 1400 x 800 pixels, and draws no text below
    57 %. Above a node is its title; below the widgets of a sampler ComfyUI shows its preview."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    lefts, tops, rights, bottoms = zip(*map(box, nodes), strict=True)
    assert 1050 / (max(rights) - min(lefts) + 20) >= 0.58 and 600 / (max(bottoms) - min(tops) + 20) >= 0.58
    for one, other in itertools.combinations([box(node, preview=True) for node in nodes], 2):
        assert max(one[0], other[0]) >= min(one[2], other[2]) or max(one[1], other[1]) >= min(one[3], other[3])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_note_names_widgets_that_its_template_has(path):
    graph = json.loads(path.read_text(encoding="utf-8"))
    nodes = [
        *graph["nodes"],
        *(node for sub in graph.get("definitions", {}).get("subgraphs", ()) for node in sub["nodes"]),
    ]
    words = json.loads((WORKFLOWS.parent / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    known = {name for node in nodes for name in words.get(node["type"], {}).get("inputs", ())} | OTHER_ITALICS
    [note] = [node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote"]
    for change in re.findall(r"\*\*Change\*\*.*", note):
        assert {*re.findall(r"(?<!\*)\*([a-z][a-z_]*)\*(?!\*)", change)} <= known


def test_pictures_of_the_help_show_nodes_that_their_templates_have(monkeypatch):
    monkeypatch.syspath_prepend(WORKFLOWS.parent / "tools")
    for name, scene in import_module("pictures").SCENES.items():
        nodes = json.loads((WORKFLOWS / f"{scene.workflow}.json").read_text(encoding="utf-8"))["nodes"]
        wired = {end for source, _, target, _ in scene.wires for end in (source, target)}
        named = {node.split("#")[0] for node in {*scene.shown, *scene.values, *wired}}
        assert named <= {node["type"] for node in nodes} | {*scene.added} | {"SpecARLoadTrace"}, name
