"""The same seed generates the same image: on another server, after all models were unloaded, and after other
prompts.
"""

import asyncio
import io

import aiohttp
import numpy as np
import pytest
from PIL import Image

WORKFLOWS = ("01 Text to image", "05 Acceptance map", "21 Draft tree (EAGLE)", "26 VVS", "31 Continuous tokens")


def drawn(comfy, name: str) -> list[np.ndarray]:
    prompt = comfy.workflow(name, seed=41)
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    decoders = [key for key, node in prompt.items() if node["class_type"] == "VAEDecode"]
    savers = [
        key
        for key, node in prompt.items()
        if node["class_type"] == "SaveImage" and node["inputs"]["images"][0] in decoders
    ]
    files = [file for saver in savers for file in run.outputs[saver]["images"]]
    assert files
    return [np.asarray(Image.open(io.BytesIO(comfy.view(file)))) for file in files]


def unload(comfy) -> None:
    """As the buttons "Unload Models" and "Free model and node cache" do; it happens before the next prompt."""

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"unload_models": True, "free_memory": True}
            async with session.post(f"{comfy.url}/free", json=body) as reply:
                reply.raise_for_status()

    asyncio.run(ask())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_images_survive_unloading_and_moving_to_another_server(comfy, another, name):
    first = drawn(comfy, name)
    unload(comfy)
    for again in (drawn(comfy, name), drawn(another, name)):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
