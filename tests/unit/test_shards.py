"""Checkpoints in shards, whole and damaged; models of no known family; weights in one byte."""

import json
from functools import partial

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import NAMES
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, outline, tensor_names, weight_file
from safetensors.torch import load_file, save_file

from ..support import bad_files, comfy_quant, quantised_layouts, tiny_chameleon
from ..support.tiny_folder import write_folder

refused = partial(bad_files.refused, loader=open_checkpoint)
WEIGHTS = {f"part.{i}.weight": torch.full((3, 2), float(i)) for i in range(6)}
KINDS = {False: "model.safetensors.index.json", True: "pytorch_model.bin.index.json"}


@pytest.fixture(params=KINDS, ids=["safetensors", "pickles"])
def index(request, tmp_path):
    """The index of six tensors in three shards."""
    return write_folder(tmp_path / "folder", WEIGHTS, {}, shards=3, pickled=request.param) / KINDS[request.param]


def shards_of(index):
    return sorted(file for file in index.parent.iterdir() if "-of-" in file.name)


def rewrite(index, **changes):
    settings = json.loads(index.read_text(encoding="utf-8"))
    settings["weight_map"] |= changes
    index.write_text(json.dumps(settings), encoding="utf-8")


def test_shards_are_one_checkpoint(index):
    found = open_checkpoint(weight_file(index.parent))
    assert found.path == index and found.tensors.keys() == WEIGHTS.keys() == tensor_names(index)
    assert all(torch.equal(found.tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_missing_shards_are_named(index):
    first, second, third = shards_of(index)
    second.unlink()
    refused(index, "incomplete", "3 shards", second.name, str(index.parent))
    third.unlink()
    refused(index, "missing", second.name, third.name)


def test_a_tensor_that_is_in_no_shard_is_named(index):
    last = shards_of(index)[-1]
    rewrite(index, **{"part.9.weight": last.name})
    refused(index, "not in the shards", "part.9.weight", last.name)


def test_a_shard_with_the_content_of_another_is_noticed(index):
    first, second, _ = shards_of(index)
    second.write_bytes(first.read_bytes())
    refused(index, "not in the shards", "part.2.weight", second.name)


@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_the_index_decides_between_copies(index, order):
    """Whichever name comes first: a shard of before is not used for what the index has elsewhere, or not at all. What
    it does not name beside a tensor that it does belongs to that."""
    stale, current = shards_of(index)[:2][::order]
    load, save = (torch.load, torch.save) if index.name == KINDS[True] else (load_file, save_file)
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    name = next(name for name, file in listed.items() if file == current.name)
    layer = name.removesuffix(".weight")
    old = {name: torch.zeros(3, 2), f"{layer}.bias": torch.ones(3), "part.9.weight": torch.ones(1)}
    save(load(stale) | old, stale)
    for load_all in (open_checkpoint, outline):
        assert load_all(index).tensors.keys() == WEIGHTS.keys()
    assert torch.equal(open_checkpoint(index).tensors[name], WEIGHTS[name])
    save(load(current) | {f"{layer}.bias": torch.full((3,), 2.0)}, current)
    found = open_checkpoint(index).tensors
    assert found.keys() == WEIGHTS.keys() | {f"{layer}.bias"} and (found[f"{layer}.bias"] == 2).all()
    save({key: tensor for key, tensor in load(current).items() if key != name}, current)
    refused(index, "not in the shards", name, current.name)


@pytest.mark.parametrize("in_metadata", [True, False])
def test_the_index_decides_about_marks_and_scales(tmp_path, in_metadata):
    """A matrix that was quantised before, in a shard that still holds others."""
    index = write_folder(tmp_path / "folder", WEIGHTS, {}, shards=3) / KINDS[False]
    first, second, _ = shards_of(index)
    parts, _ = comfy_quant.quantised(torch.randn(3, 2), "int8_tensorwise")
    old = {f"part.2.{part}": tensor for part, tensor in parts.items()}
    about, metadata = {"format": "int8_tensorwise"}, None
    if in_metadata:
        metadata = {"_quantization_metadata": json.dumps({"layers": {"part.2": about}})}
    else:
        old["part.2.comfy_quant"] = comfy_quant.mark(about)
    save_file(load_file(first) | old, first, metadata)
    for load in (open_checkpoint, outline):
        assert load(index).tensors.keys() == WEIGHTS.keys()
    assert torch.equal(open_checkpoint(index).tensors["part.2.weight"], WEIGHTS["part.2.weight"])
    save_file(load_file(second) | old, second, metadata)
    found = open_checkpoint(index).tensors["part.2.weight"]
    assert torch.equal(found.float(), parts["weight"].float() * parts["weight_scale"])


def test_what_the_index_does_not_name_of_a_matrix_of_bitsandbytes_lies_beside_it(tmp_path):
    index = write_folder(tmp_path / "folder", WEIGHTS, {}, shards=3) / KINDS[False]
    second = shards_of(index)[1]
    parts, wide = quantised_layouts.bitsandbytes("part.2.weight", torch.randn(3, 2))
    save_file(load_file(second) | parts, second)
    for load in (open_checkpoint, outline):
        assert load(index).tensors.keys() == WEIGHTS.keys()
    assert torch.equal(open_checkpoint(index).tensors["part.2.weight"].float(), wide)


@pytest.mark.parametrize("left", [0, 8, 40, -1])
def test_a_truncated_shard_is_named_with_its_size(index, left):
    shard = shards_of(index)[1]
    shard.write_bytes(shard.read_bytes()[:left])
    refused(index, shard.name, f"({shard.stat().st_size} bytes)", "damaged")


ELSEWHERE = ["../x.safetensors", "sub/x.safetensors", "sub\\x.safetensors", "/etc/passwd", "..", ".", "", 3, None]


@pytest.mark.parametrize("name", [*ELSEWHERE, *KINDS.values()])
def test_an_index_leads_nowhere_else(index, tmp_path, name):
    """Shards lie beside their index: no path, no folder, not the index itself."""
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    rewrite(index, **{"part.0.weight": name})
    refused(index, str(index), "shard")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\0", "[" * 9999]
)
def test_an_index_that_is_none(index, content):
    index.write_text(content, encoding="utf-8")
    refused(index, str(index), "Download")


# Of no known family


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BagelForConditionalGeneration"], "model_type": "bagel"}, "BagelForConditionalGeneration"),
        ({"model_type": "var"}, "var"),
        ({}, "part.0.weight"),
    ],
    ids=["architecture", "type", "nothing"],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_error_for_an_unknown_architecture_names_what_is_supported(tmp_path, config, message, shards):
    folder = write_folder(tmp_path / "Strange-7B", WEIGHTS, config, shards)
    refused(folder, "Strange-7B", message, "part.0.weight", *NAMES.split(", "), loader=load_model)
    (folder / "config.json").write_text("{", encoding="utf-8")
    refused(folder, "config.json", "read", loader=load_model)


# One byte for a weight


def test_files_in_one_byte_load_in_any_precision(tmp_path):
    folder = tiny_chameleon.write(tmp_path, kind="anole")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    stored = tensors | {name: each.to(torch.float8_e4m3fn) for name, each in tensors.items() if each.ndim == 2}
    save_file(stored, file)
    found = load_model(folder).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(found["backbone.layers.1.feed_forward.w2.weight"], stored[name].float())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    stored[name].view(torch.uint8)[0, 0] = 0x7F  # not a number
    save_file(stored, file)
    refused(folder, "NaN", "feed_forward.w2", loader=load_model)
