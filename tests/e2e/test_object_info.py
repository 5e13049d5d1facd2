"""The interface of our nodes as ComfyUI publishes it, and their help pages, images and translations as it serves them.
Saved workflows depend on the interface: it only ever grows at the end."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from tools.comfy_server import PACK, PACK_FOLDER

CONTRACT = Path(__file__).with_name("object_info.json")
# Choices that depend on what lies in the folders.
FILE_CHOICES = ("model_name", "drafter_name", "lora_name", "decoder_name", "trace_name")


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


@pytest.mark.parametrize("language", ["en", "zh"])
def test_translations_and_help_pages_with_their_images_are_served(comfy, nodes, language):
    offered = comfy.get("/i18n")[language]
    for file in ("nodeDefs", "main"):
        own = json.loads((PACK / f"locales/{language}/{file}.json").read_text("utf-8"))
        given = offered["nodeDefs"] if file == "nodeDefs" else offered
        assert own == {key: given[key] for key in own}

    def fetch(path: str) -> bytes:  # from where the front end resolves what a page names
        with urllib.request.urlopen(f"{comfy.url}/extensions/{PACK_FOLDER}/docs/{path}") as reply:
            return reply.read()

    for node in nodes.keys() & {page.name for page in (PACK / "web/docs").iterdir()}:
        [image] = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", fetch(f"{node}/{language}.md").decode())
        assert fetch(image)[8:12] == b"WEBP", node
