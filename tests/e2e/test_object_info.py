"""The interface of our nodes as ComfyUI publishes it. Saved workflows depend on it: it only ever grows at the end."""

import json
import urllib.request
from pathlib import Path

import pytest

CONTRACT = Path(__file__).with_name("object_info.json")
FILE_CHOICES = ("model_name", "drafter_name", "decoder_name", "trace_name")  # depend on what lies in the folders


@pytest.fixture(scope="module")
def nodes(comfy) -> dict[str, dict]:
    return {key: node for key, node in comfy.get("/object_info").items() if key.startswith("SpecAR")}


def contract(node: dict) -> dict:
    inputs = {
        kind: {name: published(name, *spec) for name, spec in node["input"].get(kind, {}).items()}
        for kind in ("required", "optional")
    }
    outputs = list(map(list, zip(node["output"], node["output_name"], strict=True)))
    keys = ("display_name", "category", "output_node", "input_order")
    return {**{key: node[key] for key in keys}, "inputs": inputs, "outputs": outputs}


def published(name: str, kind: str | list, options: dict | None = None) -> list:
    """Type and options of an input, without its tooltip and without lists of files."""
    hidden = ("tooltip", "options") if name in FILE_CHOICES else ("tooltip",)
    kind = "files" if name in FILE_CHOICES else kind
    return [kind, {key: value for key, value in (options or {}).items() if key not in hidden}]


def test_interface_is_the_published_one(nodes, request):
    found = json.loads(json.dumps({key: contract(nodes[key]) for key in sorted(nodes)}))
    if request.config.getoption("--write-contract"):
        CONTRACT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(CONTRACT.read_text(encoding="utf-8"))


def test_every_input_has_a_tooltip(nodes):
    for key, node in nodes.items():
        for kind in ("required", "optional"):
            for name, spec in node["input"].get(kind, {}).items():
                options = spec[1] if len(spec) > 1 else {}
                assert options.get("tooltip") or options.get("hidden"), f"{key}.{name} has no tooltip"


def test_every_node_has_a_description_and_a_help_page(comfy, nodes):
    assert nodes
    for key, node in nodes.items():
        assert node["description"], f"{key} has no description"
        with urllib.request.urlopen(f"{comfy.url}/extensions/ComfyUI-SpecAR/docs/{key}/en.md") as reply:
            assert len(reply.read()) > 200, f"the help page of {key} is empty"
