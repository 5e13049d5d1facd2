"""The stage ``prompts`` of the command for a new GPU, on the tests' server."""

import asyncio

import pytest

from tests.support.patience import PATIENCE
from tools.benchmarks.gpu import prompts
from tools.benchmarks.gpu.findings import Findings


@pytest.mark.once
def test_prompts_generate_the_same_after_unloading_and_after_another_model(comfy):
    findings = Findings(None, PATIENCE, dry=True)
    asyncio.run(prompts.draw(findings, comfy.url, comfy.pid))
    assert findings.content["failures"] == [] and findings.content["not_run"] == {}
    assert [(row["step"], row["different images so far"]) for row in findings.rows] == [
        (step, 1) for step, _ in prompts.STEPS
    ]
    assert findings.content["summary"] == "4 of 4 prompts drew their images"
