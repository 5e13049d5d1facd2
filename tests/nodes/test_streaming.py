"""Weights that do not fit: what an image costs in copies, and that it falls with the number of forward passes."""

import pytest
from comfyui_specar import api
from comfyui_specar.nodes.comfy_runtime.models import open_model
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.tools.benchmarks import streaming

METHODS = {"next token": NextToken(), "SJD": SJD(window=6), "wider": SJD(window=12)}
LINES = ("red apple", "red apple on a blue background")


@pytest.mark.parametrize("dtype", ["fp32", "fp8 (storage)", "int8 (storage)", "int4 (storage)"])
def test_every_forward_pass_copies_all_streamed_layers_once(models, dtype):
    model = streaming.load_partially("tiny", dtype).model
    left = [layer for layer in streaming.streamed(model) if layer in set(model.backbone.modules())]
    once = sum(p.numel() * p.element_size() for layer in left for p in layer.parameters(recurse=False))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0.3 * size < once < 0.9 * size and any("layers." in name for name, m in model.named_modules() if m in left)
    prompt = model.encode_prompt(LINES[0])
    for method in METHODS.values():
        with streaming.counted(model.backbone) as link:
            out = api.sample(model, prompt, method, cfg=2.0, seed=3)
        assert link.copied == once * out.trace.summary()["target_passes"]


def test_images_are_those_of_a_whole_model(models):
    partly, whole = streaming.load_partially("tiny", "fp32").model, open_model("tiny", "fp32", None).model
    wanted, found = (
        api.sample(model, model.encode_prompt(LINES[0]), NextToken(), cfg=2.0, seed=3).tokens
        for model in (whole, partly)
    )
    assert (wanted == found).all()


def test_the_report_compares_methods_by_copies(models, monkeypatch):
    monkeypatch.setattr(streaming, "METHODS", METHODS)
    found = streaming.measure("tiny", "fp32", LINES)
    assert found["streamed"] < found["weights"]
    first, *others = found["rows"]
    assert first["passes"] >= 16 and first["method"] == "next token"
    for row in others:
        assert row["passes"] < first["passes"] and row["copied"] < first["copied"]
        fewer, less = first["passes"] / row["passes"], first["copied"] / row["copied"]
        assert less == pytest.approx(fewer, rel=0.1), "but for the prompt"
        assert row["seconds, calculated"] == row["copied"] / streaming.LINK
