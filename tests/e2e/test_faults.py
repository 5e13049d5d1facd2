"""What a real server makes of spoiled prompts, and of a disk that takes no files. Of being killed: test_batch.py."""

import math
import random
from contextlib import suppress

import pytest
from comfyui_specar.batch.answers import UnexpectedAnswerError

from tests.support import prompts
from tests.support.patience import many
from tests.support.spoiled import problem_of, spoiled

SPOILED = [  # node, input, value, and what the answer says
    ("SpecARSJDSampler", "window", math.nan, "window"),
    ("SpecARSJDSampler", "seed", 2**64, "seed"),
    ("SpecARSJDSampler", "model", "1", "model is '1', but must be connected to Load AR Checkpoint"),
    ("SpecARSJDSampler", "positive", None, "positive is of type NoneType"),
    ("SpecARSJDSampler", "latent_image", ["999", 0], "999"),
    ("SpecARSJDSampler", "model", ["5", 0], "model"),  # its own output
    ("SpecARLoadCheckpoint", "model_name", "..", ".. is not in"),
    ("SpecARLoadCheckpoint", "model_name", "not_there.safetensors", "not_there.safetensors"),
    ("SpecARSJDSampler", "window", 300, "window"),  # wider than the image
]


@pytest.mark.parametrize(("node", "name", "value", "says"), SPOILED)
def test_a_spoiled_input_is_named_and_no_traceback_is_needed(comfy, node, name, value, says):
    prompt = comfy.workflow("07 Acceptance map", seed=600)
    prompt[comfy.node_id(prompt, node)]["inputs"][name] = value
    run = comfy.run(prompt)
    assert run.outcome in ("rejected", "error") or run.node_errors
    assert says in run.message()
    assert problem_of(run) is None


@pytest.mark.parametrize("number", range(many(1, 30)))
def test_inputs_spoiled_at_random(comfy, number):
    dice, slow = random.Random(number), "08 Find the fastest method"
    bundled = {
        name: prompt
        for name, prompt in prompts.workflows().items()
        if name != slow and "(bundled)" in str(prompts.models(prompt))
    }
    for name in dice.choices(sorted(bundled), k=6):
        prompt, what = spoiled(bundled[name], dice)
        with suppress(UnexpectedAnswerError):  # ComfyUI's own answer to what it cannot read at all
            assert problem_of(comfy.run(prompt)) is None, f"{name}: {what}"


def test_a_trace_that_cannot_be_written_does_not_cost_the_image(comfy):
    prompt = comfy.workflow("07 Acceptance map", seed=602)
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
