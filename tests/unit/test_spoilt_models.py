"""A model of any family of which a tensor is missing, misshapen or not made of numbers is refused, in words that name
the file. (Of unknown tensors: test_names.)"""

import json
import re
import shutil

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model, weight_file
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support.bad_files import refused
from ..support.tiny import GRID, HEADS, llamagen_weights
from ..support.tiny_family import declared

FAMILIES = declared("TINY")
UNREAD = re.compile(r"vqmodel|visual|vision_model|model\.aligner|^llm\.lm_head|^mar\.class_emb")  # parts of other tasks
UNREAD_OF = {"janus-pro": "lm_head.weight"}
FEW = 7  # tensors that are spoilt one after the other, from the whole file


CHANGES = {  # of a tensor -> words of the error
    "missing": (lambda tensor: None, ""),
    "misshapen": (lambda tensor: tensor.flatten() if tensor.ndim > 1 else tensor[:-1].clone(), ""),
    "one number": (lambda tensor: torch.zeros(()), ""),
    "not finite": (lambda tensor: torch.full_like(tensor, torch.inf), "NaN or infinite"),
    "integers": (lambda tensor: tensor.to(torch.int8), "int8.*released"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def sound(request, tmp_path_factory):
    """What is to be loaded, and the names of the tensors that it reads."""
    path = FAMILIES[request.param].write(tmp_path_factory.mktemp("sound"))
    names = sorted(load_file(weight_file(path)))
    return path, [name for name in names if not UNREAD.search(name) and name != UNREAD_OF.get(request.param)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_spoilt_tensor_is_refused(sound, tmp_path, change):
    """A missing one, whichever it is; of others a few from the whole file."""
    (path, names), (spoil, words) = sound, CHANGES[change]
    source = weight_file(path)
    tensors = load_file(source)
    with safe_open(str(source), "pt") as file:
        about = file.metadata()
    folder = tmp_path / source.parent.name
    shutil.copytree(source.parent, folder)
    for name in names if change == "missing" else names[:: max(1, len(names) // FEW)]:
        spoilt = spoil(tensors[name])
        changed = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(changed if spoilt is None else changed | {name: spoilt}, folder / source.name, about)
        with pytest.raises(CheckpointError, match=words) as caught:
            load_model(folder / source.name if path.is_file() else folder)
        assert any(each in str(caught.value) for each in (source.name, folder.name)), name


def test_what_is_missing_and_which_shape_is_needed_is_said(tmp_path):
    tensors, name = llamagen_weights(False), "layers.1.attention.wo.weight"
    header = {"specar": json.dumps({"heads": HEADS, "grid": GRID})}
    for other, words in (
        (None, ("missing", name, "incomplete")),
        (torch.zeros(64, 63), (name, "[64, 63], expected [64, 64]")),
    ):
        spoilt = {key: tensor for key, tensor in (tensors | {name: other}).items() if tensor is not None}
        save_file(spoilt, tmp_path / "model.safetensors", header)
        refused(tmp_path / "model.safetensors", *words)
