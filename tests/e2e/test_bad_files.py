"""Checkpoint files that cannot be used: a message that names the file, nothing executed, and the next prompt works."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

BUNDLED = Path(__file__).resolve().parents[2] / "assets/default"
WORKFLOW = "text_to_picture"


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def truncated(folder: Path) -> str:
    data = (BUNDLED / "model.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(data[: len(data) // 2])
    return "truncated.safetensors"


def noise(folder: Path) -> str:
    (folder / "noise.safetensors").write_bytes(os.urandom(4096))
    return "noise.safetensors"


def empty(folder: Path) -> str:
    (folder / "empty.safetensors").touch()
    return "empty.safetensors"


def hostile(folder: Path) -> str:
    (folder / "hostile.pt").write_bytes(pickle.dumps({"model": Hostile(folder / "executed")}))
    return "hostile.pt"


def hostile_zip(folder: Path) -> str:
    torch.save({"model": Hostile(folder / "executed")}, folder / "hostile_zip.pt")
    return "hostile_zip.pt"


def other_family(folder: Path) -> str:
    save_file({"unet.down.0.weight": torch.zeros(4, 4)}, folder / "other_family.safetensors")
    return "other_family.safetensors"


def image_decoder(folder: Path) -> str:
    shutil.copy(BUNDLED / "vq.safetensors", folder / "image_decoder.safetensors")
    return "image_decoder.safetensors"


def nan_weights(folder: Path) -> str:
    shutil.copytree(BUNDLED, folder / "nan_weights")
    return rewrite(folder / "nan_weights", lambda tensor: tensor * float("nan"))


def wrong_shape(folder: Path) -> str:
    shutil.copytree(BUNDLED, folder / "wrong_shape")
    return rewrite(folder / "wrong_shape", lambda tensor: tensor[..., :-1].contiguous())


def no_decoder(folder: Path) -> str:
    (folder / "no_decoder").mkdir()
    for file in BUNDLED.glob("*.safetensors"):
        if file.name != "vq.safetensors":
            shutil.copy(file, folder / "no_decoder")
    return "no_decoder"


def rewrite(folder: Path, change) -> str:
    """Changes the largest tensor of the folder's model."""
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    name = max(tensors, key=lambda key: tensors[key].numel())
    save_file(tensors | {name: change(tensors[name])}, file, metadata=metadata)
    return folder.name


CASES = [truncated, noise, empty, hostile, hostile_zip, other_family, image_decoder, nan_weights, wrong_shape,
         no_decoder]


@pytest.fixture
def folder(comfy):
    """models/ar_models of the server, as it was before once the test has ended."""
    folder = comfy.base / "models/ar_models"
    folder.mkdir(exist_ok=True)
    yield folder
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bad_file_is_named_and_harmless(comfy, folder, make):
    name = make(folder)
    prompt = comfy.workflow(WORKFLOW, seed=500, model_name=name)
    run = comfy.run(prompt)
    assert run.outcome in ("error", "rejected"), f"{name} was accepted"
    assert Path(name).stem in run.message()
    assert "Traceback" not in run.message()
    assert not (folder / "executed").exists(), "the file's code was executed"
    assert not [file for file in run.collect("images") if file["type"] == "output"]
    assert comfy.run(comfy.workflow(WORKFLOW, seed=500)).outcome == "success"
