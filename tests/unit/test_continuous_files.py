"""Files of MAR and of its KL autoencoder: every released size, every container, every way to be wrong."""

import json
from dataclasses import replace

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import mar
from comfyui_specar.samplers.continuous_contract import ContinuousParams
from safetensors.torch import load_file, save_file

from ..support.bad_files import refused
from ..support.models import condition_vectors
from ..support.tiny import fill, write_words
from ..support.tiny_mar import MAR, mar_weights, write_mar


def vectors(model):
    """Condition vectors of an image half of which is known."""
    if model.backbone.config.captions:
        prompt = model.encode_features(fill("caption embedding", (1, 2, MAR.conditions)))
    else:
        prompt = model.encode_prompt("3")
    known = torch.arange(16)[None] % 2 == 0
    return condition_vectors(model, prompt, fill("tokens embedding", (1, 16, 16)), known)


def test_released_models_know_imagenet(tmp_path):
    path = write_mar(tmp_path / "model.safetensors", replace(MAR, conditions=1000))
    model = load_model(path)
    assert model.encode_prompt("979")[0][0].tolist() == [[[979.0]]]
    with pytest.raises(ValueError, match="classes.*prompts"):
        model.encode_prompt("1000")


def test_class_names(tmp_path, monkeypatch):
    monkeypatch.setattr(mar, "class_names", lambda count: [f"thing {i}, object {i}" for i in range(count)])
    model = load_model(write_mar(tmp_path / "model.safetensors"))
    assert model.encode_prompt("Object 7")[0][0].tolist() == [[[7.0]]]


# Models of our own


CAPTIONS = replace(MAR, captions=True, rows=2, cols=8)


def test_metadata_describes_models_of_our_own(tmp_path):
    write_words(tmp_path, MAR.conditions)
    table = load_file(tmp_path / "text_encoder.safetensors")["word_embeddings.weight"]
    path = write_mar(
        tmp_path / "model.safetensors",
        CAPTIONS,
        scale=0.5,
        pixels_per_token=8,
        caption_slots=2,
        head_steps=25,
        defaults={"cfg": 2.0, "cfg_schedule": "constant", "temperature": 0.9, "kind": "ddim"},
    )
    model = load_model(path)
    assert model.grid == (2, 8) and model.pixels_per_token == 8
    assert model.defaults == ContinuousParams(2.0, "constant", 0.9, 25, "ddim")
    assert model.schedule(model.defaults).steps == model.head.schedule.steps == 25
    assert torch.equal(model.encode_prompt("a cat, red, on a blue background")[0][0], table[[1, 0]][None])
    latent = fill("latent embedding", (1, 16, 2, 8))
    assert torch.equal(model.from_latent(latent)[0, 11], latent[0, :, 1, 3] * 0.5)
    assert torch.allclose(model.to_latent(model.from_latent(latent), (2, 8)), latent)
    assert vectors(model).shape == (1, 16, MAR.dim)


def test_the_pixels_of_a_token_have_both_limits(tmp_path):
    for pixels in (1, 1024):
        assert load_model(write_mar(tmp_path / "a.safetensors", pixels_per_token=pixels)).pixels_per_token == pixels
    for pixels in (0, 1025):
        with pytest.raises(ValueError, match=rf"pixels_per_token is {pixels}.* 1 to 1024"):
            load_model(write_mar(tmp_path / "b.safetensors", pixels_per_token=pixels))


def test_the_steps_of_the_default_settings_are_the_heads_own(tmp_path):
    model = load_model(write_mar(tmp_path / "model.safetensors", head_steps=25, defaults={"steps": 10}))
    assert model.defaults.steps == 10 and model.defaults.cfg == 3.0


def test_half_precision_is_not_for_the_head(tmp_path):
    """Its first step multiplies errors of the network by over 300."""
    path = write_mar(tmp_path / "model.safetensors")
    half, full = load_model(path, dtype=torch.bfloat16), load_model(path)
    assert half.dtype == torch.bfloat16 and {p.dtype for p in half.backbone.parameters()} == {torch.bfloat16}
    assert half.head.dtype == torch.float32 and {p.dtype for p in half.head.parameters()} == {torch.float32}
    assert torch.allclose(vectors(half).float(), vectors(full), atol=0.2)
    z, noise = fill("z embedding", (3, MAR.dim)), fill("noise embedding", (3, 16))
    assert torch.equal(half.head.mean_log_variance(noise, 99, z)[0], full.head.mean_log_variance(noise, 99, z)[0])


# Files that cannot be used


def test_other_diffusion_heads(tmp_path):
    path, weights = tmp_path / "model.safetensors", mar_weights()
    header = {"specar": json.dumps({"heads": MAR.heads})}
    final, first = "diffloss.net.final_layer.linear", "diffloss.net.input_proj.weight"
    fixed_variance = {f"{final}.weight": torch.zeros(16, 24), f"{final}.bias": torch.zeros(16)}
    save_file(weights | fixed_variance, str(path), metadata=header)
    refused(path, path.name, "predicts 16", "32")
    save_file(weights | {first: torch.zeros(24, 8)}, str(path), metadata=header)
    refused(path, path.name, "8", "16")


def test_unknown_sizes_and_grids(tmp_path):
    save_file(mar_weights(), str(tmp_path / "mine.safetensors"))
    refused(tmp_path / "mine.safetensors", "mine.safetensors", "width 32", "released", "metadata")
    path = write_mar(tmp_path / "model.safetensors", heads=5)
    refused(path, path.name, "5")
    path = write_mar(tmp_path / "model.safetensors")
    refused(path, path.name, "16 tokens", "8 x 4", grid=(4, 8))
    refused(path, "between 1 and 1024", grid=(-4, -4), error=ValueError)
    assert load_model(path, grid=(2, 8)).grid == (2, 8)
    save_file(mar_weights(replace(MAR, rows=2, cols=3)), str(path), metadata={"specar": json.dumps({"heads": 4})})
    refused(path, path.name, "6 tokens", "square")
    assert load_model(path, grid=(2, 3)).grid == (2, 3)


@pytest.mark.parametrize(
    ("defaults", "word"),
    [
        ({"cfg": 0.5}, "cfg"),
        ({"cfg_schedule": "cubic"}, "cubic"),
        ({"guidance": 2.0}, "guidance"),
        ({"steps": 1}, "2 to 1000"),
        ({"kind": "euler"}, "ddim"),
    ],
)
def test_wrong_default_settings(tmp_path, defaults, word):
    path = write_mar(tmp_path / "model.safetensors", defaults=defaults)
    refused(path, path.name, "default", word)


def test_text_encoders(tmp_path):
    path = write_mar(tmp_path / "model.safetensors", CAPTIONS)
    with pytest.raises(FileNotFoundError, match=r"text_encoder\.safetensors.*beside"):
        load_model(path).encode_prompt("an apple")
    write_words(tmp_path, 7)
    refused(path, "text_encoder.safetensors", " 7,", " 10")
