"""AR Model Info."""

import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.nodes.model_info import in_units, report, summarize

from ..support import tiny_chameleon, tiny_emu3


def info(run, nodes, loaded):
    out = run(nodes["SpecARModelInfo"], model=loaded)
    assert out.ui["text"] == [out.result[0]]
    return out.result[0], out.ui["specar"][0]


def test_summary_of_a_model_of_token_ids(run, nodes, tiny, drafters):
    text, summary = info(run, nodes, tiny[0])
    model = tiny[0].model
    assert summary["family"] == "llamagen-t2i" and summary["tokens"] == "ids" and summary["codes"] == 64
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["bytes_by_dtype"] == {"float32": 4 * summary["parameters"]}
    assert summary["caches"] == tuple(model.kv_bytes(1, model.layout(), 0, guided) for guided in (False, True))
    assert summary["sizes"] == [(32, 32)] and summary["sequence"] == 16 and summary["defaults"]["cfg"] == 2.0
    assert summary["decoder"] == "vq.safetensors"
    assert summary["drafters"] == ["eagle", "small.safetensors"], "the bundled ones are of another size"
    assert "tiny: llamagen-t2i" in text and "sizes (width x height): 32 x 32" in text and "cfg 2.0" in text


def test_summary_of_a_continuous_model(run, nodes, continuous, small_vectors, drafters):
    text, summary = info(run, nodes, continuous[0])
    assert summary["tokens"] == "vectors" and summary["caches"] is None and summary["codes"] is None
    assert "vectors.safetensors" in summary["drafters"] and "eagle" not in summary["drafters"]
    assert "caches" not in text


def test_what_is_missing_is_named(run, nodes, models):
    loaded = run(nodes["SpecARLoadCheckpoint"], model_name="classes.safetensors", dtype="auto", grid="auto").result[0]
    text, summary = info(run, nodes, loaded)
    assert summary["decoder"] is None and "vq_ds16_c2i.pt (repository FoundationVision/LlamaGen)" in text


def test_the_bundled_drafters_fit_the_bundled_model(run, nodes):
    loaded = run(nodes["SpecARLoadCheckpoint"], model_name="default (bundled)", dtype="auto", grid="auto").result[0]
    _, summary = info(run, nodes, loaded)
    assert summary["drafters"][:2] == ["EAGLE drafter (bundled)", "small model (bundled)"]
    assert "small continuous MAR (bundled)" not in summary["drafters"]


def test_special_tokens_words_and_sizes_of_a_language_model(tmp_path):
    model = load_model(tiny_emu3.write(tmp_path))
    model.offload_embedding()
    summary = summarize(model)
    words = model.prefix.embedding.weight
    assert summary.bytes_of_words == words.numel() * 4 and summary.prompt == 128
    assert summary.parameters == words.numel() + sum(p.numel() for p in model.parameters())
    ids = [i for kind in summary.specials.values() for i in kind]
    assert ids == list(range(model.vocab, model.vocab_total)) and len(summary.specials["end of a row"]) == 1
    assert summary.sequence == model.layout().length > summary.picture[0] * summary.picture[1]
    rows, cols = model.grid
    assert len(summary.sizes) == len(model.grids)
    assert summary.sizes[0] == (cols * model.pixels_per_token, rows * model.pixels_per_token)
    text = report("Emu3", summary, "no decoder")
    assert "end of a row" in text and "word embeddings, in main memory" in text and "no decoder" in text


def test_fp8_is_distinguished(tmp_path):
    model = load_model(tiny_chameleon.write(tmp_path), storage=torch.float8_e4m3fn)
    summary = summarize(model)
    assert set(summary.bytes_by_dtype) == {"float32", "float8_e4m3fn"}
    together = sum(summary.bytes_by_dtype.values()) + summary.bytes_of_words
    assert together == sum(p.numel() * p.element_size() for p in model.parameters())


def test_bytes_are_shown_in_units():
    assert [in_units(n) for n in (1536, 3 * 2**20, 5 * 2**30)] == ["1.5 KiB", "3.00 MiB", "5.00 GiB"]


def test_large_drafters_are_recognised_by_their_tensors(
    run, nodes, tiny, continuous, drafters, small_vectors, monkeypatch
):
    monkeypatch.setattr("comfyui_specar.nodes.model_info.LARGEST_TO_LOAD", 0)
    _, summary = info(run, nodes, tiny[0])
    assert {"eagle", "small.safetensors"} <= set(summary["drafters"])
    assert not {"EAGLE drafter (bundled)", "vectors.safetensors"} & set(summary["drafters"])
    _, summary = info(run, nodes, continuous[0])
    assert "vectors.safetensors" in summary["drafters"] and "eagle" not in summary["drafters"]
