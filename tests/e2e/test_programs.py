"""The example of docs/api.md over HTTP, and what it says of the history."""

import re
import subprocess
import sys

from tests.support.patience import PATIENCE
from tools.comfy_server import PACK

DOCUMENT = (PACK / "docs/api.md").read_text(encoding="utf-8").split("## Over HTTP")[1]


def test_the_example_queues_a_workflow_and_fetches_its_image(comfy, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "workflows").symlink_to(PACK / "workflows", target_is_directory=True)
    command = [sys.executable, "-c", code.replace("http://127.0.0.1:8188", comfy.url)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    [image] = tmp_path.glob("*.png")
    assert image.read_bytes().startswith(b"\x89PNG") and "'target_passes'" in done.stdout and "'seed': 7" in done.stdout


def test_the_history_has_what_the_document_lists(comfy):
    """Of all but Find Fastest, which takes its time."""
    listed = dict(re.findall(r"^\| ([\w ]+) \| (`(?:images|specar)`.*) \|$", DOCUMENT, re.MULTILINE))
    titles = {name: node["display_name"] for name, node in comfy.get("/object_info").items()}
    names = ("19 Compare three methods", "07 Acceptance map", "06 Race")
    about = {"1": comfy.workflow(names[0])["1"], "2": {"class_type": "SpecARModelInfo", "inputs": {"model": ["1", 0]}}}
    found = {}
    for prompt in (*(comfy.workflow(name, seed=410) for name in names), about):
        for node, output in comfy.run(prompt).outputs.items():
            found[titles[prompt[node]["class_type"]]] = output.keys() - {"animated"}
    keys = {title: set(re.findall("`([a-z_]+)`", text)) - {"temp"} for title, text in listed.items()}
    del keys["Find Fastest"]
    assert {title: found[title] for title in keys} == keys
