"""Files of torch.save: read as torch reads them, the same whatever else runs in the process, and answered in words."""

import logging
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, open_checkpoint, outline, tensor_names
from comfyui_specar.model_loaders.files.pickles import read_pickle

from ..support.bad_files import Attack, refused
from ..support.tiny import vq_weights

OLD = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
OLD += (torch.int8, torch.uint8, torch.bool, torch.complex64)
NEW = (*OLD, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32)  # not in the format before zip files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_everything_is_read_as_torch_reads_it(tmp_path, zipped, mapped):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    content = OrderedDict(parameter=torch.nn.Parameter(torch.randn(3, 3)), wide=torch.zeros(1, 3).expand(4, 3))
    for dtype in NEW if zipped else OLD:
        whole = (torch.arange(24).view(4, 6) % 2).to(dtype)
        content |= {
            f"{dtype}.{i}": part for i, part in enumerate((whole, whole.t(), whole[1:3, 2:5], whole[:0], whole[1, 1]))
        }
    others = {
        "state": module.state_dict(),
        "optimizer": torch.optim.AdamW(module.parameters()).state_dict(),
        "size": torch.Size([1, 2]),
        "number": 2**63,
        "bytes": b"ab",
        "set": {1, 2},
        "counted": Counter({3: 1}),
        "rng": torch.get_rng_state(),
    }
    file = tmp_path / "some.pt"
    torch.save({"content": content} | others, file, _use_new_zipfile_serialization=zipped)
    found = read_pickle(file, mapped)
    for name, tensor in content.items():
        assert found["content"][name].dtype == tensor.dtype and found["content"][name].shape == tensor.shape
        assert found["content"][name].tolist() == tensor.tolist(), name
    assert torch.equal(found["state"]["0.weight"], module[0].weight) and found["number"] == 2**63


# Containers


A, B = ({name: torch.full((2,), value) for name in ("a.weight", "b.weight")} for value in (1.0, 2.0))


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        ({"model": A, "ema": B}, B),
        ({"model": A, "model_ema": B}, B),
        ({"params": A, "params_ema": B}, B),
        ({"state_dict": {"model": A, "ema": B}}, B),
        ({"model": A, "ema": {"module": B, "updates": 3}}, B),
        ({"model": A, "ema": {"shadow": B, "decay": torch.tensor(0.9)}}, B),
        ({"model": A, "ema": {"decay": torch.tensor(0.9)}}, A),
        ({"model": A, "ema": {"shadow_params": [B]}}, A),
        ({"model": A, "ema": None}, A),
        ({"generator": A, "discriminator": B}, A),
        ({"net": A, "optimizer": B}, A),
        *(({key: A, "epoch": 3}, A) for key in "model_state_dict ema_model weights state_dict module".split()),
    ],
)
def test_the_averaged_weights_of_a_container_are_taken(tmp_path, content, taken):
    torch.save(content, tmp_path / "some.pt")
    found = open_checkpoint(tmp_path / "some.pt").tensors
    assert found.keys() == taken.keys() == tensor_names(tmp_path / "some.pt")
    assert all(torch.equal(found[name], taken[name]) for name in taken)


def test_what_was_taken_is_logged_if_there_is_a_choice(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        torch.save({"model": A}, tmp_path / "one.pt")
        open_checkpoint(tmp_path / "one.pt")
        assert not caplog.text
        torch.save({"model": A, "ema": B}, tmp_path / "two.pt")
        open_checkpoint(tmp_path / "two.pt")
    assert "two.pt" in caplog.text and "ema, model" in caplog.text and "'ema' is used" in caplog.text


def test_other_containers_are_named_in_the_answer(tmp_path):
    torch.save({"brain": A, "epoch": 3}, tmp_path / "some.pt")
    refused(tmp_path / "some.pt", "brain", "epoch", "model_state_dict", loader=open_checkpoint)


# Values beside the weights


@pytest.fixture
def lightning(tmp_path, monkeypatch):
    """A checkpoint of Lightning, with its classes and numbers of NumPy beside the weights."""
    import numpy

    for name in ("pytorch_lightning", "pytorch_lightning.callbacks", "pytorch_lightning.callbacks.model_checkpoint"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kind = type("ModelCheckpoint", (), {"__module__": "pytorch_lightning.callbacks.model_checkpoint"})
    sys.modules[kind.__module__].ModelCheckpoint = kind
    content = {
        "state_dict": vq_weights(),
        "callbacks": {kind: {"best": numpy.float64(0.1)}, "x": kind()},
        "array": numpy.arange(3),
        "loops": {"n": {1, 2}},
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / f"{zipped}.ckpt", _use_new_zipfile_serialization=zipped)
    return kind, tmp_path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("extended", [True, False], ids=["in ComfyUI", "alone"])
def test_a_checkpoint_of_lightning_has_one_answer_everywhere(lightning, zipped, extended):
    kind, folder = lightning
    with torch.serialization.safe_globals([kind] if extended else []):
        before = set(map(str, torch.serialization.get_safe_globals()))
        assert load_image_decoder(folder / f"{zipped}.ckpt").codes
        assert set(map(str, torch.serialization.get_safe_globals())) == before


class Best:
    """A class of a training script."""


@pytest.mark.parametrize("zipped", [True, False])
def test_values_of_scripts_beside_the_weights_are_passed_over(tmp_path, zipped):
    others = {"args": Namespace(out=Path("runs")), "when": datetime(2024, 5, 12), "best": Best()}
    torch.save({"model": A} | others, tmp_path / "some.pt", _use_new_zipfile_serialization=zipped)
    assert open_checkpoint(tmp_path / "some.pt").tensors.keys() == A.keys()


def test_a_training_of_three_thousand_tensors_is_no_attack(tmp_path):
    """Its weights, their average and the two moments of AdamW, each step a tensor, too."""
    names = [f"language_model.model.layers.{i}.self_attn.q_proj.weight" for i in range(3000)]
    state = {i: {each: torch.zeros(1) for each in ("step", "exp_avg", "exp_avg_sq")} for i in range(len(names))}
    weights = {key: {name: torch.zeros(1) for name in names} for key in ("model", "ema")}
    torch.save(weights | {"optimizer": {"state": state}}, tmp_path / "some.pt")
    assert len(open_checkpoint(tmp_path / "some.pt").tensors) == len(names)


@pytest.mark.parametrize("kind", [deque, partial(defaultdict, int)])
@pytest.mark.parametrize("zipped", [True, False])
def test_containers_that_torch_does_not_fill_are_named(tmp_path, kind, zipped):
    torch.save({"model": A, "last": kind()}, tmp_path / "some.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "some.pt", "Save the weights alone", loader=open_checkpoint)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_others_declare_safe_is_not_used_where_it_would_run(tmp_path, zipped):
    torch.save({"model": A, "x": Attack(tmp_path / "canary")}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with torch.serialization.safe_globals([exec]), pytest.raises(CheckpointError, match=r"asks for .*exec"):
        open_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "canary").exists()


def test_an_older_torch_is_named(tmp_path, monkeypatch):
    torch.save(A, tmp_path / "some.pt")
    monkeypatch.delattr(torch.serialization, "safe_globals")
    refused(tmp_path / "some.pt", "PyTorch 2.5", loader=open_checkpoint)


def test_a_torchscript_archive_under_another_ending_is_named(tmp_path):
    with pytest.warns(DeprecationWarning):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "some.pt")
    refused(tmp_path / "some.pt", "TorchScript", ".jit", loader=open_checkpoint)


def test_names_in_the_old_format_are_read_without_the_data(tmp_path):
    """As for a list of files, of which each may have gigabytes."""
    path = tmp_path / "some.pt"
    torch.save({"a.weight": torch.ones(1000, 10)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-100])
    assert {name: (*tensor.shape, tensor.device.type) for name, tensor in outline(path).tensors.items()} == {
        "a.weight": (1000, 10, "meta")
    }
    with pytest.raises(CheckpointError, match="unexpected EOF"):
        open_checkpoint(path)
