"""Load AR Checkpoint, Load AR Image Decoder, Empty AR Latent."""

import re

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.model_loaders.detect import missing_decoder
from comfyui_specar.model_loaders.families import RELEASED_DECODERS
from safetensors.torch import save_file


def load(run, nodes, name, dtype="auto", grid="auto"):
    return run(nodes["SpecARLoadCheckpoint"], model_name=name, dtype=dtype, grid=grid).result


def test_checkpoint_brings_model_text_encoder_and_decoder(tiny):
    loaded, clip, vae = tiny
    assert loaded.model.family == "llamagen-t2i" and loaded.model.grid == (4, 4)
    assert loaded.model.dtype == torch.float32  # auto, on a CPU
    assert loaded.model.codebook.shape == (64, 8)
    assert clip.encode_from_tokens_scheduled("red apple")[0][0].shape == (1, 2, 8)
    assert vae.downscale_ratio == 8
    assert hasattr(loaded.model.backbone.output, "comfy_cast_weights")  # may be loaded in part


@pytest.mark.parametrize(
    ("node", "widget", "good"),
    [
        ("SpecARLoadCheckpoint", "model_name", "tiny"),
        ("SpecARLoadDrafter", "drafter_name", "eagle"),
        ("SpecARLoadImageDecoder", "decoder_name", "default (bundled)"),
        ("SpecARLoadTrace", "trace_name", None),
    ],
)
def test_a_file_that_is_not_there_is_refused_before_the_prompt_is_queued(nodes, models, drafters, node, widget, good):
    """In our words: newer ComfyUIs would only say that the value is not in the list."""
    validate = nodes[node].validate_inputs
    assert validate(**{widget: good}) is True and validate(**{widget: None}) is True, "None: from a link"
    for bad, named in (
        ("gone.safetensors", "gone.safetensors"),
        ("../../gone", "gone"),
        ("gone\0", "gone"),
        ("", ""),
        (7, "7"),
        (["gone"], "list"),
    ):
        answer = validate(**{widget: bad})
        assert isinstance(answer, str) and named in answer, bad


def test_dtype_widget(run, nodes, models):
    loaded, _, _ = load(run, nodes, "tiny", dtype="bf16")
    assert loaded.model.dtype == next(loaded.model.parameters()).dtype == torch.bfloat16


def test_class_model_takes_a_number(run, nodes, models):
    _, clip, _ = load(run, nodes, "classes.safetensors")
    assert clip.encode_from_tokens_scheduled("3")[0][0].tolist() == [[[3.0]]]
    with pytest.raises(ValueError, match="0 to 9"):
        clip.encode_from_tokens_scheduled("10")


def test_missing_decoder_does_not_prevent_loading_and_explains_itself(run, nodes, models):
    loaded, _, vae = load(run, nodes, "classes.safetensors")
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


def test_the_grid_widget_helps_a_file_that_does_not_state_its_grid(run, nodes, models):
    with pytest.raises(ValueError, match=r"nogrid.*\bgrid\b"):
        load(run, nodes, "nogrid.safetensors")
    loaded, _, _ = load(run, nodes, "nogrid.safetensors", grid="16")
    assert loaded.model.grid == (16, 16)


@pytest.mark.parametrize("widget", [{"dtype": "fp8"}, {"grid": "17"}])
def test_values_outside_a_combo_are_refused(run, nodes, models, widget):
    with pytest.raises(ValueError, match=next(iter(widget))):
        load(run, nodes, "tiny", **widget)


@pytest.mark.parametrize("name", ["nothing.safetensors", "../../../etc/passwd"])
def test_files_outside_the_model_folders_are_not_found(run, nodes, models, name):
    with pytest.raises(FileNotFoundError, match="ar_models"):
        load(run, nodes, name)


def test_truncated_and_foreign_files_are_named(run, nodes, models):
    broken, foreign = models / "broken.safetensors", models / "foreign.safetensors"
    broken.write_bytes((models / "tiny/model.safetensors").read_bytes()[:1000])
    save_file({"conv.weight": torch.zeros(2)}, foreign)
    try:
        with pytest.raises(ValueError, match="broken.safetensors .*damaged"):
            load(run, nodes, "broken.safetensors")
        with pytest.raises(ValueError, match="foreign.safetensors.*family"):
            load(run, nodes, "foreign.safetensors")
    finally:
        broken.unlink(), foreign.unlink()


def test_fingerprint_changes_when_a_file_is_replaced(nodes, models):
    loader, weights = nodes["SpecARLoadCheckpoint"], models / "tiny/model.safetensors"
    inputs = {"model_name": "tiny", "dtype": "auto", "grid": "auto"}
    before = loader.fingerprint_inputs(**inputs)
    assert before == loader.fingerprint_inputs(**inputs)
    weights.touch()
    assert before != loader.fingerprint_inputs(**inputs)


def test_fingerprints_are_hashes_which_name_no_folder(nodes, models, drafters):
    """ComfyUI writes them into every image that it saves."""
    for node, widget, choice, file in (
        ("SpecARLoadCheckpoint", "model_name", "tiny", models / "tiny/model.safetensors"),
        ("SpecARLoadDrafter", "drafter_name", "eagle", drafters / "eagle/model.safetensors"),
        ("SpecARLoadImageDecoder", "decoder_name", "tiny/vq.safetensors", models / "tiny/vq.safetensors"),
    ):
        before = nodes[node].fingerprint_inputs(**{widget: choice})
        file.touch()
        after = nodes[node].fingerprint_inputs(**{widget: choice})
        assert before != after and re.fullmatch("[0-9a-f]+", before + after), node


def test_replacing_a_loaded_model_leaves_no_dead_ones_behind(run, nodes, models):
    for _ in range(2):
        loaded, _, _ = load(run, nodes, "tiny")
        mm.load_models_gpu([loaded.patcher])
    del loaded
    mm.cleanup_models_gc()
    assert not [m for m in mm.current_loaded_models if m.is_dead()]


def test_image_decoder_alone(run, nodes, models, tiny):
    (vae,) = run(nodes["SpecARLoadImageDecoder"], decoder_name="tiny/vq.safetensors").result
    latent = torch.randn(1, 8, 4, 4)
    assert torch.equal(vae.decode(latent), tiny[2].decode(latent))


def test_image_decoder_refuses_a_model(run, nodes, models):
    with pytest.raises(ValueError, match="classes.safetensors.*image decoder"):
        run(nodes["SpecARLoadImageDecoder"], decoder_name="classes.safetensors")


@pytest.mark.parametrize(("width", "height"), [(32, 32), (0, 0)])
def test_empty_latent_has_the_model_s_shape(run, nodes, tiny, width, height):
    (latent,) = run(nodes["SpecAREmptyLatent"], model=tiny[0], width=width, height=height, batch_size=3).result
    assert latent["samples"].shape == (3, 8, 4, 4)


@pytest.mark.parametrize(("width", "height"), [(64, 32), (36, 32), (512, 512)])
def test_empty_latent_names_the_legal_size(run, nodes, tiny, width, height):
    with pytest.raises(ValueError, match="32 x 32 pixels"):
        run(nodes["SpecAREmptyLatent"], model=tiny[0], width=width, height=height, batch_size=1)
