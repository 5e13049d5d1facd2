"""Runs as on a GPU, under ComfyUI: steps are captured (here: taped), and kept with the model until its weights move."""

import gc
import weakref
from threading import Thread

import comfy.model_management as mm
import pytest
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfyui_specar.samplers.engine import first_use

from ..support.tape import TapeGraphs
from .conftest import WITH_DRAFTER, defaults

METHODS = {"NextToken": {}, "SJD": {}, "DraftTree": {"structure": "chain"}}


@pytest.fixture
def loaded(sample):
    """The weights are there."""
    for method, inputs in METHODS.items():
        sample(method, **inputs)


@pytest.fixture
def taped(tiny, loaded, on_tape):
    """The graphs that runs made. Nothing is kept before and after, and captured steps need not be compared first."""
    first_use._checked.add(tiny[0].model)
    yield on_tape
    first_use._checked.discard(tiny[0].model)
    tiny[0].model.sessions.clear()


@pytest.mark.parametrize("method", METHODS)
def test_images_previews_and_progress_are_those_of_plain_runs(
    method, taped, sample, progress, hurried, tiny, monkeypatch
):
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Latent2RGB)
    found = [sample(method, seed=seed, batch=2, **METHODS[method])[0] for seed in (3, 8)]
    assert len(taped) == 1 and taped[0].replayed, "one session serves both runs"
    values = [value for value, _, _ in progress]
    assert values.count(16) == 2 and all(preview for *_, preview in progress)
    assert all(a <= b or a == 16 for a, b in zip(values, values[1:], strict=False))
    monkeypatch.undo()
    wanted = [sample(method, seed=seed, batch=2, **METHODS[method])[0] for seed in (3, 8)]
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one["ar_tokens"], two["ar_tokens"])


@pytest.mark.parametrize("method", METHODS)
def test_unloading_frees_the_caches(method, taped, sample, tiny):
    """At once, without the garbage collector: ComfyUI asks how much is free right after."""
    sample(method, **METHODS[method])
    [kept] = tiny[0].model.sessions.values()
    states = [state for state in (kept.state, kept.draft_state) if hasattr(state, "cache")]
    held = [weakref.ref(state.cache.buffer) for state in states]
    assert len(held) == 1 + (method == "DraftTree")
    gc.collect()
    gc.disable()
    try:
        del kept, states
        taped.clear()
        mm.unload_all_models()
        assert not tiny[0].model.sessions and not any(tensor() is not None for tensor in held)
    finally:
        gc.enable()
    sample(method, **METHODS[method])


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_stops_within_a_pass_and_leaves_its_session(method, taped, sample, progress, tiny):
    before, _ = sample(method, **METHODS[method])
    assert len(tiny[0].model.sessions) == 1
    progress.clear()
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        sample(method, **METHODS[method])
    assert not progress and len(tiny[0].model.sessions) == 1
    after, _ = sample(method, **METHODS[method])
    assert torch.equal(before["ar_tokens"], after["ar_tokens"]) and len(taped) == 1


def test_an_interruption_waits_until_a_capture_is_over(sample, taped, monkeypatch):
    """It comes while a step is recorded, in which newer ComfyUIs' layers ask for it. A thread of the server sets it."""
    record, servers = TapeGraphs._record, []

    def recorded(self, run):
        def asking():
            if not servers:
                servers.append(Thread(target=mm.interrupt_current_processing))
                servers[0].start()
                servers[0].join(0.2)
            mm.throw_exception_if_processing_interrupted()
            return run()

        return record(self, asking)

    monkeypatch.setattr(TapeGraphs, "_record", recorded)
    with pytest.raises(mm.InterruptProcessingException):
        sample("NextToken")
    assert [each.captured for each in taped] == [1] and not servers[0].is_alive()


@pytest.mark.parametrize("method", ["NextToken", "SJD", *WITH_DRAFTER])
def test_any_method_may_be_the_first_of_a_process(method, sample, nodes, tiny, on_tape, costs_of_captures, caplog):
    """As its node comes."""
    first_use._checked.discard(tiny[0].model)
    sample(method, **defaults(nodes[f"SpecAR{method}Sampler"]))
    assert on_tape[-1].replayed and "CUDA graphs" not in caplog.text
    tiny[0].model.sessions.clear()
