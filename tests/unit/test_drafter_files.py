"""Drafter files: every layout that is accepted, and every way in which one can be wrong or belong to another model."""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from safetensors.torch import save_file

from ..support import bad_files
from ..support.closeness import fp64
from ..support.models import eagle_features
from ..support.tiny import (
    HEADS,
    VOCAB,
    eagle_config,
    eagle_shapes,
    eagle_weights,
    fill,
    llamagen_weights,
    vq_weights,
    write_eagle,
    write_llamagen,
)

SIDE = 16  # of the grid that "t2i" stands for


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The model that drafters are loaded for; no file, good or bad, may change it."""
    model = load_model(write_llamagen(tmp_path_factory.mktemp("target") / "model.safetensors", True, grid=[SIDE, SIDE]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield model
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def features(drafter) -> torch.Tensor:
    """Something that depends on every weight of a drafter."""
    ids = torch.tensor([[0, 0, 5, 9, 1], [0, 0, 5, 9, 1]])
    with fp64():
        return eagle_features(drafter, fill("hidden embedding", (2, 5, 64)), ids)


def refused(path: Path, target, *words: str) -> None:
    bad_files.refused(path, *words, loader=load_drafter, model=target)


def pickled(folder: Path, content, **changes) -> Path:
    """A drafter's folder with pytorch_model.bin, as the released ones have."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config(**changes)), encoding="utf-8")
    torch.save(content, folder / "pytorch_model.bin")
    return folder


# Good ones


def test_every_container_gives_the_same_drafter(tmp_path, target):
    eps = {"rms_norm_eps": 1e-6}  # also what a file without a config gets
    wanted = load_drafter(write_eagle(tmp_path / "safe", **eps), target)
    assert wanted.kind == "eagle" and wanted.family == target.family
    found = {
        "pickle": load_drafter(pickled(tmp_path / "pickle", eagle_weights(), **eps), target),
        "old pickle": load_drafter(pickled(tmp_path / "old", {"state_dict": eagle_weights()}, **eps), target),
        "file in its folder": load_drafter(tmp_path / "safe" / "model.safetensors", target),
    }
    save_file(eagle_weights(), str(tmp_path / "alone.safetensors"))
    found["file alone"] = load_drafter(tmp_path / "alone.safetensors", target)
    for name, drafter in found.items():
        assert torch.equal(features(drafter), features(wanted)), name


def test_of_two_files_the_safe_one_is_read(tmp_path, target):
    folder = pickled(tmp_path / "both", {"broken": torch.zeros(1)})
    save_file(eagle_weights(), str(folder / "model.safetensors"))
    assert torch.equal(
        features(load_drafter(folder, target)), features(load_drafter(write_eagle(tmp_path / "safe"), target))
    )


def test_bias_is_optional(tmp_path, target):
    weights = eagle_weights()
    bias = weights.pop("fc.bias")
    plain = features(load_drafter(write_eagle(tmp_path / "plain", weights, bias=False), target))
    zero = features(load_drafter(write_eagle(tmp_path / "zero", weights | {"fc.bias": torch.zeros_like(bias)}), target))
    full = features(load_drafter(write_eagle(tmp_path / "full"), target))
    assert torch.allclose(plain, zero, atol=1e-6) and not torch.allclose(plain, full, atol=1e-3)


def test_the_token_table_may_be_the_targets(tmp_path, target):
    weights = eagle_weights()
    own = features(load_drafter(write_eagle(tmp_path / "own", weights), target))
    weights["embed_tokens.weight"] = target.backbone.tok_embeddings.weight.detach().clone()
    wanted = features(load_drafter(write_eagle(tmp_path / "same", weights), target))
    del weights["embed_tokens.weight"]
    found = features(load_drafter(write_eagle(tmp_path / "none", weights), target))
    assert torch.equal(found, wanted) and not torch.allclose(found, own, atol=1e-3)


def test_dtype(tmp_path, target):
    folder = write_eagle(tmp_path / "half", {name: tensor.half() for name, tensor in eagle_weights().items()})
    assert {p.dtype for p in load_drafter(folder, target).module.parameters()} == {torch.float32}
    drafter = load_drafter(folder, target, dtype=torch.bfloat16)
    assert {p.dtype for p in drafter.module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in drafter.module.parameters())


def test_the_norms_of_chameleon_drafters_are_not_dropped(tmp_path, target):
    """LlamaGen's drafters have none: such a file is for another family, whatever its sizes are."""
    for rows in (1, HEADS):
        folder = write_eagle(tmp_path / str(rows), eagle_weights(head_norms=rows))
        refused(folder, target, "model.safetensors")


# Bad ones


@pytest.mark.parametrize("name", eagle_shapes(head_norms=1))
def test_missing_and_misshapen_tensors(tmp_path, target, name):
    for number, shape in enumerate([(), (3,), (64, 63), (2, 2, 2)]):
        weights = eagle_weights() | {name: torch.zeros(shape)}
        refused(write_eagle(tmp_path / str(number), weights), target, "model.safetensors")
    weights = eagle_weights()
    if name in weights.keys() - {"fc.bias", "embed_tokens.weight"}:
        del weights[name]
        refused(write_eagle(tmp_path / "missing", weights), target, "model.safetensors")


WIDE, WORDS = eagle_weights(dim=128), eagle_weights(vocab=2 * VOCAB)


@pytest.mark.parametrize(
    ("weights", "config", "words"),
    [
        (WIDE, {"hidden_size": 128}, ("model.safetensors", "128", "64")),
        (WIDE, {}, ("128", "64")),
        (WORDS, {"vocab_size": 2 * VOCAB}, ("model.safetensors", str(2 * VOCAB), str(VOCAB))),
        (None, {"input_type": "t2i2"}, ("t2i2", "32", str(SIDE))),
        (None, {"input_type": "c2i"}, ("c2i", "24", str(SIDE))),
        (None, {"input_type": "video"}, ("config.json", "video")),
        (None, {"num_attention_heads": 7}, ("config.json", "7")),
        (None, {"hidden_act": "gelu"}, ("config.json", "hidden_act")),
        (None, {"num_hidden_layers": 2}, ("config.json", "num_hidden_layers")),
        (None, {"num_key_value_heads": 2}, ("config.json", "num_key_value_heads")),
        (None, {"vocab_size": 2 * VOCAB}, ("config.json", "vocab_size")),
        (None, {"intermediate_size": 128}, ("config.json", "intermediate_size")),
    ],
    ids=range(12),
)
def test_a_drafter_of_another_model_or_kind(tmp_path, target, weights, config, words):
    refused(write_eagle(tmp_path / "d", weights, **config), target, *words)


@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2]", b"null", b"\x00", b"\xff\xfe", b"[" * 100_000])
def test_config_of_another_kind(tmp_path, target, content):
    folder = write_eagle(tmp_path / "d")
    (folder / "config.json").write_bytes(content)
    refused(folder, target, "config.json")


@pytest.mark.parametrize("value", ["wide", [1], {}, -1, 0, float("nan"), 1e30], ids=str)
@pytest.mark.parametrize("entry", ["hidden_size", "num_attention_heads", "rms_norm_eps", "input_type"])
def test_nonsense_in_the_config(tmp_path, target, entry, value):
    refused(write_eagle(tmp_path / "d", **{entry: value}), target, "model.safetensors", "config.json", entry)


def test_an_entry_that_is_null_says_nothing(tmp_path, target):
    folder = write_eagle(tmp_path / "d", **dict.fromkeys(eagle_config()))
    assert torch.equal(
        features(load_drafter(folder, target)),
        features(load_drafter(write_eagle(tmp_path / "eps", rms_norm_eps=1e-6), target)),
    )


METADATA = [{"grid": 5}, {"grid": [16]}, {"grid": "16x16"}, {"grid": [32, 32]}, {"target": "janus"}, {"target": 3}]
METADATA += [{"num_attention_heads": 8}, {"rms_norm_eps": "small"}]


@pytest.mark.parametrize("metadata", METADATA, ids=str)
def test_nonsense_in_our_own_metadata(tmp_path, target, metadata):
    path = tmp_path / "drafter.safetensors"
    save_file(eagle_weights(), str(path), metadata={"specar": json.dumps(metadata)})
    refused(path, target, "drafter.safetensors")


def test_other_files(tmp_path, target):
    """A target's file of another size, an image decoder's, a diffusion model's."""
    save_file(vq_weights(), str(tmp_path / "vq.safetensors"))
    refused(tmp_path / "vq.safetensors", target, "vq.safetensors")
    save_file({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(1)}, str(tmp_path / "sd15.safetensors"))
    refused(tmp_path / "sd15.safetensors", target, "sd15.safetensors", "input_blocks")
    header = {"specar": json.dumps({"heads": HEADS, "grid": [SIDE, SIDE]})}
    save_file(llamagen_weights(True, vocab=2 * VOCAB), str(tmp_path / "words.safetensors"), metadata=header)
    refused(tmp_path / "words.safetensors", target, "words.safetensors", str(2 * VOCAB), str(VOCAB))
    write_llamagen(tmp_path / "small.safetensors", True, grid=[8, 8])
    refused(tmp_path / "small.safetensors", target, "small.safetensors", "8 x 8", f"{SIDE} x {SIDE}")
    write_llamagen(tmp_path / "classes.safetensors", False, grid=[SIDE, SIDE])
    refused(tmp_path / "classes.safetensors", target, "classes.safetensors", "llamagen-c2i", "llamagen-t2i")
