"""What happens to a run from outside: interrupts, too little memory, a full disk. Nothing is lost or left behind."""

import errno
import gc
import json
import os
import weakref
from pathlib import Path

import comfy.model_management as mm
import folder_paths
import pytest
import torch
from comfy_api.latest import ui
from comfyui_specar.models.networks import backbone
from comfyui_specar.models.networks.cache import KVCache
from comfyui_specar.models.networks.mar import MAR
from comfyui_specar.nodes.comfy_runtime import progress as nodes_progress
from comfyui_specar.nodes.continuous import MODES

from .conftest import GRID

EVERY = ("NextToken", "SJD", "DraftTree", "Continuous")  # every way to run; the other methods share them


@pytest.fixture
def drawn(draw):
    """drawn(name) -> the latent of two images."""
    return lambda name: draw(name, batch=2)[0]["samples"]


@pytest.fixture
def caches(monkeypatch):
    """The key/value caches that are alive."""
    alive, begin = weakref.WeakSet(), KVCache.__init__

    def noted(self, *given):
        begin(self, *given)
        alive.add(self)

    monkeypatch.setattr(KVCache, "__init__", noted)
    return alive


@pytest.fixture
def interrupt_at(monkeypatch):
    """interrupt_at(n): the user interrupts before the n-th callback of the next run. Returns the callbacks so far."""
    calls, when = [], [0]
    call = nodes_progress.Report.__call__

    def counted(self, progress):
        calls.append(int(progress.committed.min()))
        if len(calls) == when[0]:
            mm.interrupt_current_processing(True)
        return call(self, progress)

    monkeypatch.setattr(nodes_progress.Report, "__call__", counted)

    def interrupt_at(n: int) -> list:
        calls.clear()
        when[0] = n
        return calls

    yield interrupt_at
    mm.interrupt_current_processing(False)


@pytest.mark.parametrize("name", EVERY)
def test_an_interrupt_at_any_callback_leaves_nothing_behind(name, drawn, tiny, interrupt_at, caches):
    calls = interrupt_at(0)
    whole, count = drawn(name), len(calls)
    assert count >= 2
    for n in sorted({1, 2, count // 2, count}):
        interrupt_at(n)
        with pytest.raises(mm.InterruptProcessingException) as caught:
            drawn(name)
        assert type(caught.value) is mm.InterruptProcessingException
        assert len(calls) == n and not tiny[0].model.sessions
        del caught
    gc.collect()
    assert not caches
    interrupt_at(0)
    assert torch.equal(drawn(name), whole)


def test_find_fastest_can_be_interrupted_at_any_trial(tiny, positive, drafter, run_node, drawn, interrupt_at, caches):
    """It keeps what its runs leave with the model: that must not survive it."""
    whole = drawn("SJD")
    latent = {"samples": torch.zeros(1, 8, GRID, GRID)}
    inputs = {"model": tiny[0], "positive": positive, "latent_image": latent, "drafter": drafter}
    for n in (1, 2, 20):
        calls = interrupt_at(n)
        with pytest.raises(mm.InterruptProcessingException):
            run_node("FindFastest", **inputs, seconds=60, tokens=16)
        assert len(calls) == n and not tiny[0].model.sessions
    gc.collect()
    assert not caches
    interrupt_at(0)
    assert torch.equal(drawn("SJD"), whole)


# Memory


def out_of_memory_at(monkeypatch, kind: type, n: int) -> list:
    """The n-th call of a kind of module finds no memory. Returns the calls so far."""
    calls, forward = [], kind.forward

    def counted(self, *given, **more):
        calls.append(self)
        if len(calls) == n:
            raise mm.OOM_EXCEPTION("no memory left (a test)")
        return forward(self, *given, **more)

    monkeypatch.setattr(kind, "forward", counted)
    return calls


@pytest.mark.parametrize("name", EVERY)
def test_too_little_memory_at_any_pass_ends_the_run_and_frees_its_caches(name, drawn, tiny, monkeypatch, caches):
    """At the prompt, at a step, while drafting: EAGLE's layers are those of the model."""
    kind = MAR if name == "Continuous" else backbone.Block
    with monkeypatch.context() as patch:
        calls = out_of_memory_at(patch, kind, 0)
        whole, count = drawn(name), len(calls)
    for n in sorted({1, 2, count // 2, count}):
        with monkeypatch.context() as patch:
            out_of_memory_at(patch, kind, n)
            with pytest.raises(mm.OOM_EXCEPTION) as caught:
                drawn(name)
        assert type(caught.value) is mm.OOM_EXCEPTION and not tiny[0].model.sessions
        del caught
    gc.collect()
    assert not caches
    mm.unload_all_models()  # as ComfyUI does then
    assert torch.equal(drawn(name), whole)


def test_too_little_memory_for_decoding_even_a_tile(tiny, drawn, monkeypatch):
    latent, decoder = drawn("NextToken"), tiny[2]._found.decoder
    whole = tiny[2].decode(latent)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "decode", lambda latent: (_ for _ in ()).throw(mm.OOM_EXCEPTION("none (a test)")))
        with pytest.raises(mm.OOM_EXCEPTION):
            tiny[2].decode(latent)
    assert torch.equal(tiny[2].decode(latent), whole)


def test_more_memory_than_there_is_is_refused(drawn, monkeypatch):
    monkeypatch.setattr(mm, "get_total_memory", lambda device=None, torch_total_too=False: 10**4)
    for name in EVERY:
        with pytest.raises(ValueError, match="(?i)beside the model.*fewer images"):
            drawn(name)


# Disks


def full(*_given, **_more):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_no_half_of_a_trace_and_the_prompt_goes_on(writes, sample, save, monkeypatch, caplog):
    _, trace = sample("SJD")
    output, written = Path(folder_paths.get_output_directory()), []
    write = Path.write_bytes

    def full_later(path, content):
        written.append(path)
        if len(written) > writes:
            write(path, content[:20])
            full()
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_later)
        out = save(trace, f"full_{writes}/v1.5.run")
    [text] = out["text"]
    assert text.startswith("NOT SAVED") and "v1.5.run_00001_" in text and "The disk is full" in text
    assert "The disk is full" in caplog.text and out["files"] == [] and out["specar"] == [trace.report()]
    assert not list((output / f"full_{writes}").iterdir())
    names = [file["filename"] for _ in range(2) for file in save(trace, f"full_{writes}/v1.5.run")["files"]]
    assert names == [f"v1.5.run_0000{i}_{ending}" for i in (1, 2) for ending in (".json", ".safetensors")]


def test_a_folder_that_cannot_be_made_does_not_end_the_prompt(sample, save):
    _, trace = sample("SJD")
    (Path(folder_paths.get_output_directory()) / "a_file").write_text("in the way", encoding="utf-8")
    for prefix in ("a_file/t", "a_file/deeper/t", "n" * 300):
        [text] = save(trace, prefix)["text"]
        assert text.startswith("NOT SAVED")


@pytest.mark.parametrize("prefix", ["../t", "/etc/t", "", ".", "..", "a/../../t", "a\0b"])
def test_names_outside_the_output_folder_are_refused_before_anything_is_generated(prefix, sample, save, nodes):
    assert "filename_prefix" in nodes["SpecARSaveTrace"].validate_inputs(filename_prefix=prefix)
    with pytest.raises(ValueError, match="filename_prefix"):
        save(sample("SJD")[1], prefix)


def test_the_output_folder_may_be_the_root_of_a_drive(nodes, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: os.path.abspath(os.sep))
    validate = nodes["SpecARSaveTrace"].validate_inputs
    assert validate(filename_prefix="specar/trace") is True
    assert validate(filename_prefix=None) is True, "a link, which is judged when it arrives"
    assert all("filename_prefix is" in validate(filename_prefix=prefix) for prefix in ("", ".", "..", "a\0b"))


def test_no_memory_for_a_preview_costs_the_preview_only(sample, run_node, show, monkeypatch, caplog):
    _, trace = sample("SJD")
    expected = show(trace)
    monkeypatch.setattr(ui, "PreviewImage", full)
    out = show(trace)
    assert torch.equal(out.result[0], expected.result[0]) and out.ui["images"] == []
    chart = run_node("CompareTraces", trace_1=trace)
    assert chart.ui["images"] == [] and "No space left" in caplog.text


# Drafters that guess garbage, through the nodes


@pytest.mark.once
@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_of_vectors_that_computes_nan_costs_no_image(
    mode, continuous, load_drafter, show, draw_vectors, caplog
):
    drafter = load_drafter(continuous[0], "vectors.safetensors")
    with torch.inference_mode():
        for weight in drafter.patcher.model.parameters():
            weight.mul_(float("nan"))
    latent, trace = draw_vectors("", drafter=drafter, mode=mode, head_steps=2, batch=2)
    assert latent["samples"].isfinite().all() and trace.summary()["accepted_drafts"] == 0
    assert "drafter" in caplog.text
    for metric in ("source", "distance", "log ratio"):
        shown = show(trace, metric)
        json.dumps(shown.ui["specar"], allow_nan=False)
        assert all(values.isfinite().all() for values in shown.result[:3])
