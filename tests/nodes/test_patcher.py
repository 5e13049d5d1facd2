"""What runs keep with a model (graphs, caches) goes before weights move, and before weights make way for others."""

import gc
import weakref
from contextlib import nullcontext

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.device import cpu
from comfyui_specar.device.graphs import Graphs
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.nodes.comfy_runtime import runs
from comfyui_specar.nodes.comfy_runtime.memory import Patcher, fit_in_memory, free_memory, load_models_gpu
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine.session import Session
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support import tiny as tiny_models
from ..support.simulated_gpu import CPU, GPU
from .conftest import DYNAMIC_VRAM

FOR_DYNAMIC = {"for_dynamic": True} if DYNAMIC_VRAM else {}  # on behalf of a model under dynamic VRAM, as most are now
HELD = 20000  # bytes that a kept session holds, in the simulation


@pytest.fixture
def kept(tiny, drafter):
    """The kept sessions of the tiny model, loaded with its drafter: one."""
    mm.load_models_gpu([tiny[0].patcher, drafter.patcher])
    sessions = tiny[0].model.sessions
    sessions["kind"] = object()
    yield sessions
    sessions.clear()


@pytest.fixture
def memory(kept, monkeypatch):
    """memory(free) simulates a device with so much free memory beside the model and what is kept."""

    def simulate(free: int) -> None:
        def get_free_memory(device=None, torch_free_too=False):
            now = free + (0 if kept else HELD)
            return (now, now) if torch_free_too else now

        monkeypatch.setattr(mm, "get_free_memory", get_free_memory)

    return simulate


def test_a_run_of_a_model_that_stays_keeps_them(kept, sample, tiny):
    sample("NextToken")
    sample("DraftTree", structure="chain")
    assert "kind" in kept and tiny[0].patcher.sessions is kept


@pytest.mark.parametrize("which", ["model", "drafter", "all, by the menu"])
def test_unloading_the_model_or_its_drafter_drops_them(which, kept, tiny, drafter):
    if which in ("model", "drafter"):
        patcher = tiny[0].patcher if which == "model" else drafter.patcher
        [loaded] = [entry for entry in mm.current_loaded_models if entry.model is patcher]
        loaded.model_unload()
        mm.current_loaded_models.remove(loaded)
    else:
        mm.unload_all_models()
    assert not kept


def test_loading_weights_drops_them(kept, tiny):
    mm.unload_all_models()
    kept["kind"] = object()
    mm.load_models_gpu([tiny[0].patcher])
    assert not kept


def test_weights_that_a_cpu_packed_move_as_they_were(tiny):
    cpu.unpack(tiny[0].model)
    layer = next(module for module in tiny[0].model.modules() if isinstance(module, torch.nn.Linear))
    weight = layer.weight.clone()
    mm.unload_all_models()
    cpu.pack(layer)
    mm.load_models_gpu([tiny[0].patcher])
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("short", [False, True])
def test_they_make_way_before_any_weight_does(short, kept, memory, tiny, drafter):
    """Another model asks for a little more than is free, or for more than what is kept holds."""
    patcher = tiny[0].patcher
    mm.load_models_gpu([patcher])  # last, so that it makes way first
    whole, others = patcher.loaded_size(), patcher.model_size() // 4
    assert whole == patcher.model_size()
    memory(free=1000)
    mm.current_loaded_models[:] = [entry for entry in mm.current_loaded_models if entry.model is patcher]
    mm.free_memory(1000 + HELD + others if short else 1000 + HELD // 2, patcher.load_device, **FOR_DYNAMIC)
    assert not kept
    assert (patcher.loaded_size() < whole) == short
    assert patcher.loaded_size() >= whole - others - max(p.numel() * 4 for p in tiny[0].model.parameters())
    mm.unload_all_models()


def test_nothing_is_unloaded_where_there_is_memory(kept, memory, tiny):
    memory(free=2**40)
    mm.free_memory(2**30, tiny[0].patcher.load_device, **FOR_DYNAMIC)
    assert "kind" in kept


@pytest.mark.parametrize("enough", [False, True])
def test_a_run_that_needs_their_memory_drops_them_first(enough, kept, memory, sample, monkeypatch):
    """ComfyUI would send other models away to free memory for caches that are there already."""
    memory(free=2**40 if enough else 1000)
    there, load = [], mm.load_models_gpu
    monkeypatch.setattr(mm, "load_models_gpu", lambda *what, **how: there.append("kind" in kept) or load(*what, **how))
    sample("NextToken")
    assert there[0] == enough and ("kind" in kept) == enough


def test_a_run_takes_the_memory_that_its_own_session_holds(kept, memory, sample, monkeypatch):
    """On a full GPU it would drop its session, and capture anew, every time; or send other models away."""
    key = kept["own"] = object()
    monkeypatch.setattr(NextToken, "session_key", lambda self, request: "own")
    monkeypatch.setattr(NextToken, "run_bytes", lambda self, request: 2**40)
    monkeypatch.setattr(runs, "total_memory", lambda device: 2**41)
    monkeypatch.setattr(engine, "use_session", lambda method, request, drafter: nullcontext(Session(Graphs(CPU))))
    there, load = [], mm.load_models_gpu
    monkeypatch.setattr(
        mm,
        "load_models_gpu",
        lambda *what, memory_required=0, **how: (
            there.append((kept.get("own") is key, memory_required)) or load(*what, memory_required=0, **how)
        ),
    )
    for free, stays in ((2 * mm.minimum_inference_memory(), True), (1000, False)):
        memory(free)
        sample("NextToken")
        assert there[0] == ((True, 0) if stays else (False, 2**40))
        there.clear()


def dropped(patcher, action) -> bool:
    """Does an action drop what is kept?"""
    patcher.sessions["kind"] = object()
    action()
    return not patcher.sessions


@pytest.fixture
def patcher(tmp_path):
    model = load_model(tiny_models.write_llamagen(tmp_path / "model.safetensors", False), operations=Operations)
    return Patcher(model, CPU, CPU, sessions=model.sessions)


def test_weights_that_come_and_go_in_part(patcher):
    size = patcher.model_size()
    assert dropped(patcher, lambda: patcher.partially_load(CPU, size // 2)) and 0 < patcher.loaded_size() < size
    assert dropped(patcher, lambda: patcher.partially_load(CPU, size)) and patcher.loaded_size() == size
    assert not dropped(patcher, lambda: patcher.partially_load(CPU, size)), "all of it was there"
    assert not dropped(patcher, lambda: patcher.detach(unpatch_all=False)), "ComfyUI does that before every run"
    assert dropped(patcher, lambda: patcher.partially_unload(CPU, 1)) and patcher.loaded_size() < size
    assert dropped(patcher, patcher.detach) and patcher.loaded_size() == 0


def test_weights_that_are_brought_to_a_gpu_in_part(patcher, request):
    request.getfixturevalue("gpu")
    request.getfixturevalue("monkeypatch").setattr(mm, "get_free_memory", lambda *_: 0)
    elsewhere = Patcher(patcher.model, GPU, CPU, sessions=patcher.sessions)
    assert dropped(elsewhere, lambda: elsewhere.partially_load(GPU, patcher.model_size() // 2))
    assert {p.device for p in patcher.model.parameters()} == {GPU, CPU}


def test_a_model_that_comfyui_forgets_is_freed_although_its_graphs_refer_to_it():
    class Model(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.sessions = {}

    gc.disable()
    try:
        model = Model()
        model.sessions["kind"] = [model]
        patcher, reference = Patcher(model, CPU, CPU, sessions=model.sessions), weakref.ref(model)
        del model
        assert reference() is not None
        del patcher
        assert reference() is None
    finally:
        gc.enable()


def test_memory_that_models_under_dynamic_vram_hold_counts_as_free(tiny, monkeypatch):
    """They give it up on demand. Otherwise a run would drop its caches beside a large model that only waits."""
    patcher = tiny[0].patcher
    asked = []
    monkeypatch.setattr(mm, "get_free_memory", lambda *_: 1000)
    if DYNAMIC_VRAM:
        monkeypatch.setattr("comfy_aimdo.model_vbar.vbars_analyze", lambda device=None: asked.append(device) or 2**40)
    assert free_memory(patcher) == 1000 + (2**40 if DYNAMIC_VRAM else 0)
    assert fit_in_memory([patcher], 2**30) == DYNAMIC_VRAM == bool(asked)


@pytest.mark.parametrize("wrong", [None, RuntimeError("no memory")])
def test_no_garbage_is_collected_while_models_are_loaded(wrong, monkeypatch):
    """Models of a failed prompt would leave ComfyUI's list while it goes through it: an IndexError, seen on a GPU."""

    def load(patchers, force_full_load):
        assert not gc.isenabled() and patchers == [] and force_full_load
        if wrong:
            raise wrong

    monkeypatch.setattr(mm, "load_models_gpu", load)
    with pytest.raises(RuntimeError, match="no memory") if wrong else nullcontext():
        load_models_gpu([], force_full_load=True)
    assert gc.isenabled()
