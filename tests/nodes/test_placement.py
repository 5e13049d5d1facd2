"""Models that do not fit: what ComfyUI leaves in main memory is cast on use, and nothing else is left there.

A GPU is simulated by tensors without data, which refuse to be mixed across devices as real ones do.
"""

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models.memory import offload_embedding
from comfyui_specar.nodes.comfy_runtime import runs
from comfyui_specar.nodes.comfy_runtime.operations import Operations

from ..support import tiny_chameleon
from ..support.models import of_ids
from ..support.simulated_gpu import CPU, GPU, load_half
from ..support.tiny_family import declared

FAMILIES = declared("TINY", continuous=False)
QUANTISED = ("llamagen-c2i", "simplear")  # with a head of its own, and with the token table as its head
NAMES = [name for name in FAMILIES if name != "llamagen-t2i"]  # those with a text encoder


def run(model, prompt):
    """One step after a prompt, with guidance if the model has it."""
    state = model.start(prompt, None, 1, model.layout(), 4, model.guidance)
    places = torch.zeros(1, 2, dtype=torch.int64, device=GPU)
    out = model.step(state, places, places)
    model.commit(state, places[:, 0])
    return out.logits.device


@pytest.mark.parametrize(
    ("family", "storage"),
    [
        *((family, None) for family in NAMES),
        *((family, storage) for storage in (torch.int8, torch.float8_e4m3fn, torch.uint4) for family in QUANTISED),
    ],
    ids=str,
)
def test_every_family_runs_when_half_of_it_stays_in_main_memory(family, storage, tmp_path, request):
    model = load_model(FAMILIES[family].write(tmp_path), operations=Operations, storage=storage)
    kept = {None: torch.float32, torch.int8: torch.int8}.get(storage, torch.uint8)
    assert kept in {parameter.dtype for parameter in model.parameters()}
    offload_embedding(model)
    prompt = model.encode_prompt("3") if family == "llamagen-c2i" else of_ids(model, [1, 2, 3])
    if family != "llamagen":  # ids of words are checked, which tensors without data cannot be
        embedded = model.prefix(model.unpack_prompt(prompt, 1, "positive", model.grid).features)
        model.prefix.forward = lambda features: embedded.to(GPU)
    request.getfixturevalue("gpu")
    load_half(model)
    assert run(model, prompt) == GPU


def test_a_layer_that_cannot_cast_would_be_noticed(tmp_path, request):
    model = load_model(FAMILIES["llamagen-c2i"].write(tmp_path), operations=Operations)
    model.backbone.output = torch.nn.Linear(*reversed(model.backbone.output.weight.shape), bias=False)
    request.getfixturevalue("gpu")
    ModelPatcher(model, GPU, CPU).load(GPU, lowvram_model_memory=1)
    with pytest.raises(RuntimeError, match="cpu"):
        run(model, model.encode_prompt("3"))
    runs.bring_the_rest(model, GPU)
    assert run(model, model.encode_prompt("3")) == GPU


def test_the_words_of_a_language_model_stay_in_main_memory(tmp_path):
    model = load_model(tiny_chameleon.write(tmp_path), operations=Operations)
    before = ModelPatcher(model, CPU, CPU).model_size()
    features = torch.tensor([[[1.0], [2.0]]])
    embedded, words = model.prefix(features), model.prefix.embedding.weight
    offload_embedding(model)
    assert before - ModelPatcher(model, CPU, CPU).model_size() == words.numel() * words.element_size()
    assert torch.equal(model.prefix(features), embedded)
