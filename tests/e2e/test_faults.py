"""What a real server makes of spoiled prompts, of a disk that takes no files, and of being killed."""

import json
import math
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from comfyui_specar.batch.answers import UnexpectedAnswerError
from comfyui_specar.model_loaders.files.trace_files import load_trace
from PIL import Image

from tests.conftest import Comfy
from tests.support import prompts
from tests.support.patience import PATIENCE, many
from tests.support.spoiled import problem_of, spoiled
from tools.comfy_server import ComfyServer

SPOILED = [  # node, input, value, and what the answer says
    ("SpecARSJDSampler", "window", math.nan, "window"),
    ("SpecARSJDSampler", "temperature", math.nan, "temperature"),
    ("SpecARSJDSampler", "cfg", 1e308, "cfg"),
    ("SpecARSJDSampler", "seed", 2**64, "seed"),
    ("SpecARSJDSampler", "initialisation", {"__value__": [1]}, "initialisation"),
    ("SpecARSJDSampler", "model", "1", "model is '1', but must be connected to Load AR Checkpoint"),
    ("SpecARSJDSampler", "positive", None, "positive is of type NoneType"),
    ("SpecARSJDSampler", "latent_image", {"samples": 1}, "latent_image is of type dict"),
    ("SpecARSJDSampler", "latent_image", ["999", 0], "999"),
    ("SpecARSJDSampler", "model", ["5", 0], "model"),  # its own output
    ("SpecARSJDSampler", "rule", 7, "rule is 7, but must be connected to a rule node"),
    ("SpecARAcceptanceMap", "trace", {}, "trace is of type dict, but must be connected to"),
    ("SpecARAcceptanceMap", "image", 0, "image is 0"),
    ("SpecAREmptyLatent", "width", 10**9, "width"),
    ("CLIPTextEncode", "text", "\0" * 9999, "knows none of the words"),
    ("SpecARLoadCheckpoint", "model_name", "..", ".. is not in"),
]


@pytest.mark.parametrize(("node", "name", "value", "says"), SPOILED)
def test_a_spoiled_input_is_named_and_no_traceback_is_needed(comfy, node, name, value, says):
    prompt = comfy.workflow("05 Acceptance map", seed=600)
    prompt[comfy.node_id(prompt, node)]["inputs"][name] = value
    run = comfy.run(prompt)
    assert run.outcome in ("rejected", "error") or run.node_errors
    assert says in run.message()
    assert problem_of(run) is None


@pytest.mark.parametrize("number", range(many(1, 30)))
def test_inputs_spoiled_at_random(comfy, number):
    dice, slow = random.Random(number), ("27 Compare all methods", "07 Find the fastest method")
    bundled = {
        name: prompt
        for name, prompt in prompts.workflows().items()
        if name not in slow and "(bundled)" in str(prompts.models(prompt))
    }
    for name in dice.choices(sorted(bundled), k=10):
        prompt, what = spoiled(bundled[name], dice)
        with suppress(UnexpectedAnswerError):  # ComfyUI's own answer to what it cannot read at all
            assert problem_of(comfy.run(prompt)) is None, f"{name}: {what}"


def test_the_server_generates_after_all_that(comfy):
    assert comfy.run(comfy.workflow("05 Acceptance map", seed=601)).outcome == "success"


def test_a_trace_that_cannot_be_written_does_not_cost_the_image(comfy):
    prompt = comfy.workflow("15 Exact inside a mask", seed=602)
    saver = comfy.node_id(prompt, "SpecARSaveTrace")
    (comfy.output / "in_the_way").write_text("", encoding="utf-8")
    prompt[saver]["inputs"]["filename_prefix"] = "in_the_way/trace"
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    order = [data["node"] for event, data in run.events if event == "executed"]
    assert order.index(saver) < order.index(comfy.node_id(prompt, "SaveImage")), "is this test still needed?"
    [text] = run.outputs[saver]["text"]
    assert text.startswith("NOT SAVED") and "in_the_way" in text
    assert [file for file in run.collect("images") if file["type"] == "output"]


def test_a_server_that_is_killed_leaves_whole_files_and_starts_again(comfyui, tmp_path):
    with ComfyServer(comfyui, tmp_path / "server.log") as server:
        comfy = Comfy(server)
        prompt = comfy.workflow("15 Exact inside a mask", seed=604)
        sampler = comfy.node_id(prompt, "SpecARDraftTreeSampler")

        async def kill(run, event, data):
            state = data.get("nodes", {}).get(sampler) if event == "progress_state" else None
            if state and 3 <= state["value"] < state["max"]:
                os.killpg(server.process.pid, signal.SIGKILL)

        assert comfy.run(prompt).outcome == "success"
        mortal = comfy.workflow("15 Exact inside a mask", seed=605, batch_size=16)  # long enough to die during the run
        with pytest.raises(aiohttp.ClientError):
            comfy.run(mortal, kill)
        server.process.wait(PATIENCE)
        whole = files_are_whole(comfy.output)
        server.start()
        comfy = Comfy(server)
        options = comfy.get("/object_info/SpecARLoadTrace")["SpecARLoadTrace"]["input"]["required"]["trace_name"]
        assert whole["traces"] == 1 and "face_trace_00001_" in str(options)
        run = comfy.run(comfy.workflow("15 Exact inside a mask", seed=605))
        assert run.outcome == "success", run.message()
        assert files_are_whole(comfy.output) == {"traces": 2, "images": whole["images"] + 1}


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
