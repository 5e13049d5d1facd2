"""What a run's record says of precision, device and version."""

import re
from pathlib import Path

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.models.conditions import VERSION, conditions

ROOT = Path(specar.__file__).resolve().parent


def test_the_version_is_that_of_the_package():
    assert re.search(rf'^version = "{re.escape(VERSION)}"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "fp32"),
        ({"dtype": torch.bfloat16}, "bf16"),
        ({"dtype": torch.float16}, "fp16"),
        ({"storage": torch.int8}, "fp32, int8 (storage)"),
        ({"storage": torch.uint4}, "fp32, int4 (storage)"),
        ({"dtype": torch.bfloat16, "storage": torch.float8_e4m3fn}, "bf16, fp8 (storage)"),
        ({"storage": torch.int8, "int8_cache": True}, "fp32, int8 (storage and KV cache)"),
    ],
)
def test_a_precision_is_named_as_in_the_loader(given, name):
    model = specar.load_model(specar.bundled("default"), **given)
    assert conditions(model) == {"dtype": name, "device": "cpu", "pack": VERSION}
    if not given:
        assert conditions(specar.load_model(specar.bundled("continuous")))["dtype"] == name
