"""The stage ``prompts`` of the command for a new GPU, on the tests' server."""

import asyncio

import pytest

from tests.support.patience import PATIENCE
from tools.benchmarks.gpu import prompts
from tools.benchmarks.gpu.findings import Findings
from tools.comfy_server import PACK

pytestmark = pytest.mark.whole

FROM_AN_IMAGE = (prompts.IMAGE, prompts.LOADING[0])


@pytest.mark.once
def test_prompts_generate_the_same_after_unloading_and_after_another_model(comfy):
    findings = Findings(None, PATIENCE, dry=True)
    steps = (*prompts.STEPS[:4], (prompts.CANCELLED, prompts.FIRST), ("after that", prompts.FIRST), FROM_AN_IMAGE)
    asyncio.run(prompts.draw(findings, comfy.url, comfy.pid, comfy.base / "models", steps))
    assert findings.content["failures"] == [] and findings.content["not_run"] == {}
    assert [(row["step"], row["workflow"]) for row in findings.rows] == [*steps]
    assert all(row.get("different images so far", 1) == 1 for row in findings.rows)
    assert [row["outcome"] for row in findings.rows if "outcome" in row] == ["interrupted"]
    assert findings.content["summary"] == "6 prompts, and 1 that were cancelled"


def test_every_workflow_of_the_stage_is_there():
    assert {name for _, name in prompts.STEPS} <= {path.stem for path in (PACK / "workflows/api").glob("*.json")}
