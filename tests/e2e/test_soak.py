"""Many prompts, two clients, another model each time: the server's memory does not grow, and nothing is left behind."""

import asyncio
import itertools
import random
import statistics

import pytest

from tests.support import prompts
from tests.support.patience import many

pytestmark = pytest.mark.whole

QUICK = ("01 Text to image", "07 Acceptance map", "17 Continuous tokens")
SEEDS = (11, 12, 13)
PROMPTS = many(15, 500)
VARYING = "08 Find the fastest method"  # the clock decides what it generates
# MiB from one third to the next, once every workflow has run; what is kept of a third is 100 or more
GROWTH = 64


def jobs(workflows):
    """(workflow, seed) without end: by turns one of the default model and one of any other."""
    default = [name for name, prompt in workflows.items() if "default (bundled)" in prompts.models(prompt)]
    shuffled = random.Random(0)

    def endless(names):
        for seed in itertools.cycle(SEEDS):
            shuffled.shuffle(names)
            yield from ((name, seed) for name in names)

    for pair in zip(endless(default), endless(sorted(workflows.keys() - default)), strict=True):
        yield from pair


def test_prompts_of_two_clients_leave_nothing_behind(comfy, request):
    before, seen = set(comfy.get("/history")), prompts.Seen()
    if PROMPTS > 100:
        request.getfixturevalue("models")
    workflows = prompts.workflows(() if PROMPTS > 100 else QUICK)
    queued = itertools.islice(jobs(workflows), PROMPTS)

    async def client():
        for name, seed in queued:  # one iterator for both
            await prompts.run(comfy.url, comfy.pid, name, workflows[name], seed, seen)

    async def clients():
        await asyncio.gather(client(), client())

    asyncio.run(clients())
    assert seen.outcomes == {"success": PROMPTS}, seen.failures
    assert {name for name, _ in seen.images} == workflows.keys()
    assert [key for key, kinds in seen.images.items() if len(kinds) > 1 and key[0] != VARYING] == []
    third = PROMPTS // 3  # some of it while the other client's prompt runs, so medians
    middle, last = (statistics.median(part) for part in (seen.memory[third : 2 * third], seen.memory[2 * third :]))
    assert last - middle < GROWTH, seen.memory
    assert set(comfy.get("/history")) == before
    queue = comfy.get("/queue")
    assert not queue["queue_running"] and not queue["queue_pending"]
