"""Stages of the command for a new GPU that have ComfyUI in their own process."""

import pytest
from comfyui_specar.tools.benchmarks.gpu import faults, streaming
from comfyui_specar.tools.benchmarks.gpu.findings import Findings

from ..support.patience import PATIENCE

pytestmark = pytest.mark.once


def test_an_interruption_by_comfyui_ends_a_run_and_nothing_else():
    findings = Findings(None, PATIENCE, dry=True)
    faults.run_interrupted(findings)
    assert findings.content["failures"] == []
    assert [(row["by"], row["raised"]) for row in findings.rows] == [("ComfyUI", True)] * len(faults.WAYS)


def test_a_model_is_loaded_to_half():
    findings = Findings(None, PATIENCE, dry=True)
    streaming.run(findings)
    assert findings.content["failures"] == [] and len(findings.rows) == len(streaming.STORED_AS) * len(streaming.LEFT)
    assert all(row["passes"] > 0 for row in findings.rows)
    half, little = (row["left, MB"] for row in findings.rows[:2])
    assert half > little > 0
