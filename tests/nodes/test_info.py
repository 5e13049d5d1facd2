"""AR Model Info."""

import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.nodes.facts import facts_of, in_words, size

from ..support import tiny_chameleon, tiny_emu3


def info(run, nodes, loaded):
    out = run(nodes["SpecARModelInfo"], model=loaded)
    assert out.ui["text"] == [out.result[0]]
    return out.result[0], out.ui["specar"][0]


def test_facts_of_a_model_of_token_ids(run, nodes, tiny, drafters):
    text, facts = info(run, nodes, tiny[0])
    model = tiny[0].model
    assert facts["family"] == "llamagen-t2i" and facts["tokens"] == "ids" and facts["codes"] == 64
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["bytes_by_dtype"] == {"float32": 4 * facts["parameters"]}
    assert facts["caches"] == tuple(model.kv_bytes(1, model.layout(), 0, guided) for guided in (False, True))
    assert facts["sizes"] == [(32, 32)] and facts["sequence"] == 16 and facts["defaults"]["cfg"] == 2.0
    assert facts["decoder"] == "vq.safetensors"
    assert facts["drafters"] == ["eagle", "small.safetensors"], "the bundled ones are of another size"
    assert "tiny: llamagen-t2i" in text and "sizes (width x height): 32 x 32" in text and "cfg 2.0" in text


def test_facts_of_a_continuous_model(run, nodes, continuous, small_vectors, drafters):
    text, facts = info(run, nodes, continuous[0])
    assert facts["tokens"] == "vectors" and facts["caches"] is None and facts["codes"] is None
    assert "vectors.safetensors" in facts["drafters"] and "eagle" not in facts["drafters"]
    assert "caches" not in text


def test_what_is_missing_is_named(run, nodes, models):
    loaded = run(nodes["SpecARLoadCheckpoint"], model_name="classes.safetensors", dtype="auto", grid="auto").result[0]
    text, facts = info(run, nodes, loaded)
    assert facts["decoder"] is None and "vq_ds16_c2i.pt (repository FoundationVision/LlamaGen)" in text


def test_the_bundled_drafters_fit_the_bundled_model(run, nodes):
    loaded = run(nodes["SpecARLoadCheckpoint"], model_name="default (bundled)", dtype="auto", grid="auto").result[0]
    _, facts = info(run, nodes, loaded)
    assert facts["drafters"][:2] == ["EAGLE drafter (bundled)", "small model (bundled)"]
    assert "small continuous MAR (bundled)" not in facts["drafters"]


def test_special_tokens_words_and_sizes_of_a_language_model(tmp_path):
    model = load_model(tiny_emu3.write(tmp_path))
    model.keep_words_back()
    facts = facts_of(model)
    words = model.prefix.embedding.weight
    assert facts.bytes_of_words == words.numel() * 4 and facts.prompt == 128
    assert facts.parameters == words.numel() + sum(p.numel() for p in model.parameters())
    ids = [i for kind in facts.specials.values() for i in kind]
    assert ids == list(range(model.vocab, model.vocab_total)) and len(facts.specials["end of a row"]) == 1
    assert facts.sequence == model.layout().length > facts.picture[0] * facts.picture[1]
    rows, cols = model.grid
    assert len(facts.sizes) == len(model.grids)
    assert facts.sizes[0] == (cols * model.pixels_per_token, rows * model.pixels_per_token)
    text = in_words("Emu3", facts, "no decoder")
    assert "end of a row" in text and "word embeddings, in main memory" in text and "no decoder" in text


def test_fp8_is_told_apart(tmp_path):
    model = load_model(tiny_chameleon.write(tmp_path), storage=torch.float8_e4m3fn)
    facts = facts_of(model)
    assert set(facts.bytes_by_dtype) == {"float32", "float8_e4m3fn"}
    together = sum(facts.bytes_by_dtype.values()) + facts.bytes_of_words
    assert together == sum(p.numel() * p.element_size() for p in model.parameters())


def test_sizes_in_words():
    assert [size(n) for n in (1536, 3 * 2**20, 5 * 2**30)] == ["1.5 KiB", "3.00 MiB", "5.00 GiB"]


def test_large_drafters_are_told_by_their_tensors(run, nodes, tiny, continuous, drafters, small_vectors, monkeypatch):
    monkeypatch.setattr("comfyui_specar.nodes.facts.TRIED", 0)
    _, facts = info(run, nodes, tiny[0])
    assert {"eagle", "small.safetensors"} <= set(facts["drafters"])
    assert not {"EAGLE drafter (bundled)", "vectors.safetensors"} & set(facts["drafters"])
    _, facts = info(run, nodes, continuous[0])
    assert "vectors.safetensors" in facts["drafters"] and "eagle" not in facts["drafters"]
