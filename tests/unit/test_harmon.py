"""Harmon's files, prompts and grids, and what rows of a batch may not do to each other."""

import json
import math

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.model_loaders.families import harmon, mar
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.text import qwen2
from comfyui_specar.models.sizes import check_grid
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken

from ..support.closeness import fp64
from ..support.tiny_harmon import HEADS, MAR, SPECIAL, STEPS, VOCAB, fill, harmon_weights, write_harmon, write_tokenizer

GRID = (3, 5)
LENGTH = math.prod(GRID)
TOKENS = fill("tokens embedding", (2, LENGTH, MAR.channels))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return load_model(write_harmon(folder / "harmon.safetensors"))


@pytest.fixture
def known_size(monkeypatch):
    """Make the tiny sizes released ones, so that files without metadata can be read."""
    monkeypatch.setitem(mar._HEADS, MAR.dim, MAR.heads)
    monkeypatch.setitem(qwen2.HEADS, 64, HEADS)


def ids(model, *numbers):
    return model.encode_features(torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1))


@torch.inference_mode()
def vectors(model, known, prompt=(3, 1, 4), seen=None, grid=GRID, tokens=TOKENS):
    """z [2, B, V, S, D] under known [B, V, S]."""
    state = model.start(ids(model, *prompt), ids(model, 1, 5), len(known), grid, guided=True)
    return model.condition_vectors(state, tokens[: len(known)], known, seen or int(known.sum(-1).max()))


@torch.inference_mode()
def image(model, iterations):
    prompts = ids(model, 3, 1, 4), ids(model, 1, 5)
    request = ContinuousRequest(model, prompts[0], GRID, model.defaults, prompts[1], seed=3, batch=2)
    return ContinuousNextToken(iterations).sample(request)


def some_known(*counts):
    """[B, V, S] from counts [B][V], other ones in every row."""
    order = torch.arange(LENGTH)
    rows = [[(order + 4 * i + 7 * j) % LENGTH < n for j, n in enumerate(row)] for i, row in enumerate(counts)]
    return torch.stack([torch.stack(row) for row in rows])


KNOWN = some_known((0, 5, 2), (9, 1, 15))


# Files


def test_what_the_file_states(model):
    assert (model.family, model.grid, model.channels, model.scale) == ("harmon", (4, 4), 16, 0.2325)
    assert model.defaults == ContinuousParams(3.0, "constant", 1.0, STEPS, "ddpm", iterations=64)
    assert model.backbone.config.conditions == 0 and model.pixels_per_token == 16


CONTAINERS = {
    "flat half precision": lambda w: {name: tensor.half() for name, tensor in w.items()},
    "with an image decoder": lambda w: w | {"vae.quant_conv.bias": torch.ones(2)},
    "tied text head": lambda w: {name: tensor for name, tensor in w.items() if "lm_head" not in name},
    "no class table": lambda w: {name: tensor for name, tensor in w.items() if "class_emb" not in name},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_model(tmp_path, known_size, model, container):
    torch.save(CONTAINERS[container](harmon_weights()), tmp_path / "harmon_tiny.pth")
    found = load_model(tmp_path / "harmon_tiny.pth")
    assert {p.dtype for p in found.parameters()} == {torch.float32} and not any(p.is_meta for p in found.buffers())
    close = 1e-6 if container != "flat half precision" else 0.02
    assert (vectors(found, KNOWN) - vectors(model, KNOWN)).abs().max() < close


def test_half_precision_keeps_places_and_noise_exact(tmp_path, model):
    """The rotation's frequencies are in no file; rounded to bf16 they would mistake one place for another. The head,
    whose first step multiplies rounding errors, stays as it is too.
    """
    write_harmon(tmp_path / "model.safetensors")
    found = load_model(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in found.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in found.head.parameters()} == {torch.float32}
    assert {b.dtype for b in found.backbone.buffers()} == {torch.float32}
    wanted = vectors(model, KNOWN)
    assert (vectors(found, KNOWN).float() - wanted).abs().mean() < 0.02 * wanted.abs().mean()
    assert image(found, iterations=2).tokens.isfinite().all()


def test_sizes_that_hide_their_heads_are_refused(tmp_path):
    path = write_harmon(tmp_path / "harmon.safetensors", llm_heads=None)
    with pytest.raises(CheckpointError, match="width 64.*llm_heads"):
        load_model(path)
    write_harmon(path, llm_heads=3)
    with pytest.raises(CheckpointError, match="width 64"):
        load_model(path)
    write_harmon(path, heads=None)
    with pytest.raises(CheckpointError, match="width 32.*heads"):
        load_model(path)


# Prompts


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("a dog", "Generate an image: a dog"),
        ("  ein Hündchen\n", "Generate an image:   ein Hündchen\n"),
        ("", "Generate an image."),
        (" \n", "Generate an image:  \n"),
        ("{0}", "Generate an image: {0}"),
    ],
)
def test_prompts_are_asked_for_in_the_words_of_training(model, text, request_):
    [[features, extra]] = model.encode_prompt(text)
    start, end = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
    wanted = [start, *f"user\n{request_}".encode(), end, *b"\n", start, *b"assistant\n"]
    assert features.shape == (1, len(wanted), 1) and features.flatten().tolist() == wanted
    assert extra["ar"] == {"family": "harmon", "text": text}


def test_a_negative_prompt_is_all_that_the_user_says(model):
    """As the authors' --cfg_prompt; without one, any image is asked for."""
    start, end = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
    for text in ("blurry", " Generate a cat. "):
        wanted = [start, *f"user\n{text}".encode(), end, *b"\n", start, *b"assistant\n"]
        assert model.unpack_prompt(model.encode_prompt(text), 1, "negative").features.flatten().tolist() == wanted
    assert model.unpack_prompt(model.encode_prompt(""), 1, "negative") is None


def test_the_tokenizer_is_found_in_every_place_it_may_have(tmp_path):
    (tmp_path / "models").mkdir()
    path = write_harmon(tmp_path / "models" / "harmon.safetensors")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.*Qwen2.5-0.5B-Instruct.*models/text_encoders"):
        load_model(path).encode_prompt("a dog")
    write_tokenizer(tmp_path / "encoders" / "Qwen2.5-1.5B-Instruct")
    search = [tmp_path / "elsewhere", tmp_path / "encoders"]

    def found():
        return harmon.open_tokenizer(path, VOCAB, search).file.parent

    assert found() == tmp_path / "encoders" / "Qwen2.5-1.5B-Instruct"
    assert load_model(path, search_folders=search).encode_prompt("a dog")[0][0].shape[1] > 20
    write_tokenizer(tmp_path / "models" / "qwen25_tokenizer")
    assert found() == tmp_path / "models" / "qwen25_tokenizer"
    write_tokenizer(tmp_path / "models")
    assert found() == tmp_path / "models"


@pytest.mark.parametrize("damage", ["no json", "no merges", "other special tokens", "too many tokens"])
def test_a_wrong_tokenizer_is_refused_in_words(tmp_path, damage):
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    if damage == "no json":
        (tmp_path / "vocab.json").write_text("not json", encoding="utf-8")
    elif damage == "no merges":
        (tmp_path / "merges.txt").unlink()
    elif damage == "other special tokens":
        config["added_tokens_decoder"]["257"]["content"] = "<s>"
    else:
        extra = {"special": False, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config["added_tokens_decoder"] |= {str(i): {"content": f"<{i}>"} | extra for i in range(259, VOCAB + 1)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_model(write_harmon(tmp_path / "harmon.safetensors"))
    words = "tokenizer.*another model" if damage in ("other special tokens", "too many tokens") else "tokenizer"
    with pytest.raises(CheckpointError, match=words):
        model.encode_prompt("a dog")


@fp64()
def test_without_a_negative_prompt_guidance_leads_away_from_any_image(model):
    with torch.inference_mode():
        states = [
            model.start(ids(model, 3, 1), negative, 1, GRID, guided=True)
            for negative in (None, model.encode_prompt(""), model.encode_prompt("noise"))
        ]
        own, empty, other = (model.condition_vectors(s, TOKENS[:1], KNOWN[:1, :1], 0) for s in states)
    assert torch.equal(own, empty)
    torch.testing.assert_close(own[0], other[0])
    assert (own[1] - other[1]).abs().max() > 1e-3
    assert len(model.start(ids(model, 3, 1), None, 1, GRID, guided=False).prompts.valid) == 1


# Passes


@fp64()
def test_rows_and_variants_do_not_see_each_other(model):
    """One batch of six rows that know different tokens, and each row alone."""
    together = vectors(model, KNOWN)
    for i in range(2):
        for j in range(3):
            alone = vectors(model, KNOWN[i : i + 1, j : j + 1], tokens=TOKENS[i : i + 1])
            torch.testing.assert_close(together[:, i, j], alone[:, 0, 0])


@fp64()
def test_every_image_of_a_batch_may_have_its_own_prompt(model):
    both = model.encode_features(torch.tensor([[3.0, 1, 4], [2, 7, 1]])[..., None])
    with torch.inference_mode():
        z = model.condition_vectors(model.start(both, None, 2, GRID, guided=False), TOKENS, KNOWN, LENGTH)
    for i, prompt in enumerate([(3, 1, 4), (2, 7, 1)]):
        alone = vectors(model, KNOWN[i : i + 1], prompt=prompt, tokens=TOKENS[i : i + 1])
        torch.testing.assert_close(z[0, i], alone[0, 0])


def test_the_prompt_is_kept_once_and_unchanged(model):
    with torch.inference_mode():
        state = model.start(ids(model, 3, 1, 4), ids(model, 1, 5), 2, GRID, guided=True)
        before = [(key.clone(), value.clone()) for key, value in state.prompts.layers]
        first = model.condition_vectors(state, TOKENS, KNOWN, LENGTH)
        assert torch.equal(model.condition_vectors(state, TOKENS, KNOWN, LENGTH), first)
    assert state.prompts.layers[0][0].shape == (4, 2, 3, 16)  # branches * images, kv heads, prompt, head
    assert state.prompts.valid.tolist() == [[True] * 3] * 2 + [[True, True, False]] * 2
    for pair, kept in zip(before, state.prompts.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, kept, strict=True))


def test_any_grid(model):
    assert check_grid(model) == (4, 4) and check_grid(model, 3, 5) == (3, 5) and check_grid(model, cols=7) == (4, 7)
    with pytest.raises(ValueError, match="between 1 and 1024"):
        check_grid(model, -1, 4)
    known = torch.zeros(1, 1, 70, dtype=torch.bool)
    z = vectors(model, known, grid=(7, 10), tokens=fill("large embedding", (1, 70, 16)), seen=1)
    assert z.shape == (2, 1, 1, 70, MAR.dim) and z.isfinite().all()


def test_memory_estimates_count_both_networks(model):
    rows, more, wide = model.run_bytes(2, 16, 4), model.run_bytes(4, 16, 4), model.run_bytes(2, 64, 4)
    assert more == 2 * rows and wide > 3 * rows
    assert rows > super(harmon.HarmonModel, model).run_bytes(2, 16, 4)


def test_one_with_another_vocabulary_does_not(tmp_path, model):
    weights = harmon_weights()
    weights |= {name: weights[name][:280].clone() for name in ("llm.model.embed_tokens.weight", "llm.lm_head.weight")}
    with pytest.raises(CheckpointError, match="280 tokens.*300 tokens"):
        load_drafter(write_harmon(tmp_path / "small.safetensors", weights), model)


def test_a_smaller_one_drafts_for_it(tmp_path, model):
    """It is loaded without search folders and with a grid of its own, yet generates what the target generates."""
    small = load_drafter(write_harmon(tmp_path / "small.safetensors", grid=(8, 8)), model)
    assert small.family == "harmon" and small.prompt_encoder is model.prompt_encoder
    request = ContinuousRequest(model, model.encode_prompt("a dog"), GRID, model.defaults, seed=3)
    with torch.inference_mode(), fp64():
        alone = ContinuousNextToken(iterations=LENGTH).sample(request)
        drafted = ContinuousSpeculative(small, length=4, condition="drafts").sample(request)
    torch.testing.assert_close(drafted.tokens, alone.tokens)
    assert drafted.trace.summary()["acceptance_rate"] == 1  # the same weights
