"""The demo as a user runs it, with a server of its own; its errors on the tests' server, which is there already."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE
from tools import comfy_server

ROOT = Path(__file__).resolve().parents[2]


def demo(comfyui: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/demo.py"), "--comfyui", str(comfyui), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_demo_leaves_images_and_traces_prints_the_passes_and_serves_until_it_is_ended(comfyui, tmp_path):
    command = [sys.executable, str(ROOT / "tools/demo.py"), "--comfyui", str(comfyui), "--serve"]
    run = subprocess.Popen(
        [*command, "--prompt", "yellow star, zebra", "--seed", "11"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    said = []
    while not said or not said[-1].startswith("ComfyUI is at"):
        said.append(run.stdout.readline())
        assert said[-1], said
    assert list(tmp_path.glob("specar-comfyui-*"))
    run.terminate()
    assert run.wait(PATIENCE) == 143 and not list(tmp_path.glob("specar-comfyui-*")), "the server's folder goes"

    files = [ROOT / "output" / line.strip() for line in said if "_0" in line]
    assert files and all(file.is_file() for file in files)
    names = " ".join(file.name for file in files)
    for word in ("race", "image", "trace"):
        assert word in names
    reports = [json.loads(file.read_text("utf-8")) for file in files if file.suffix == ".json"]
    assert {report["totals"]["seed"] for report in reports} == {11}
    assert {report["settings"]["prompt"] for report in reports} == {"yellow star, zebra"}
    done = [line for line in said if line.endswith(": done\n")]
    assert len(done) == len(set(done)) and "  Save Trace: done\n" in done and not any("SpecAR" in line for line in done)
    [ignored] = (line for line in said if line.startswith("  Notice: "))
    assert "zebra" in ignored
    passes = dict(re.findall(r"^  (.*): (\d+) forward passes", "".join(said), re.MULTILINE))
    assert list(passes) == ["SJD, same seed, window 16", "next token"]
    assert int(passes["SJD, same seed, window 16"]) < int(passes["next token"]) == 256


def test_a_port_that_is_in_use_is_named_before_anything_starts(comfy, comfyui):
    done = demo(comfyui, "--serve", "--port", str(comfy.port))
    assert done.returncode == 1 and re.fullmatch(f"error: port {comfy.port} is in use.*\n", done.stderr)
    assert not (ROOT / f"output/server-{comfy.port}.log").exists()
    assert comfy.get("/queue")["queue_running"] == []


def test_a_server_of_others_is_not_taken_for_ones_own(comfy, tmp_path, monkeypatch):
    """One that took the port after it was found free, while ours still starts."""
    monkeypatch.setattr(comfy_server, "in_use", lambda _port: False)
    for folder in ("comfy", "input"):
        (tmp_path / folder).mkdir()
    (tmp_path / "input/example.png").touch()
    (tmp_path / "comfy/cli_args.py").write_text("", encoding="utf-8")
    (tmp_path / "main.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    server = comfy_server.ComfyServer(tmp_path, tmp_path / "server.log", port=comfy.port)
    with pytest.raises(comfy_server.ServerError, match=f"port {comfy.port}"), server:
        pass
    assert server.process.poll() is not None and comfy.get("/queue")["queue_running"] == []


@pytest.fixture
def demo_module(monkeypatch):
    """tools/demo.py"""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("demo")


@pytest.fixture
def fail(comfy, demo_module, monkeypatch, capsys):
    """fail(*arguments) runs a demo that is to fail, and returns what it says about that."""
    monkeypatch.setattr(demo_module, "ComfyServer", lambda *_arguments, **_options: nullcontext(comfy))

    def fail(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["demo.py", "--comfyui", "there", *arguments])
        assert demo_module.main() == 1
        return capsys.readouterr().err

    return fail


def test_demo_fails_with_one_line_that_names_the_log(fail, comfy, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(comfy.workflow("01 Text to image", width=300)), encoding="utf-8")
    [line] = fail("--workflow", str(file)).splitlines()
    assert line.startswith("error: ") and "300 x 256 pixels" in line and line.endswith("server.log")


def test_demo_refuses_a_file_that_is_no_workflow(fail, tmp_path):
    file = tmp_path / "ui.json"
    file.write_text('{"nodes": [], "links": []}', encoding="utf-8")
    said = fail("--workflow", str(file))
    assert said.startswith("error: ") and str(file) in said and "Export (API)" in said


def test_demo_refuses_a_file_where_the_images_go(fail, demo_module, tmp_path, monkeypatch):
    (tmp_path / "output").write_text("", encoding="utf-8")
    monkeypatch.setattr(demo_module, "OUTPUT", tmp_path / "output")
    [line] = fail().splitlines()
    assert line.startswith(f"error: {tmp_path / 'output'} is a file: move it away")


def test_a_number_that_is_no_port_is_refused_with_those_that_are(fail, capsys):
    for port in ("0", "99999", "x"):
        with pytest.raises(SystemExit, match="2"):
            fail("--port", port)
        assert capsys.readouterr().err.endswith("error: argument --port: a port is 1 to 65535\n")


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", f"signal {signal.SIGKILL:d}"),
        ("raise SystemExit(0)", "code 0"),
    ],
)
def test_a_server_that_ends_while_it_is_used_is_an_error(fail, demo_module, comfy, monkeypatch, script, how):
    monkeypatch.setattr(demo_module, "make", lambda *_given: None)
    monkeypatch.setattr(comfy, "process", subprocess.Popen([sys.executable, "-c", script]), raising=False)
    [line] = fail("--serve").splitlines()
    assert f"ComfyUI ended ({how})" in line and line.endswith("server.log")
