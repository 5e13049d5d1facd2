"""dtype "auto" on a simulated GPU: storage by the memory that ComfyUI reports, what says so, and what it then loads."""

import logging
import math
import shutil

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.device import dispatch
from comfyui_specar.models.conditions import precision
from comfyui_specar.models.memory import weight_bytes
from comfyui_specar.nodes.comfy_runtime import memory
from comfyui_specar.nodes.comfy_runtime.memory import Patcher
from comfyui_specar.nodes.comfy_runtime.models import open_model
from safetensors.torch import save_file

from ..support.comfy_quant import rewritten
from ..support.simulated_gpu import CPU, GPU
from ..support.tiny import llamagen_weights
from .conftest import ABOUT, CAPTIONS, CODES, metadata, plain_fp8

NAME = "wide enough"
NONE, INT8, INT4 = None, torch.int8, torch.uint4
ORDER = NONE, INT8, INT4
PRECISIONS = {NONE: "bf16", INT8: "bf16, int8 (storage)", INT4: "bf16, int4 (storage)"}
HELD = 10**6  # bytes that a kept session holds, in the simulation


@pytest.fixture
def card(monkeypatch):
    """card(free, triton) simulates a GPU with so many bytes free, where ComfyUI reserves none."""

    def simulate(free: float, triton: bool = True) -> None:
        def free_memory(device=None, torch_free_too=False):
            return (int(free), int(free)) if torch_free_too else int(free)

        monkeypatch.setattr(mm, "get_torch_device", lambda: GPU)
        monkeypatch.setattr(mm, "should_use_bf16", lambda device=None, **_: True)
        monkeypatch.setattr(mm, "get_total_memory", lambda device=None, torch_total_too=False: 2**40)
        monkeypatch.setattr(mm, "get_free_memory", free_memory)
        monkeypatch.setattr(mm, "minimum_inference_memory", lambda: 0)
        monkeypatch.setattr(mm, "extra_reserved_memory", lambda: 0)
        monkeypatch.setattr(dispatch, "runs_triton", lambda device: triton)

    return simulate


@pytest.fixture(scope="module")
def name(models):
    """A model whose rows are as long as groups in 4 bits, so that they take less than in 8; with words and decoder."""
    folder = models / NAME
    folder.mkdir()
    weights = llamagen_weights(True, dim=128, layers=12, vocab=CODES, **CAPTIONS)
    save_file(weights, folder / "model.safetensors", metadata(**ABOUT, caption_slots=4, defaults={"cfg": 2.0}))
    for other in ("vq.safetensors", "text_encoder.safetensors"):
        (folder / other).write_bytes((models / "tiny" / other).read_bytes())
    yield NAME
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def needed(name):
    """storage -> (bytes of weights, beside them) of that model in bf16, as on the simulated GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mm, "minimum_inference_memory", lambda: 0)
        patch.setattr(mm, "extra_reserved_memory", lambda: 0)
        model = open_model(NAME, "bf16", None).model
        return {
            each: (weight_bytes(model, torch.bfloat16, each), memory.beside_weights(model, torch.bfloat16, each))
            for each in ORDER
        }


def to_fit(needed: tuple[int, int]) -> int:
    """Bytes that must be free: with a tenth more for weights, as ComfyUI adds."""
    weights, beside = needed
    return math.ceil(1.1 * weights + beside)


def stored(loaded) -> str:
    return precision(loaded.model)


@pytest.mark.parametrize("storage", ORDER)
@pytest.mark.parametrize("enough", [True, False])
def test_the_widest_storage_that_fits_is_chosen(storage, enough, card, needed, run_node, load, caplog):
    """To the byte; below it the next, and below the last the last."""
    card(to_fit(needed[storage]) - (not enough))
    with caplog.at_level(logging.INFO):
        loaded = load(NAME)[0]
    wanted = ORDER[min(ORDER.index(storage) + (not enough), 2)]
    assert stored(loaded) == PRECISIONS[wanted]
    assert loaded.choice.startswith(f"auto: {PRECISIONS[wanted].split(', ')[-1]}, as bf16 needs ")
    assert ("just enough" in loaded.choice) == (storage is INT4 and not enough)
    assert f"{NAME}: dtype {loaded.choice}." in caplog.text
    [text] = run_node("ModelInfo", model=loaded).result
    assert f"\ndtype {loaded.choice}\n" in text


@pytest.mark.parametrize("reserve", ["minimum_inference_memory", "extra_reserved_memory"])
def test_what_comfyui_keeps_free_is_not_for_weights(reserve, card, needed, monkeypatch):
    """At least its minimum, or what the run takes and a reserve, as in its load_models_gpu."""
    weights, run = needed[NONE]
    beside = 10**9 + (run if reserve == "extra_reserved_memory" else 0)
    for short, storage in ((0, NONE), (1, INT8)):
        card(math.ceil(1.1 * weights + beside) - short)
        monkeypatch.setattr(mm, reserve, lambda: 10**9)
        assert stored(open_model(NAME, "auto", None)) == PRECISIONS[storage]


def test_a_gpu_without_bf16_computes_in_fp16(card, needed, monkeypatch):
    card(to_fit(needed[INT8]))
    monkeypatch.setattr(mm, "should_use_bf16", lambda device=None, **_: False)
    monkeypatch.setattr(mm, "should_use_fp16", lambda device=None, **_: True)
    loaded = open_model(NAME, "auto", None)
    assert stored(loaded) == "fp16, int8 (storage)" and "as fp16 needs" in loaded.choice


def test_a_file_in_fp8_stays_in_fp8_where_it_fits_unless_it_would_be_widened_in_every_pass(card, models, needed):
    folder = models / "eight"
    shutil.copytree(models / NAME, folder)
    try:
        rewritten(folder, plain_fp8)
        card(2**40)
        loaded = open_model("eight", "auto", None)
        assert stored(loaded) == "bf16, fp8 (storage)" and loaded.choice.startswith("auto: fp8 (storage), as fp8")
        card(to_fit(needed[INT4]))
        assert stored(open_model("eight", "auto", None)) == PRECISIONS[INT4]
        card(2**40, triton=False)
        assert stored(open_model("eight", "auto", None)) == "bf16"
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_cpus_and_apples_gpus_have_no_choice(device, card, monkeypatch, run_node):
    """Their models are not copied over PCIe."""
    card(0)
    monkeypatch.setattr(mm, "get_torch_device", lambda: torch.device(device))
    loaded = open_model(NAME, "auto", None)
    assert stored(loaded) in ("fp32", "bf16") and loaded.choice == ""
    [text] = run_node("ModelInfo", model=loaded).result
    assert "auto" not in text


@pytest.mark.parametrize("dtype", ["fp32", "int4 (storage)"])
def test_a_dtype_that_the_user_chose_and_continuous_models_leave_no_choice(dtype, card, vectors):
    for free in (0, 2**40):
        card(free)
        loaded, other = open_model(NAME, dtype, None), open_model("vectors", "auto", None)
        assert stored(loaded).split(", ")[-1] == dtype and loaded.choice == ""
        assert stored(other) == "bf16" and other.choice == ""


def test_unknown_memory_is_enough(card, monkeypatch):
    """Under DirectML, where ComfyUI reports 1 GiB for every GPU."""
    card(0)
    monkeypatch.setattr(mm, "directml_enabled", True, raising=False)
    loaded = open_model(NAME, "auto", None)
    assert stored(loaded) == "bf16" and loaded.choice == "auto: bf16; the free memory is not known here"


class Weights:
    """A model that ComfyUI has loaded."""

    def __init__(self, size, device=GPU):
        self.size, self.load_device = size, device

    def loaded_size(self):
        return self.size


def test_weights_that_comfyui_unloads_count_as_free(card, needed, monkeypatch):
    """On the same device; a model that nothing holds any more is none."""
    card(1000)
    wanted = to_fit(needed[NONE]) - 1000
    for others, storage in (
        ([Weights(wanted), None], NONE),
        ([Weights(wanted - 1), None], INT8),
        ([Weights(wanted - 1), Weights(10**9, CPU)], INT8),
    ):
        monkeypatch.setattr(mm, "loaded_models", lambda others=others: others)
        assert stored(open_model(NAME, "auto", None)) == PRECISIONS[storage]


@pytest.mark.parametrize("short", [False, True])
def test_a_kept_session_is_no_obstacle(short, card, needed, monkeypatch, load):
    """It is dropped only if the weights in bf16 do not fit beside it."""
    card(0)
    patcher = Patcher(load("tiny", dtype="fp32")[0].model, GPU, CPU, sessions={})
    patcher.sessions["kind"] = object()
    free = to_fit(needed[NONE]) - (HELD // 2 if short else 0)

    def free_memory(device=None, torch_free_too=False):
        now = free + (0 if patcher.sessions else HELD)
        return (now, now) if torch_free_too else now

    monkeypatch.setattr(mm, "get_free_memory", free_memory)
    monkeypatch.setattr(mm, "loaded_models", lambda: [patcher])
    assert stored(open_model(NAME, "auto", None)) == "bf16"
    assert bool(patcher.sessions) is not short


@pytest.mark.parametrize("storage", ORDER)
@pytest.mark.parametrize("enough", [True, False])
def test_comfyui_then_loads_all_of_it(storage, enough, card, needed, monkeypatch):
    """With the memory that the choice was made by; and with less than weights and run take, not."""
    card(to_fit(needed[storage]))
    loaded, asked = open_model(NAME, "auto", None), []
    assert stored(loaded) == PRECISIONS[storage]
    monkeypatch.setattr(mm, "vram_state", mm.VRAMState.NORMAL_VRAM)
    monkeypatch.setattr(mm, "lowvram_available", True)
    monkeypatch.setattr(mm, "MIN_WEIGHT_MEMORY_RATIO", 0.0)
    monkeypatch.setattr(mm, "current_loaded_models", [])
    monkeypatch.setattr(mm, "soft_empty_cache", lambda *_: None)
    monkeypatch.setattr(Patcher, "partially_load", lambda self, device, memory, **_: asked.append(memory))
    if not enough:
        card(sum(needed[storage]))
    mm.load_models_gpu([loaded.patcher], memory_required=needed[storage][1])
    assert (asked[0] > loaded.patcher.model_size()) == enough
