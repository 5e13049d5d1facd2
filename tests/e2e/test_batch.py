"""Batches on real servers, and one that is killed while it generates: alone, and for a batch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from comfyui_specar.models.conditions import VERSION
from comfyui_specar.samplers.trace_files import load_trace
from PIL import Image

from tests.conftest import Comfy
from tests.support.patience import PATIENCE
from tools.comfy_server import PACK, ComfyServer

pytestmark = pytest.mark.whole

COLOURS = {"red": 0, "green": 1, "blue": 2}
THINGS = ("heart-green", "apple-blue", "panda-red", "star-blue", "heart-blue", "penguin-red")
JOBS = [(name, "{}, 3d, on a {} background".format(*name.split("-")), seed) for seed, name in enumerate(THINGS)]


def start(folder: Path, *arguments: str, jobs: str = "jobs.csv") -> subprocess.Popen:
    command = [sys.executable, str(PACK / "batch"), jobs, "--out", "out", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def results(folder: Path) -> list[dict]:
    path = folder / "jobs.results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def mortal(comfyui, tmp_path_factory) -> Iterator[ComfyServer]:
    """A second server, to be killed."""
    with ComfyServer(comfyui, tmp_path_factory.mktemp("mortal") / "server.log") as server:
        yield server


def test_a_server_that_is_killed_leaves_whole_files_and_starts_again(comfy, mortal):
    """Then it generates what another one does."""
    name, other = "07 Acceptance map", Comfy(mortal)
    prompt = comfy.workflow(name, seed=604)
    sampler = comfy.node_id(prompt, "SpecARSJDSampler")

    async def kill(run, event, data):
        state = data.get("nodes", {}).get(sampler) if event == "progress_state" else None
        if state and 3 <= state["value"] < state["max"]:
            os.killpg(mortal.process.pid, signal.SIGKILL)

    assert other.run(prompt).outcome == "success"
    with pytest.raises(aiohttp.ClientError):
        other.run(comfy.workflow(name, seed=605, batch_size=16), kill)  # long enough to die during the run
    mortal.process.wait(PATIENCE)
    whole = files_are_whole(other.output)
    mortal.start()
    other = Comfy(mortal)
    options = other.get("/object_info/SpecARLoadTrace")["SpecARLoadTrace"]["input"]["required"]["trace_name"]
    assert whole["traces"] == 1 and "trace_00001_" in str(options)
    prompt = comfy.workflow(name, seed=605)
    assert all(np.array_equal(*both) for both in zip(other.drawn(prompt), comfy.drawn(prompt), strict=True))
    assert files_are_whole(other.output) == {"traces": 2, "images": whole["images"] + 1}


def files_are_whole(output: Path) -> dict[str, int]:
    """How many traces and images there are; each can be read, and there is nothing else."""
    files = [path for path in output.rglob("*") if path.is_file()]
    traces, images = ([path for path in files if path.suffix == ending] for ending in (".safetensors", ".png"))
    for path in traces:
        assert load_trace(path).report() == json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for path in images:
        Image.open(path).load()
    assert len(files) == 2 * len(traces) + len(images)
    return {"traces": len(traces), "images": len(images)}


@pytest.mark.once
def test_every_job_has_one_image_although_a_server_is_killed(comfy, mortal, tmp_path):
    rows = [f'{job},"{prompt}",{seed}' for job, prompt, seed in JOBS]
    (tmp_path / "jobs.csv").write_text("\n".join(["id,prompt,seed", *rows]) + "\n", encoding="utf-8")
    servers = ["--server", comfy.url, "--server", mortal.url]
    batch = start(tmp_path, *servers)
    wait_for(lambda: {record["server"] for record in results(tmp_path)} == {comfy.url, mortal.url}, batch)
    batch.kill()  # the client first: what it handed out goes on without it
    batch.communicate()
    ended = {record["id"] for record in results(tmp_path)}  # the last of them may still be in a server's history
    os.killpg(mortal.process.pid, signal.SIGKILL)
    batch = start(tmp_path, *servers)
    _, said = batch.communicate(timeout=PATIENCE)
    assert batch.returncode == 0, said
    assert f"{len(JOBS)} of {len(JOBS)} jobs done" in said

    found = {record["id"]: record for record in results(tmp_path)}
    assert Counter(record["id"] for record in results(tmp_path)) == Counter(job for job, _, _ in JOBS)
    for job, prompt, seed in JOBS:
        record = found[job]
        assert record["status"] == "success" and record["overrides"] == {"prompt": prompt, "seed": str(seed)}
        [trace] = record["traces"]
        assert (trace["seed"], trace["method"], trace["tokens"]) == (seed, "sjd", 256)
        assert 0 < trace["target_passes"] < 256
        assert record["versions"]["comfyui"] and record["versions"]["torch"]
        assert record["seconds"] > 0 and (job in ended or comfy.get(f"/history/{record['prompt_id']}") == {})
        with Image.open(tmp_path / f"out/{job}.png") as image:
            assert image.size == (256, 256)
            assert json.loads(image.text["prompt"])["5"]["inputs"]["seed"] == seed
            border = np.asarray(image.convert("RGB")).astype(int)[[0, -1]].reshape(-1, 3)
            assert np.median(border, axis=0).argmax() == COLOURS[job.split("-")[1]], f"look at {image.filename}"
    names = [path.name for path in comfy.output.rglob("*.png")]
    saved = [name for name in names for job, _, _ in JOBS if name.startswith(f"image_{job}")]
    assert len(saved) == sum(record["server"] == comfy.url for record in found.values())  # none ran twice there


@pytest.fixture
def equal_jobs(tmp_path) -> Path:
    equal = {"seed": 3, "prompt": "aple, star, 3d"}
    jobs = [{"id": "one", **equal}, {"id": "two", **equal}, {"id": "bad", "cfg": -9}]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)), encoding="utf-8")
    return tmp_path


def test_equal_jobs_have_an_image_each_and_a_refused_one_says_why(comfy, equal_jobs):
    """ComfyUI keeps what it has computed: the second's trace is that of the first, with its seconds, and its image is
    saved all the same."""
    batch = start(equal_jobs, "--server", comfy.url, jobs="jobs.jsonl")
    _, said = batch.communicate(timeout=PATIENCE)
    assert batch.returncode == 3 and "2 of 3 jobs done, 1 failed" in said
    found = {record["id"]: record for record in results(equal_jobs)}
    one, two, bad = (found[job] for job in ("one", "two", "bad"))
    assert two["traces"] == one["traces"] != []
    assert "aple" in one["warnings"][0] and two["warnings"] == one["warnings"]
    [saved] = comfy.output.rglob("trace_two_*.safetensors")
    trace_of_two = load_trace(saved)
    assert trace_of_two.settings.items() >= {"dtype": "fp32", "device": "cpu", "pack": VERSION}.items()
    [trace] = one["traces"]
    sampler = comfy.workflow("07 Acceptance map")[trace.pop("node")]
    assert sampler["class_type"] == "SpecARSJDSampler"
    totals = trace_of_two.totals | {"draft_tv": None}  # there is no drafter
    assert json.dumps(trace) == json.dumps({"method": trace_of_two.settings["method"], **totals})
    assert {Path(file["filename"]).stem[:-7] for file in two["files"]} == {"image_two", "trace_two"}
    assert (equal_jobs / "out/one.png").exists() and (equal_jobs / "out/two.png").exists()
    assert "ComfyUI" in bad["error"] and "cfg" in bad["error"]


@pytest.fixture
def inpainting(tmp_path) -> Path:
    """The template with Load Image nodes, as docs/batches.md describes it, and a table that names one too many."""
    shipped = Comfy.workflow("03 Inpaint your image")
    workflow = {node: shipped[node] for node in ("1", "11", "12", "13", "14", "15", "16")}
    for node, kind, title in (("20", "LoadImage", "Picture"), ("21", "LoadImageMask", "Mask")):
        inputs = {"image": "example.png"} | ({"channel": "red"} if title == "Mask" else {})
        workflow[node] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
    workflow["11"]["inputs"]["pixels"] = ["20", 0]
    workflow["12"]["inputs"]["mask"] = ["21", 0]
    (tmp_path / "inpaint.json").write_text(json.dumps(workflow), encoding="utf-8")
    (tmp_path / "jobs.csv").write_text(
        "id,Picture.image,Mask.image,prompt,seed\nthere,grey.png,right.png,dragon,1\n"
        "missing,gone.png,right.png,star,1\n",
        encoding="utf-8",
    )
    return tmp_path


def test_rows_name_the_pictures_to_inpaint_and_a_server_that_lacks_one_is_named(comfy, inpainting):
    pixels = np.full((256, 256, 3), 128, np.uint8)
    Image.fromarray(pixels).save(comfy.base / "input/grey.png")
    pixels[:], pixels[:, 128:] = 0, 255
    Image.fromarray(pixels).save(comfy.base / "input/right.png")
    batch = start(inpainting, "--server", comfy.url, "--workflow", "inpaint.json")
    _, said = batch.communicate(timeout=PATIENCE)
    assert batch.returncode == 3 and "1 of 2 jobs done, 1 failed" in said, said
    records = {record["id"]: record for record in results(inpainting)}
    assert comfy.url in records["missing"]["error"] and "gone.png" in records["missing"]["error"]
    warnings = records["there"]["warnings"]  # although no node takes the trace
    assert "dragon" in warnings[0] and all(f"there: warning: {warning}" in said for warning in warnings)
    with Image.open(inpainting / "out/there.png") as image:
        sent = json.loads(image.text["prompt"])
    assert [sent[node]["inputs"]["image"] for node in ("20", "21")] == ["grey.png", "right.png"]


@pytest.mark.parametrize(
    ("node", "change", "missing"),
    [
        ("8", {"class_type": "NoSuchNode", "_meta": {"title": "NoSuchNode"}}, "NoSuchNode"),
        ("1", {"inputs": {"model_name": "gone.safetensors", "dtype": "auto", "grid": "auto"}}, "gone.safetensors"),
    ],
)
def test_a_server_that_lacks_a_node_or_model_is_named_and_no_job_fails(comfy, tmp_path, node, change, missing):
    workflow = comfy.workflow("07 Acceptance map")
    workflow[node] |= change
    (tmp_path / "w.json").write_text(json.dumps(workflow), encoding="utf-8")
    (tmp_path / "jobs.csv").write_text("id,seed\none,1\ntwo,2\n", encoding="utf-8")
    batch = start(tmp_path, "--server", comfy.url, "--workflow", "w.json")
    _, said = batch.communicate(timeout=PATIENCE)
    assert batch.returncode == 1 and "0 failed, 2 still to do" in said, said
    assert f"{comfy.url} is set aside" in said and missing in said and results(tmp_path) == []


@pytest.mark.once
def test_maps_lie_beside_the_images_of_a_workflow_that_has_none(comfy, tmp_path):
    """Two images of one run: the text-to-image workflow shows no trace, and saves what it decodes."""
    (tmp_path / "jobs.csv").write_text("id,batch_size,seed\none,2,3\n", encoding="utf-8")
    arguments = ["--maps", "--workflow", str(PACK / "workflows/api/01 Text to image.json")]
    batch = start(tmp_path, "--server", comfy.url, *arguments)
    _, said = batch.communicate(timeout=PATIENCE)
    assert batch.returncode == 0, said
    [record] = results(tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "one.png",
        "one.2.png",
        "one_map.png",
        "one.2_map.png",
    }
    assert len(record["files"]) == len(record["copies"]) == 4
    [trace] = record["traces"]
    assert trace["images"] == 2
    for image, drawn in (("one", "one_map"), ("one.2", "one.2_map")):
        with Image.open(tmp_path / f"out/{image}.png") as opened, Image.open(tmp_path / f"out/{drawn}.png") as overlay:
            assert opened.size == (256, 256) and overlay.width == 512 and overlay.height > 512
            image = np.asarray(opened.resize((512, 512), Image.Resampling.NEAREST)).reshape(16, 32, 16, 32, 3)
            tokens = np.asarray(overlay)[:512].reshape(image.shape)
            assert np.ptp(tokens[:, 8:24, :, 8:24], axis=(1, 3)).max() == 0, "the middle of a token has one colour"
            for edge in (np.s_[:, :8], np.s_[:, 24:]):  # Save Image rounds down, the map to the nearest
                assert np.abs(image[edge].astype(int) - tokens[edge]).max() <= 1, "around it is its own image"
