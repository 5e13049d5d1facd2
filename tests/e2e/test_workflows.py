"""Every shipped workflow, queued on a real server (those of models that do not ship: see test_families.py)."""

import io
import json
import re
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from comfyui_specar.batch.maps import SAMPLER
from comfyui_specar.samplers.trace import Source
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from ..support.families import CAPTIONED, FAMILIES, REFINED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # whose programs import each other by name
import thumbnails  # noqa: E402

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
SHIPPED = sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))


def model_names(workflow: str) -> str:
    nodes = json.loads((WORKFLOWS / f"api/{workflow}.json").read_text(encoding="utf-8")).values()
    return str({node["inputs"].get("model_name") for node in nodes})


SHIPPED_MODELS = [name for name in SHIPPED if "(bundled)" in model_names(name)]


def test_every_workflow_is_run_somewhere():
    assert set(SHIPPED) == {*SHIPPED_MODELS, *FAMILIES, REFINED, CAPTIONED}


def test_a_template_is_three_files_whose_name_gives_its_place_and_whether_it_needs_a_download():
    files = {kind: {path.stem for path in WORKFLOWS.glob(f"*{kind}")} for kind in (".json", ".jpg")}
    assert files[".json"] == files[".jpg"] == set(SHIPPED)
    assert all(re.fullmatch(r"\d\d [A-Z][\w ,().-]+", name) for name in SHIPPED), "shown as they are; part of a URL"
    assert len({name[:2] for name in SHIPPED}) == len(SHIPPED)
    assert {name for name in SHIPPED if name.endswith(" (download)")} == {*FAMILIES, REFINED, CAPTIONED}


def film(data: bytes) -> list[np.ndarray]:
    """The frames of a file with one image or many, or of a video."""
    if data[4:8] == b"ftyp":
        with av.open(io.BytesIO(data)) as video:
            return [frame.to_ndarray(format="rgb24").astype(np.int16) for frame in video.decode(video=0)]
    frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(io.BytesIO(data)))]
    return [np.asarray(frame, dtype=np.int16) for frame in frames]


def fewer_passes_make_the_same_image(comfy, run):
    reports = run.collect("specar")
    [seed] = {report["totals"]["seed"] for report in reports}
    prompt = comfy.workflow("06 Race")
    assert seed == prompt[comfy.node_id(prompt, "PrimitiveInt")]["inputs"]["value"]
    passes = {report["settings"]["method"]: report["totals"]["target_passes"] for report in reports}
    [tokens] = {report["totals"]["tokens"] for report in reports}
    assert passes["sjd"] < passes["next_token"] == tokens
    *frames, finished = film(comfy.view(next(f for f in run.collect("images") if f["filename"].endswith(".mp4"))))
    assert finished.shape[1] == 768 and len(frames) > 120
    middle = finished.shape[1] // 2
    still = [
        [np.abs(frame - finished)[:, half].mean() < 1 for frame in frames]
        for half in (slice(middle), slice(middle, None))
    ]
    assert sum(still[0]) < sum(still[1]), "the right half is finished earlier"


def the_right_half_is_drawn(comfy, run):
    [report] = run.collect("specar")
    assert report["totals"]["tokens"] == report["totals"]["sources"]["forced"] == 128
    source = saved_positions(comfy, run)["positions.source"].reshape(16, 16)
    assert (source[:, :8] == Source.FORCED).all() and (source[:, 8:] != Source.FORCED).all()


def only_what_is_masked_is_drawn(comfy, run):
    [report] = run.collect("specar")
    assert report["totals"]["tokens"] == 32 and report["totals"]["sources"]["forced"] == 32
    assert report["settings"]["tolerance"] == 1 and not report["settings"]["lossless"]


def saved_positions(comfy, run):
    [file] = [f for f in run.collect("files") if f["filename"].endswith(".safetensors")]
    return load_file(comfy.output / file["subfolder"] / file["filename"])


def the_upper_half_is_given(comfy, run):
    [report] = run.collect("specar")
    totals = report["totals"]
    assert totals["tokens"] == totals["prefix_tokens"] == totals["sources"]["forced"] == 128
    assert max(totals["passes_per_image"]) < 128


def the_middle_is_kept(comfy, run):
    [report] = run.collect("specar")
    assert report["totals"]["sources"]["forced"] == 12 * 12 and report["totals"]["prefix_tokens"] == 0


def what_is_found_is_drawn_with(comfy, run):
    """Another image with another prompt is generated without another search."""
    prompt = comfy.workflow("08 Find the fastest method")
    node, sampler = (comfy.node_id(prompt, kind) for kind in ("SpecARFindFastest", "SpecARMethodSampler"))
    [found] = run.outputs[node]["specar"]
    [drawn] = [report for report in run.collect("specar") if report["schema"] == "specar.trace/3"]
    chosen = found["trials"][found["chosen"]]
    assert drawn["settings"].get("lossless", True) and not chosen["drift_bound"]
    assert (chosen["method"] == "next token") == (drawn["settings"]["method"] == "next_token")
    if "window" in chosen["method"]:
        assert chosen["method"].endswith(f"window {drawn['settings']['window']}")
    prompt[sampler]["inputs"]["seed"] += 1
    prompt[next(k for k, n in prompt.items() if n["_meta"]["title"] == "Prompt")]["inputs"]["text"] = "cat, 3d"
    again = comfy.run(prompt)
    [cached] = [data["nodes"] for event, data in again.events if event == "execution_cached"]
    assert again.outcome == "success" and node in cached and sampler not in cached


MORE = {  # what else is to be seen of a workflow's run
    "03 Inpaint your image": the_right_half_is_drawn,
    "06 Race": fewer_passes_make_the_same_image,
    "18 Continuous tokens, inpaint": only_what_is_masked_is_drawn,
    "05 Continue an image": the_upper_half_is_given,
    "04 Outpaint": the_middle_is_kept,
    "08 Find the fastest method": what_is_found_is_drawn_with,
}


def words(prompt: dict) -> set[str]:
    return {node["inputs"]["text"] for node in prompt.values() if "text" in node["inputs"]}


def apart(picture: Image.Image, name: str) -> float:
    """Mean difference of a channel from a template's thumbnail."""
    with Image.open(WORKFLOWS / f"{name}.jpg") as thumbnail:
        return float(np.abs(np.asarray(picture, np.int16) - np.asarray(thumbnail, np.int16)).mean())


def traced(prompt: dict) -> dict:
    """With the record of every sampler whose record the workflow does not save."""
    saved = {node["inputs"]["trace"][0] for node in prompt.values() if node["class_type"] == "SpecARSaveTrace"}
    samplers = [key for key, node in prompt.items() if SAMPLER.fullmatch(node["class_type"]) and key not in saved]
    inputs = ({"trace": [key, 1], "filename_prefix": "specar/trace"} for key in samplers)
    return prompt | {
        f"{key}_trace": {"class_type": "SpecARSaveTrace", "inputs": each}
        for key, each in zip(samplers, inputs, strict=True)
    }


# Of the methods with a drafter one: tests/nodes/test_samplers.py runs the nodes of the others.
OTHER_METHODS = [name for name in SHIPPED_MODELS if " Method - " in name and "EAGLE" not in name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] * (name in OTHER_METHODS)) for name in SHIPPED_MODELS]
)
def test_workflow_makes_images(comfy, name):
    prompt = traced(comfy.workflow(name)) if name in MORE else comfy.workflow(name)
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    assert not run.node_errors
    saved = [file for file in run.collect("images") if file["type"] == "output"]
    assert saved, "the workflow saves no image"
    picture = thumbnails.result(comfy.url, run, prompt)
    for file in saved:
        *_, pixels = film(comfy.view(file))
        assert pixels.std() > 5, f"{file['filename']} is a flat colour"
    if name in MORE:
        MORE[name](comfy, run)
    others = [other for other in SHIPPED_MODELS if not words(prompt) & words(comfy.workflow(other))]
    assert apart(picture, name) < min(apart(picture, other) for other in others), (
        "what JPEG loses, other rounding, and draft trees that follow the clock change it less than another prompt does"
    )


def test_workflows_are_also_templates_with_thumbnails(comfy):
    offered = comfy.get("/api/workflow_templates")["ComfyUI-SpecAR"]
    assert offered == sorted(offered), "the front end shows them in this order"
    for name in SHIPPED:
        assert comfy.get(f"/api/workflow_templates/ComfyUI-SpecAR/{name}.json")["nodes"] and name in offered
        assert (WORKFLOWS / f"{name}.jpg").stat().st_size > 1000
