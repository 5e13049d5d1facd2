"""Checkpoint files that cannot be used: a message that names the file, and nothing of it executed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

BUNDLED = Path(__file__).resolve().parents[2] / "assets/default"
WORKFLOW = "07 Acceptance map"


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def damaged(target: Path) -> None:
    whole = (BUNDLED / "model.safetensors").read_bytes()
    target.write_bytes(whole[: len(whole) // 2])


def hostile_zip(target: Path) -> None:
    torch.save({"model": Hostile(target.with_name("executed"))}, target)


def no_image_decoder(target: Path) -> None:
    shutil.copytree(BUNDLED, target, ignore=shutil.ignore_patterns("vq.safetensors"))


def rewritten(source: Path, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """A bundled folder with the largest tensor of its model changed."""

    def make(target: Path) -> None:
        file = shutil.copytree(source, target) / "model.safetensors"
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        name = max(tensors, key=lambda key: tensors[key].numel())
        save_file(tensors | {name: change(tensors[name])}, file, metadata=metadata)

    return make


CASES = {  # name -> how it is made, what the message says about it
    "damaged.safetensors": (damaged, "damaged"),
    "hostile_zip.pt": (hostile_zip, "never run"),
    "no_image_decoder": (no_image_decoder, "image decoder"),
    "nan_weights": (rewritten(BUNDLED, lambda tensor: tensor * float("nan")), "NaN"),
}


@pytest.fixture
def folder(comfy):
    """models/ar_models of the server, as it was before once the test has ended."""
    folder = comfy.base / "models/ar_models"
    folder.mkdir(exist_ok=True)
    yield folder
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", CASES)
def test_bad_file_is_named_and_harmless(comfy, folder, name):
    make, says = CASES[name]
    make(folder / name)
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
