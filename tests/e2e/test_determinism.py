"""The same seed generates the same image after all models were unloaded, and after other prompts. On another server:
test_faults.py."""

import asyncio

import aiohttp
import numpy as np
import pytest

pytestmark = pytest.mark.whole


def unload(comfy) -> None:
    """As the buttons "Unload Models" and "Free model and node cache" do; it happens before the next prompt."""

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"unload_models": True, "free_memory": True}
            async with session.post(f"{comfy.url}/free", json=body) as reply:
                reply.raise_for_status()

    asyncio.run(ask())


@pytest.mark.parametrize("name", ["07 Acceptance map", "11 Method - EAGLE draft tree", "17 Continuous tokens"])
def test_images_survive_unloading_and_other_seeds_differ(comfy, name):
    first = comfy.drawn(comfy.workflow(name, seed=41))
    unload(comfy)
    again, other = (comfy.drawn(comfy.workflow(name, seed=seed)) for seed in (41, 42))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
