"""LoRAs of PEFT: every family computes with the merged matrices, and what cannot be merged is refused."""

import json
import math

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model, model_file
from comfyui_specar.model_loaders.files.adapters import with_adapter
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.model_loaders.files.errors import CheckpointError
from comfyui_specar.model_loaders.files.quantised import LazyMatrix
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support.lora import RANK, factors, linear_layers, merged, write_lora
from ..support.tiny_family import declared
from ..support.tiny_simplear import write, write_quantised

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def simplear(tmp_path):
    return model_file(write(tmp_path / "model", decoder=False))


def test_a_lora_changes_the_matrices_of_every_family(tmp_path):
    for name, tiny in declared("TINY").items():
        (tmp_path / name).mkdir()
        file = model_file(tiny.write(tmp_path / name))
        modules = linear_layers(file)
        lora = write_lora(tmp_path / f"{name} lora", file, modules)
        adapted = load_model(file, dtype=torch.float32, adapters=[(lora, 0.5)]).state_dict()
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(merged(load_file(file), modules, 0.5 * 6 / RANK), file, metadata)
        by_hand = load_model(file, dtype=torch.float32).state_dict()
        assert adapted.keys() == by_hand.keys()
        for key, tensor in by_hand.items():
            assert torch.equal(adapted[key], tensor), (name, key)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / RANK),
        ({"use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"alpha_pattern": {"self_attn.q_proj": 12}}, 12 / RANK),
        ({"alpha_pattern": {"k_proj": 12}}, 6 / RANK),
    ],
)
def test_the_scale_is_that_of_the_adapters_config(tmp_path, simplear, config, scale):
    lora = write_lora(tmp_path / "lora", simplear, [Q], **config)
    checkpoint = open_checkpoint(simplear)
    a, b = factors(Q, checkpoint.tensors[f"{Q}.weight"].shape)
    wanted = checkpoint.tensors[f"{Q}.weight"] + scale * (b @ a)
    assert torch.equal(with_adapter(checkpoint, lora, 1.0).tensors[f"{Q}.weight"].float(), wanted)


def test_a_quantised_matrix_takes_a_lora(tmp_path):
    (tmp_path / "model").mkdir()
    write_quantised(tmp_path / "model")
    checkpoint = open_checkpoint(file := model_file(tmp_path / "model"))
    lora, base = write_lora(tmp_path / "lora", file, [Q]), checkpoint.tensors[f"{Q}.weight"]
    a, b = factors(Q, base.shape)
    assert type(base) is LazyMatrix
    found = with_adapter(checkpoint, lora, 1.0).tensors[f"{Q}.weight"]
    assert torch.equal(found.float(), base.float() + 6 / RANK * (b @ a))
    assert torch.equal(found[8:24].float(), found.float()[8:24]), "its rows are lazy, too"


@pytest.mark.parametrize("name", [Q, "layers.1.self_attn.q_proj", f"vl_gpt.language_model.{Q}"])
def test_a_layer_is_found_under_the_name_that_it_was_trained_with(tmp_path, simplear, name):
    lora = write_lora(tmp_path / "lora", simplear, [Q], {Q: name})
    changed = with_adapter(open_checkpoint(simplear), lora, 1.0).tensors
    assert [key for key, tensor in changed.items() if type(tensor) is not torch.Tensor] == [f"{Q}.weight"]


def test_several_adapters_add_up_and_matrices_are_stored_in_few_bits(tmp_path, simplear):
    loras = [(write_lora(tmp_path / f"{i}", simplear, [Q]), strength) for i, strength in enumerate((1.0, -0.75))]
    plain = twice = open_checkpoint(simplear)
    for lora, strength in loras:
        twice = with_adapter(twice, lora, strength)
    by_hand = merged(merged(plain.tensors, [Q], 6 / RANK), [Q], -0.75 * 6 / RANK)
    assert torch.equal(twice.tensors[f"{Q}.weight"].float(), by_hand[f"{Q}.weight"])
    narrow = load_model(simplear, dtype=torch.float32, storage=torch.int8, adapters=loras)
    assert narrow.backbone.layers[1].attention.wqkv.weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "much"}, "lora_alpha 'much'"),
        ({"alpha_pattern": {".*": 2}}, "only ends of names"),
    ],
)
def test_other_adapters_are_refused(tmp_path, simplear, config, words):
    lora = write_lora(tmp_path / "lora", simplear, [Q], **config)
    with pytest.raises(CheckpointError, match=words):
        with_adapter(open_checkpoint(simplear), lora, 1.0)


def changed(tensors):
    """Damaged contents of an adapter, and what is said of each."""
    down, up = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")
    yield {down: tensors[down]}, "lacks a half"
    yield tensors | {up: tensors[up][:, :1].contiguous()}, "do not fit"
    yield tensors | {up: tensors[up] * math.nan}, "finite"
    yield tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head"
    yield tensors | {up: tensors[up][:4].contiguous()}, "another model"
    yield {name.replace("layers.1", "layers.7"): each for name, each in tensors.items()}, "does not have"


def test_damaged_adapters_and_those_of_other_models_are_refused(tmp_path, simplear):
    lora = write_lora(tmp_path / "lora", simplear, [Q])
    checkpoint, file = open_checkpoint(simplear), lora / "adapter_model.safetensors"
    for tensors, words in [*changed(load_file(file))]:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=words):
            with_adapter(checkpoint, lora, 1.0)
    (lora / "adapter_config.json").write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        with_adapter(checkpoint, lora, 1.0)
    (lora / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="Keep both files"):
        with_adapter(checkpoint, lora, 1.0)
    with pytest.raises(ValueError, match="strength is nan"):
        with_adapter(checkpoint, lora, math.nan)
