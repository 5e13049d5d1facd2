"""Load AR Drafter: what it takes, what it refuses, and how it is managed."""

import shutil

import comfy.model_management as mm
import pytest
import torch
from safetensors.torch import load_file, save_file


def load(run, nodes, model, name):
    return run(nodes["SpecARLoadDrafter"], model=model, drafter_name=name).result[0]


@pytest.mark.parametrize(("name", "kind"), [("eagle", "eagle"), ("small.safetensors", "model")])
def test_both_kinds_load_from_casting_layers(run, nodes, tiny, drafters, name, kind):
    loaded = load(run, nodes, tiny[0], name)
    assert loaded.drafter.kind == kind and loaded.name == name and loaded.target is tiny[0]
    layers = [m for m in loaded.patcher.model.modules() if list(m.parameters(recurse=False))]
    assert any(hasattr(layer, "comfy_cast_weights") for layer in layers)
    assert {p.dtype for p in loaded.patcher.model.parameters()} == {torch.float32}


def test_an_eagle_drafter_does_not_carry_its_target_along(run, nodes, tiny, drafter):
    own = sum(p.numel() for p in drafter.patcher.model.parameters())
    assert own < sum(p.numel() for p in tiny[0].patcher.model.parameters())
    shared = {p.data_ptr() for p in drafter.patcher.model.parameters()}
    assert not shared & {p.data_ptr() for p in tiny[0].patcher.model.parameters()}


def test_model_and_drafter_are_loaded_together_with_space_for_both_caches(sample, tiny, drafter, monkeypatch):
    asked, load_models = [], mm.load_models_gpu
    monkeypatch.setattr(
        mm,
        "load_models_gpu",
        lambda models, memory_required=0, **options: (
            asked.append((models, memory_required)) or load_models(models, memory_required, **options)
        ),
    )
    sample("DraftTree", batch=2, structure="chain", depth=3)
    (models, memory), layout = asked[0], tiny[0].model.layout()
    assert tiny[0].patcher in models and drafter.patcher in models
    both = [m.kv_bytes(2, layout, 4, True) for m in (tiny[0].model, drafter.drafter)]
    assert memory > sum(both)


def test_a_drafter_of_another_model_is_refused(tiny_again, drafter, sample):
    with pytest.raises(ValueError, match="eagle.*tiny.*Load AR Checkpoint"):
        sample("DraftTree", model=tiny_again("bf16"))


def test_a_drafter_follows_its_model_when_that_is_loaded_again(run, nodes, tiny, drafters, tiny_again, sample):
    """ComfyUI may drop the model from its cache and keep the drafter."""
    ours, again = load(run, nodes, tiny[0], "eagle"), tiny_again()
    wanted, _ = sample("DraftTree", drafter=ours)
    latent, _ = sample("DraftTree", drafter=ours, model=again)
    assert torch.equal(latent["ar_tokens"], wanted["ar_tokens"])
    assert ours.target is again and ours.drafter.model is again.model and ours.patcher.sessions is again.model.sessions
    followed = ours.drafter
    sample("DraftTree", drafter=ours, model=again)
    assert ours.drafter is followed, "it is read again once, not in every run"


def test_files_that_do_not_fit_are_named(run, nodes, models, tiny, drafters):
    narrow, wide = drafters / "truncated.safetensors", drafters / "wide.safetensors"
    narrow.write_bytes((drafters / "eagle/model.safetensors").read_bytes()[:2000])
    weights = load_file(drafters / "eagle/model.safetensors")
    save_file({n: t.repeat(*([2] * t.ndim)) for n, t in weights.items()}, wide)
    shutil.copy(models / "classes.safetensors", drafters / "classes.safetensors")
    try:
        for name, message in (
            ("truncated.safetensors", "truncated.safetensors .*damaged"),
            ("wide.safetensors", "wide.safetensors was trained for another model: its width is 64"),
            ("classes.safetensors", "classes.safetensors cannot draft for this model"),
            ("gone.safetensors", "gone.safetensors is not in"),
        ):
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                load(run, nodes, tiny[0], name)
    finally:
        for path in (narrow, wide, drafters / "classes.safetensors"):
            path.unlink()


def test_fingerprint_changes_when_a_file_is_replaced(nodes, drafters):
    loader = nodes["SpecARLoadDrafter"]
    before = loader.fingerprint_inputs(model=None, drafter_name="eagle")
    assert before == loader.fingerprint_inputs(model=None, drafter_name="eagle")
    (drafters / "eagle/model.safetensors").touch()
    assert before != loader.fingerprint_inputs(model=None, drafter_name="eagle")


def test_layers_in_main_memory_are_cast_on_use(sample, drafter):
    """A drafter that does not fit is loaded in part; the rest computes through ComfyUI's casting path."""
    whole, _ = sample("DraftTree", structure="chain")
    layers = [m for m in drafter.patcher.model.modules() if hasattr(m, "comfy_cast_weights")]
    for layer in layers:
        layer.comfy_cast_weights = True
    try:
        assert torch.equal(sample("DraftTree", structure="chain")[0]["ar_tokens"], whole["ar_tokens"])
    finally:
        for layer in layers:
            layer.comfy_cast_weights = False
