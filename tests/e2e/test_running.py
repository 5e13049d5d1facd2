"""What a client sees while a prompt runs and afterwards: progress, previews, cancelling, caching."""

import io

import pytest
from PIL import Image

from tools.comfy_client import interrupt

SAMPLERS = {
    "01 Text to image": "SpecARSampler",
    "11 Method - EAGLE draft tree": "SpecARDraftTreeSampler",
    "17 Continuous tokens": "SpecARContinuousSampler",
}


def progress_of(run, node: str) -> list[tuple[float, float]]:
    states = [data["nodes"][node] for event, data in run.events if event == "progress_state" and node in data["nodes"]]
    return [(state["value"], state["max"]) for state in states]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_can_be_cancelled_and_leaves_nothing(comfy, name):
    """That this takes a round at most is shown by counting rounds (tests/nodes/test_faults.py)."""
    prompt = comfy.workflow(name, seed=102, batch_size=16)  # so that it is not over before the request arrives
    sampler = comfy.node_id(prompt, SAMPLERS[name])
    asked = False

    async def follow(run, event, data):
        nonlocal asked
        state = data["nodes"].get(sampler) if event == "progress_state" else None
        if state and 0 < state["value"] < state["max"] and not asked:
            asked = True
            await interrupt(comfy.url, run.prompt_id)

    run = comfy.run(prompt, follow)
    assert run.outcome == "interrupted", run.message()
    value, maximum = progress_of(run, sampler)[-1]
    assert value < maximum
    assert not run.outputs


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_shows_progress_and_previews(comfy, name):
    for batch in (1, 8, 64):  # a run shows them if it takes more than a moment
        prompt = comfy.workflow(name, seed=102, batch_size=batch)
        run = comfy.run(prompt)
        assert run.outcome == "success", run.message()
        progress = progress_of(run, comfy.node_id(prompt, SAMPLERS[name]))
        on_the_way = any(0 < value < maximum for value, maximum in progress)
        if run.previews and on_the_way:
            break
    assert run.previews and on_the_way
    assert [value for value, _ in progress] == sorted(value for value, _ in progress)
    assert progress[-1][0] == progress[-1][1]
    for preview in run.previews:
        assert min(Image.open(io.BytesIO(preview)).size) >= 16


def test_cached_rerun_shows_the_map_again(comfy):
    prompt = comfy.workflow("07 Acceptance map", seed=104)
    acceptance_map = comfy.node_id(prompt, "SpecARAcceptanceMap")
    first, second = comfy.run(prompt), comfy.run(prompt)
    cached = [node for event, data in second.events if event == "execution_cached" for node in data["nodes"]]
    assert acceptance_map in cached
    assert first.outputs[acceptance_map]["images"] and first.outputs[acceptance_map]["specar"]
    assert second.outputs[acceptance_map] == first.outputs[acceptance_map]
