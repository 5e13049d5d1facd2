"""The demo as a user runs it, with a server of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 300


def demo(comfyui: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts/demo.py"), "--comfyui", str(comfyui), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)


def test_demo_leaves_pictures_map_and_traces_and_tells_the_passes(comfyui):
    done = demo(comfyui, "--prompt", "yellow star", "--seed", "11")
    assert done.returncode == 0, done.stderr
    files = [ROOT / "output" / line.strip() for line in done.stdout.splitlines() if "_0" in line]
    assert files and all(file.is_file() for file in files)
    names = " ".join(file.name for file in files)
    for word in ("sjd", "next_token", "map", "trace"):
        assert word in names
    reports = [json.loads(file.read_text("utf-8")) for file in files if file.suffix == ".json"]
    assert {report["totals"]["seed"] for report in reports} == {11}
    assert {report["settings"]["prompt"] for report in reports} == {"yellow star"}
    passes = dict(re.findall(r"^  (next token|sjd): (\d+) passes", done.stdout, re.MULTILINE))
    assert int(passes["sjd"]) < int(passes["next token"]) == 256


def test_demo_fails_with_one_line_that_names_the_log(comfyui):
    done = demo(comfyui, "--prompt", "xyzzy plugh")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and "xyzzy plugh" in line and line.endswith("output/server.log")


def test_demo_refuses_a_file_that_is_no_workflow(comfyui, tmp_path):
    file = tmp_path / "ui.json"
    file.write_text('{"nodes": [], "links": []}')
    done = demo(comfyui, "--workflow", str(file))
    assert done.returncode == 1
    assert done.stderr == f"error: {file} is not in API format (in ComfyUI: Workflow > Export (API))\n"
