"""AR Model Info."""

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models.memory import offload_embedding
from comfyui_specar.nodes.comfy_runtime.memory import beside_weights
from comfyui_specar.nodes.comfy_runtime.models import open_model
from comfyui_specar.nodes.memory_table import in_units, memory_lines, memory_table
from comfyui_specar.nodes.model_info import report, summarize

from ..support import tiny_emu3

NARROW = ["fp8 (storage)", "int8 (storage)", "int8 (storage and KV cache)", "int4 (storage)"]


@pytest.fixture
def info(run_node):
    """info(model) -> the text and the summary."""

    def info(loaded):
        out = run_node("ModelInfo", model=loaded)
        assert out.ui["text"] == [out.result[0]]
        return out.result[0], out.ui["specar"][0]

    return info


def test_summary_of_a_model_of_token_ids(info, tiny, drafters):
    text, summary = info(tiny[0])
    model = tiny[0].model
    assert summary["family"] == "llamagen-t2i" and summary["tokens"] == "ids" and summary["codes"] == 64
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["bytes_by_dtype"] == {"float32": 4 * summary["parameters"]}
    assert summary["caches"] == tuple(model.kv_bytes(1, model.layout(), 0, guided) for guided in (False, True))
    assert summary["sizes"] == [(32, 32)] and summary["sequence"] == 16 and summary["defaults"]["cfg"] == 2.0
    assert summary["decoder"] == "vq.safetensors"
    assert summary["drafters"] == ["eagle/model.safetensors", "small.safetensors"], (
        "the bundled ones are of another size"
    )
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert [row.split(":")[0].strip() for row in rows] == [row["dtype"] for row in summary["memory"]]
    assert all(row.endswith(", fits") for row in rows) and "memory by dtype on cpu" in text
    assert "tiny: llamagen-t2i" in text and "sizes (width x height): 32 x 32" in text and "cfg 2.0" in text


def test_summary_of_a_continuous_model(info, continuous, small_vectors, drafters):
    text, summary = info(continuous[0])
    assert summary["tokens"] == "vectors" and summary["caches"] is None and summary["codes"] is None
    assert summary["memory"] == []
    assert "vectors.safetensors" in summary["drafters"] and "eagle/model.safetensors" not in summary["drafters"]
    assert "caches" not in text


def test_settings_for_images_are_listed_where_they_differ(info, emu35, tiny):
    text, summary = info(emu35[0])
    assert summary["defaults"]["cfg"] == 5 and summary["image_defaults"] == {"cfg": 3.0}
    assert "with images in the prompt: cfg 3.0\n" in text
    text, summary = info(tiny[0])
    assert summary["image_defaults"] == {} and "with images" not in text


def test_what_is_missing_is_named(info, load):
    text, summary = info(load("classes.safetensors")[0])
    assert summary["decoder"] is None and "vq_ds16_c2i.pt (repository FoundationVision/LlamaGen)" in text


def test_the_bundled_drafters_fit_the_bundled_model(info, load):
    _, summary = info(load("default (bundled)")[0])
    assert summary["drafters"][:2] == ["EAGLE drafter (bundled)", "small model (bundled)"]
    assert "small continuous MAR (bundled)" not in summary["drafters"]


def test_special_tokens_words_and_sizes_of_a_language_model(tmp_path):
    model = load_model(tiny_emu3.write(tmp_path))
    offload_embedding(model)
    summary = summarize(model)
    words = model.prefix.embedding.weight
    assert summary["bytes_of_words"] == words.numel() * 4 and summary["prompt"] == 128
    assert summary["parameters"] == words.numel() + sum(p.numel() for p in model.parameters())
    ids = [i for kind in summary["specials"].values() for i in kind]
    assert ids == list(range(model.vocab, model.vocab_total)) and len(summary["specials"]["end of a row"]) == 1
    assert summary["sequence"] == model.layout().length > summary["picture"][0] * summary["picture"][1]
    rows, cols = model.grid
    assert len(summary["sizes"]) == len(model.grids)
    assert summary["sizes"][0] == (cols * model.pixels_per_token, rows * model.pixels_per_token)
    text = report("Emu3", summary, "no decoder")
    assert "end of a row" in text and "word embeddings, in main memory" in text and "no decoder" in text


@pytest.mark.parametrize("dtype", ["fp32", "bf16", *NARROW])
def test_the_table_says_what_the_model_would_need_at_each_dtype(info, models, tiny, dtype):
    """Whatever it is loaded in, the rows are those of the model loaded so."""
    _, summary = info(tiny[0])
    loaded = open_model("tiny", dtype, None)
    _, same = info(loaded)
    assert same["memory"] == summary["memory"]
    [row] = [row for row in same["memory"] if dtype in row["dtype"].split(", ")]
    model = loaded.model
    assert row["weights"] == sum(p.numel() * p.element_size() for p in set(model.parameters()))
    assert row["cache"] == model.kv_bytes(1, model.layout(), 0, True, same["prompt"]) and row["verdict"] == "fits"


@pytest.mark.parametrize(
    ("device", "beside", "verdicts"),
    [
        ("cuda:0", 0, ["fits", "fits with streamed weights"]),
        ("cpu", 0, ["fits", "does not fit"]),
        ("cuda:0", -(10**9), ["does not fit"]),
    ],
)
def test_the_table_compares_with_the_memory_of_the_device(device, beside, verdicts, tmp_path, monkeypatch):
    model, device = load_model(tiny_emu3.write(tmp_path)), torch.device(device)
    offload_embedding(model)
    monkeypatch.setattr(mm, "minimum_inference_memory", lambda: 0)
    monkeypatch.setattr(mm, "get_total_memory", lambda device=None, torch_total_too=False: 2**30)
    rows = memory_table(model, torch.bfloat16, device)
    assert [row.dtype for row in rows] == ["fp32", "bf16, fp16", *NARROW]
    for_wide, for_half = (beside_weights(model, dtype, None) for dtype in (torch.float32, torch.bfloat16))
    assert for_half > rows[1].cache
    total = max(1.1 * rows[1].weights + for_half, for_wide) + beside
    monkeypatch.setattr(mm, "get_total_memory", lambda device=None, torch_total_too=False: total)
    rows = memory_table(model, torch.bfloat16, device)
    assert rows[1].verdict == verdicts[0] and rows[0].verdict == verdicts[-1]
    text = memory_lines(rows, device, True)
    assert f"{device} of {in_units(total)}" in text[0] and "with guidance" in text[0]
    assert text[2].strip().startswith("bf16, fp16: ") and text[2].endswith(f", {verdicts[0]}")


def test_unknown_memory_has_no_verdict(tmp_path, monkeypatch):
    """ComfyUI assumes 1 GiB under DirectML."""
    model, device = load_model(tiny_emu3.write(tmp_path)), torch.device("cuda:0")
    monkeypatch.setattr(mm, "directml_enabled", True, raising=False)
    rows = memory_table(model, torch.bfloat16, device)
    assert {row.verdict for row in rows} == {None} and "fit" not in "".join(memory_lines(rows, device, False))


def test_large_drafters_are_recognised_by_their_tensors(info, tiny, continuous, drafters, small_vectors, monkeypatch):
    monkeypatch.setattr("comfyui_specar.nodes.model_info.LARGEST_TO_LOAD", 0)
    _, summary = info(tiny[0])
    assert {"eagle/model.safetensors", "small.safetensors"} <= set(summary["drafters"])
    assert not {"EAGLE drafter (bundled)", "vectors.safetensors"} & set(summary["drafters"])
    _, summary = info(continuous[0])
    assert "vectors.safetensors" in summary["drafters"] and "eagle/model.safetensors" not in summary["drafters"]
