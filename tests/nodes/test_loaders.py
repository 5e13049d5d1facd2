"""Load AR Checkpoint, Load AR Drafter, Load AR Image Decoder, Empty AR Latent: what they take, refuse and manage."""

import os
import re
import shutil

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.model_loaders import detect
from comfyui_specar.model_loaders.detect import missing_decoder
from comfyui_specar.model_loaders.families import RELEASED_DECODERS
from comfyui_specar.models.networks import precision
from safetensors.torch import load_file, save_file

from ..support.bad_files import Attack

LOADERS = [  # node, widget, a file that is there
    ("SpecARLoadCheckpoint", "model_name", "tiny"),
    ("SpecARLoadDrafter", "drafter_name", "eagle"),
    ("SpecARLoadImageDecoder", "decoder_name", "tiny/vq.safetensors"),
    ("SpecARLoadLora", "lora_name", "style"),
]


@pytest.mark.parametrize(("kind", "family", "channels"), [("ids", "llamagen-t2i", 8), ("vectors", "mar", 6)])
def test_checkpoint_brings_model_text_encoder_and_decoder(kind, family, channels, tiny, continuous):
    loaded, clip, vae = tiny if kind == "ids" else continuous
    assert loaded.model.family == family and loaded.model.grid == (4, 4)
    assert loaded.model.dtype == torch.float32  # auto, on a CPU
    assert clip.encode_from_tokens_scheduled("red apple")[0][0].shape == (1, 2, 8)
    assert vae.downscale_ratio == 8 and vae.latent_channels == channels
    layer = loaded.model.backbone.output if kind == "ids" else loaded.model.backbone.z_proj
    assert hasattr(layer, "comfy_cast_weights")  # may be loaded in part


@pytest.mark.parametrize(("node", "widget", "good"), [*LOADERS, ("SpecARLoadTrace", "trace_name", None)])
def test_a_file_that_is_not_there_is_refused_before_the_prompt_is_queued(
    nodes, models, drafters, lora, node, widget, good
):
    """In our words: newer ComfyUIs would only say that the value is not in the list."""
    validate = nodes[node].validate_inputs
    assert validate(**{widget: good}) is True and validate(**{widget: None}) is True, "None: from a link"
    assert validate() is True, "an empty list, of which ComfyUI says that the input is required"
    for bad in ("gone.safetensors", "../../gone", "gone\0", "", 7, ["gone"]):
        answer = validate(**{widget: bad})
        assert isinstance(answer, str) and (not bad or re.search(r"gone|\b7\b|list", answer)), bad


@pytest.mark.parametrize(("node", "widget", "choice"), LOADERS)
def test_fingerprints_follow_a_file_and_name_no_folder(nodes, models, drafters, lora, node, widget, choice):
    """ComfyUI writes them into every image that it saves."""
    file = {"eagle": drafters, "style": models.parent / "loras"}.get(choice, models) / choice
    file = next(file.glob("*model.safetensors")) if file.is_dir() else file
    before, again = (nodes[node].fingerprint_inputs(**{widget: choice}) for _ in range(2))
    written = file.stat()
    file.touch()
    after = nodes[node].fingerprint_inputs(**{widget: choice})
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert before == again != after and re.fullmatch("[0-9a-f]+", before + after)


def test_what_a_class_model_lacks_is_said_where_it_is_needed(load):
    loaded, clip, vae = load("classes.safetensors")
    assert clip.encode_from_tokens_scheduled("3")[0][0].tolist() == [[[3.0]]]
    with pytest.raises(ValueError, match="0 to 9"):
        clip.encode_from_tokens_scheduled("10")
    assert loaded.decoder is None
    with pytest.raises(FileNotFoundError, match="vq_ds16_c2i.pt.*models/vae"):
        vae.decode(torch.zeros(1, 1, 4, 4))


def test_every_family_s_missing_decoder_is_named_as_it_is_looked_for():
    for family, decoder in RELEASED_DECODERS.items():
        message = missing_decoder("my model", family)
        if decoder.names:
            assert any(name.split("/")[0] in message for name in decoder.names) and "models/vae" in message, family
        else:
            assert "my model" in message and "Download" in message, family


def test_the_grid_widget_helps_a_file_that_does_not_state_its_grid(load):
    with pytest.raises(ValueError, match=r"nogrid.*\bgrid\b"):
        load("nogrid.safetensors")
    assert load("nogrid.safetensors", grid="16")[0].model.grid == (16, 16)


def test_what_cannot_be_loaded_is_named_and_harmless(load, models, tmp_path):
    whole = (models / "tiny/model.safetensors").read_bytes()
    broken, foreign, hostile = (models / name for name in ("broken.safetensors", "foreign.safetensors", "hostile.pt"))
    broken.write_bytes(whole[:1000])
    save_file({"conv.weight": torch.zeros(2)}, foreign)
    torch.save({"model": Attack(tmp_path / "executed")}, hostile)
    try:
        for name, widgets, message in (
            ("broken.safetensors", {}, "broken.safetensors .*damaged"),
            ("foreign.safetensors", {}, "foreign.safetensors.*family"),
            ("hostile.pt", {}, "hostile.pt.*never run"),
            ("nothing.safetensors", {}, "ar_models"),
            ("../../../etc/passwd", {}, "ar_models"),
            ("tiny", {"dtype": "fp8"}, "dtype"),
            ("tiny", {"grid": "17"}, "grid"),
        ):
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                load(name, **widgets)
        assert not (tmp_path / "executed").exists()
    finally:
        for file in (broken, foreign, hostile):
            file.unlink()


def test_replacing_a_loaded_model_leaves_no_dead_ones_behind(load):
    for _ in range(2):
        loaded, _, _ = load("tiny")
        mm.load_models_gpu([loaded.patcher])
    del loaded
    mm.cleanup_models_gc()
    assert not [m for m in mm.current_loaded_models if m.is_dead()]


@pytest.mark.parametrize("kind", ["ids", "vectors"])
def test_an_image_decoder_alone(kind, run_node, tiny, continuous):
    name, channels, vae = ("tiny/vq", 8, tiny[2]) if kind == "ids" else ("vectors/vae", 6, continuous[2])
    (alone,) = run_node("LoadImageDecoder", decoder_name=f"{name}.safetensors").result
    latent = torch.randn(1, channels, 4, 4)
    assert torch.equal(alone.decode(latent), vae.decode(latent))
    with pytest.raises(ValueError, match="classes.safetensors.*image decoder"):
        run_node("LoadImageDecoder", decoder_name="classes.safetensors")


@pytest.mark.parametrize("kind", ["ids", "vectors"])
def test_an_empty_latent_has_the_model_s_shape_or_names_the_legal_size(kind, run_node, tiny, continuous):
    model, channels = (tiny[0], 8) if kind == "ids" else (continuous[0], 6)
    for width, height in ((32, 32), (0, 0)):
        (latent,) = run_node("EmptyLatent", model=model, width=width, height=height, batch_size=3).result
        assert latent["samples"].shape == (3, channels, 4, 4)
    for width, height in ((64, 32), (36, 32), (512, 512)):
        with pytest.raises(ValueError, match="32 x 32 pixels"):
            run_node("EmptyLatent", model=model, width=width, height=height)


# Automatic precision on a CPU


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_a_large_model_of_token_ids_takes_bf16_where_that_is_faster(vectors, load, monkeypatch, large, faster):
    monkeypatch.setattr(detect, "LARGE", 1 if large else 10**9)
    monkeypatch.setattr(detect, "bf16_is_faster", lambda: faster)
    assert load("tiny")[0].model.dtype == (torch.bfloat16 if large and faster else torch.float32)
    assert load("vectors")[0].model.dtype == torch.float32
    monkeypatch.setattr(mm, "FORCE_FP32", True)
    assert load("tiny")[0].model.dtype == torch.float32
    assert load("tiny", dtype="bf16")[0].model.dtype == torch.bfloat16


@pytest.mark.parametrize(("slow", "faster"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_trial_tells_the_faster_dtype(monkeypatch, slow, faster):
    """Products in ``slow`` take ten times as long, unless other programs disturb them."""

    def seconds(run, **_):
        return [5.0, 1.0 if run.args[1].dtype == slow else 0.1]

    monkeypatch.setattr(precision, "repeat", seconds)
    assert precision.bf16_is_faster.__wrapped__() == faster


# Drafters


@pytest.mark.parametrize(("name", "kind"), [("eagle", "eagle"), ("small.safetensors", "model")])
def test_both_kinds_of_drafters_load_from_casting_layers(load_drafter, tiny, drafters, name, kind):
    loaded = load_drafter(tiny[0], name)
    for each in (*tiny, loaded):  # the history quotes the inputs of a node that failed
        assert len(str(each)) < 200
    assert loaded.drafter.kind == kind and loaded.name == name and loaded.target is tiny[0]
    layers = [m for m in loaded.patcher.model.modules() if list(m.parameters(recurse=False))]
    assert any(hasattr(layer, "comfy_cast_weights") for layer in layers)
    assert {p.dtype for p in loaded.patcher.model.parameters()} == {torch.float32}


def test_an_eagle_drafter_does_not_carry_its_target_along(tiny, drafter):
    own, whole = ([*each.patcher.model.parameters()] for each in (drafter, tiny[0]))
    assert sum(p.numel() for p in own) < sum(p.numel() for p in whole)
    assert not set(map(id, own)) & set(map(id, whole))


def test_model_and_drafter_are_loaded_together_with_space_for_both_caches(sample, tiny, drafter, loads):
    sample("DraftTree", batch=2, structure="chain", depth=3)
    (models, options), layout = loads[0], tiny[0].model.layout()
    assert tiny[0].patcher in models and drafter.patcher in models
    assert options["memory_required"] > sum(m.kv_bytes(2, layout, 4, True) for m in (tiny[0].model, drafter.drafter))


def test_a_drafter_of_another_model_is_refused(load, drafter, sample):
    with pytest.raises(ValueError, match="eagle.*tiny.*Load AR Checkpoint"):
        sample("DraftTree", model=load("tiny", dtype="bf16")[0])


def test_a_drafter_follows_its_model_when_that_is_loaded_again(load_drafter, tiny, drafters, load, sample):
    """ComfyUI may drop the model from its cache and keep the drafter."""
    ours, again = load_drafter(tiny[0], "eagle"), load("tiny")[0]
    wanted, _ = sample("DraftTree", drafter=ours)
    latent, _ = sample("DraftTree", drafter=ours, model=again)
    assert torch.equal(latent["ar_tokens"], wanted["ar_tokens"])
    assert ours.target is again and ours.drafter.model is again.model and ours.patcher.sessions is again.model.sessions
    followed = ours.drafter
    sample("DraftTree", drafter=ours, model=again)
    assert ours.drafter is followed, "it is read again once, not in every run"


def test_drafter_files_that_do_not_fit_are_named(load_drafter, tiny, continuous, vectors, drafters):
    folder = drafters / "unfit"
    folder.mkdir()
    about = {"specar": '{"heads": 2, "grid": [4, 4], "pixels_per_token": 8, "scale": 0.7}'}
    save_file(load_file(drafters / "vectors.safetensors"), folder / "other_scale.safetensors", about)
    try:
        for model, name, message in (
            (tiny, "gone.safetensors", "gone.safetensors is not in"),
            (tiny, "vectors.safetensors", "vectors.*token ids"),
            (continuous, "eagle", "token ids.*vectors"),
            (continuous, "small.safetensors", "token ids.*vectors"),
            (continuous, "unfit/other_scale.safetensors", "other_scale.safetensors.*scale"),
        ):
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                load_drafter(model[0], name)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["DraftTree", "Continuous"])
def test_layers_in_main_memory_are_cast_on_use(kind, draw, drafter, continuous, small_vectors):
    """Of a model or drafter that does not fit, and so is loaded in part."""
    chain = {"structure": "chain"} if kind == "DraftTree" else {}
    whole, owners = draw(kind, **chain)[0], [drafter] if chain else [continuous[0], small_vectors]
    layers = [m for owner in owners for m in owner.patcher.model.modules() if hasattr(m, "comfy_cast_weights")]
    for layer in layers:
        layer.comfy_cast_weights = True
    try:
        assert torch.equal(draw(kind, **chain)[0]["samples"], whole["samples"])
    finally:
        for layer in layers:
            layer.comfy_cast_weights = False
