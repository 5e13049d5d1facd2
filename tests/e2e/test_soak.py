"""Some of what the long run of tools/benchmarks/soak.py looks at: many prompts, two clients, another model each
time."""

import asyncio
import itertools
import statistics

from tools.benchmarks import soak

QUICK = ["01 Text to image", "05 Acceptance map", "31 Continuous tokens"]
GROWTH = 64  # MiB that 16 prompts may add once every workflow has run twice; a kept model or image is 20 or more each


def test_prompts_of_two_clients_leave_nothing_behind(comfy):
    before = set(comfy.get("/history"))
    jobs = itertools.islice(soak.switching(QUICK), 24)
    seen = asyncio.run(soak.soak(comfy.url, comfy.pid, jobs, clients=2))
    assert seen.outcomes == {"success": 24}, seen.failures
    assert len(seen.images) == 9 and all(len(kinds) == 1 for kinds in seen.images.values())
    resident = [m["rss"] for m in seen.memory]  # some while the other client's prompt runs, so medians
    assert statistics.median(resident[8:]) - statistics.median(resident[:8]) < GROWTH, resident
    assert set(comfy.get("/history")) == before
    queue = comfy.get("/queue")
    assert not queue["queue_running"] and not queue["queue_pending"]


def test_every_prompt_uses_another_model_and_the_growth_of_memory_is_reported():
    jobs = list(itertools.islice(soak.switching(), 60))
    prompts = soak.workflows()
    assert {job.workflow for job in jobs} == set(prompts)

    def model(job: soak.Job) -> set:
        return {node["inputs"].get("model_name") for node in job.prompt.values()} - {None}

    assert all(model(one) != model(other) for one, other in zip(jobs, jobs[1:], strict=False))
    numbers = soak.growth([0.0] * 20 + [100 + 2 * i for i in range(80)])
    assert numbers["per_100_prompts"] == 200 and numbers["standard_error"] == 0 and numbers["last"] == 258
