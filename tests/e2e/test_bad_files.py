"""Checkpoint files that cannot be used: a message that names the file, and nothing of it executed."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

BUNDLED = Path(__file__).resolve().parents[2] / "assets/default"
CONTINUOUS = BUNDLED.with_name("continuous")
WORKFLOW = "05 Acceptance map"


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


def kl_autoencoder(folder: Path) -> str:
    shutil.copy(CONTINUOUS / "vae.safetensors", folder / "kl_autoencoder.safetensors")
    return "kl_autoencoder.safetensors"


def continuous_nan_weights(folder: Path) -> str:
    shutil.copytree(CONTINUOUS, folder / "continuous_nan_weights")
    return rewrite(folder / "continuous_nan_weights", lambda tensor: tensor * float("nan"))


def continuous_wrong_shape(folder: Path) -> str:
    shutil.copytree(CONTINUOUS, folder / "continuous_wrong_shape")
    return rewrite(folder / "continuous_wrong_shape", lambda tensor: tensor[..., :-1].contiguous())


def nan_weights(folder: Path) -> str:
    shutil.copytree(BUNDLED, folder / "nan_weights")
    return rewrite(folder / "nan_weights", lambda tensor: tensor * float("nan"))


def wrong_shape(folder: Path) -> str:
    shutil.copytree(BUNDLED, folder / "wrong_shape")
    return rewrite(folder / "wrong_shape", lambda tensor: tensor[..., :-1].contiguous())


def no_image_decoder(folder: Path) -> str:
    (folder / "no_image_decoder").mkdir()
    for file in BUNDLED.glob("*.safetensors"):
        if file.name != "vq.safetensors":
            shutil.copy(file, folder / "no_image_decoder")
    return "no_image_decoder"


def rewrite(folder: Path, change) -> str:
    """Changes the largest tensor of the folder's model."""
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    name = max(tensors, key=lambda key: tensors[key].numel())
    save_file(tensors | {name: change(tensors[name])}, file, metadata=metadata)
    return folder.name


CASES = {  # -> what the message says about it
    truncated: "damaged",
    noise: "damaged",
    empty: "damaged",
    hostile: "never run",
    hostile_zip: "never run",
    other_family: "supported model family",
    image_decoder: "Load AR Image Decoder",
    nan_weights: "NaN",
    wrong_shape: "expected",
    no_image_decoder: "image decoder",
    kl_autoencoder: "Load AR Image Decoder",
    continuous_nan_weights: "NaN",
    continuous_wrong_shape: "expected",
}


@pytest.fixture
def folder(comfy):
    """models/ar_models of the server, as it was before once the test has ended."""
    folder = comfy.base / "models/ar_models"
    folder.mkdir(exist_ok=True)
    yield folder
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(("make", "says"), CASES.items(), ids=[make.__name__ for make in CASES])
def test_bad_file_is_named_and_harmless(comfy, folder, make, says):
    name = make(folder)
    run = comfy.run(comfy.workflow(WORKFLOW, seed=500, model_name=name, width=0, height=0))
    assert run.outcome in ("error", "rejected"), f"{name} was accepted"
    weights = "model.safetensors" if (folder / name).is_dir() else name
    assert name in run.message() or weights in run.message()
    assert says in run.message()
    assert "Traceback" not in run.message()
    assert not (folder / "executed").exists(), "the file's code was executed"
    assert not [file for file in run.collect("images") if file["type"] == "output"]


def test_the_server_works_after_all_that(comfy):
    assert comfy.run(comfy.workflow(WORKFLOW, seed=501)).outcome == "success"
