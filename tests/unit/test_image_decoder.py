"""VQ files, and models joined with them; conditioning that does not fit a model."""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.models.cache import BUCKET
from comfyui_specar.samplers.methods.jacobi import SJD
from safetensors.torch import save_file

from ..support.tiny import CLASSES, GRID, SLOTS, VQ, caption_features, vq_weights, write_llamagen


def test_image_decoder_is_found_and_joined(tmp_path):
    model_path = write_llamagen(tmp_path / "model.safetensors", False)
    model = load_model(model_path)
    assert model.codebook is None
    with pytest.raises(ValueError, match="(?i)no image decoder"):
        model.dequantize(torch.zeros(1, 4, 4, dtype=torch.int64))
    assert api.sample(model, model.encode_class(1), SJD(window=4)).latent is None
    save_file(vq_weights(), str(tmp_path / "vq.safetensors"))
    model, decoder = load_model(model_path), load_image_decoder(tmp_path)
    assert torch.equal(model.codebook, decoder.codebook) and decoder.factor == 2 == model.pixels_per_token
    out = api.sample(model, model.encode_class(1), SJD(window=4), batch_size=2)
    assert out.latent.shape == (2, 8, *GRID) and torch.allclose(out.latent.norm(dim=1), torch.ones(2, *GRID), atol=1e-5)
    pixels = decoder.decode(out.latent)
    assert pixels.shape == (2, 8, 8, 3) and pixels.min() >= 0 and pixels.max() <= 1
    assert torch.equal(pixels, decoder.decode_tokens(out.tokens))


def test_image_decoder_names(tmp_path):
    text, classes = tmp_path / "t2i_XL_stage1_256.pt", tmp_path / "c2i_B_256.pt"
    for file in (text, classes):
        file.touch()
    elsewhere = tmp_path / "vae"
    elsewhere.mkdir()
    assert find_image_decoder(classes, "llamagen-c2i", [elsewhere]) is None
    for name in ("vq_ds16_t2i.pt", "vq_ds16_c2i.pt"):
        (elsewhere / name).touch()
    assert find_image_decoder(text, "llamagen-t2i", [elsewhere]).name == "vq_ds16_t2i.pt"
    assert find_image_decoder(classes, "llamagen-c2i", [elsewhere]).name == "vq_ds16_c2i.pt"
    (tmp_path / "vq_ds16_c2i.safetensors").touch()
    assert find_image_decoder(classes, "llamagen-c2i", [elsewhere]) == tmp_path / "vq_ds16_c2i.safetensors"


@pytest.mark.parametrize(
    "container",
    [
        lambda w: w,
        lambda w: {"model": w},
        lambda w: {"model": w, "ema": w, "discriminator": {}, "steps": 1},
        lambda w: w | {"quantize.codebook_used": torch.zeros(65536)},
    ],
)
def test_vq_containers(tmp_path, container):
    torch.save(container(vq_weights()), tmp_path / "vq_ds16_c2i.pt")
    decoder = load_image_decoder(tmp_path / "vq_ds16_c2i.pt")
    assert decoder.module.config == VQ and decoder.name == "vq_ds16_c2i.pt"


def test_a_decoder_of_another_model_is_left_and_named(tmp_path, caplog):
    model_path = write_llamagen(tmp_path / "model.safetensors", False)
    weights = vq_weights() | {"quantize.embedding.weight": torch.randn(64, 8)}
    save_file(weights, str(tmp_path / "vq.safetensors"))
    model = load_model(model_path)
    assert model.codebook is None and model.image_decoder is None
    assert "vq.safetensors" in caplog.text and "32 codes" in caplog.text
    save_file(vq_weights(), str(tmp_path / "vq_ds16_c2i.safetensors"))
    assert load_model(model_path).codebook.shape[0] == 32, "the next one that fits"
    with pytest.raises(ValueError, match="64 codes.*32"):
        model.attach_codebook(load_image_decoder(tmp_path / "vq.safetensors").codebook, 16)


# Conditioning


def test_conditioning_of_another_kind_is_refused(tmp_path):
    text = load_model(write_llamagen(tmp_path / "t.safetensors", True))
    classes = load_model(write_llamagen(tmp_path / "c.safetensors", False))
    good = text.encode_features(caption_features())
    cases = [
        (classes.encode_class(1), "positive.*llamagen-c2i.*llamagen-t2i"),
        ([[torch.zeros(1, 77, 768), {}]], "CLIP"),
        (good + good, "2 prompts"),
        ([], "0 prompts"),
    ]
    for conditioning, words in cases:
        with pytest.raises(ValueError, match=words):
            api.sample(text, conditioning, SJD(window=4))
    with pytest.raises(ValueError, match="negative.*llamagen-c2i"):
        api.sample(text, good, SJD(window=4), negative=classes.encode_class(1))
    three = text.encode_features(caption_features().expand(3, -1, -1))
    with pytest.raises(ValueError, match="positive.*3 prompts.*2"):
        api.sample(text, three, SJD(window=4), batch_size=2)
    assert api.sample(text, three, SJD(window=4), batch_size=3).tokens.shape == (3, *GRID)


def test_masked_features_are_cropped(tmp_path):
    """Left-padded captions, as the official scripts make them, keep their valid slots only."""
    model = load_model(write_llamagen(tmp_path / "t.safetensors", True))
    padded = torch.nn.functional.pad(caption_features(), (0, 0, 5, 0))
    mask = torch.tensor([[False] * 5 + [True] * 7])
    wanted, found = model.encode_features(caption_features()), model.encode_features(padded, mask)
    assert torch.equal(wanted[0][0], found[0][0])
    assert found[0][1]["ar"] == {"family": "llamagen-t2i", "text": None}


def test_class_numbers_outside_the_table(tmp_path):
    model = load_model(write_llamagen(tmp_path / "c.safetensors", False))
    for wrong in (CLASSES, -1):
        with pytest.raises(ValueError, match="0 to 9"):
            model.encode_class(wrong)


def test_kv_bytes_is_what_the_caches_take(tmp_path):
    for text, slots in ((True, SLOTS), (False, 1)):
        model = load_model(write_llamagen(tmp_path / "m.safetensors", text))
        prompt = model.encode_features(torch.zeros(1, SLOTS, 24)) if text else model.encode_class(0)
        state = model.start(prompt, None, 3, model.layout(), slack=5, guided=True)
        taken = state.cache.keys.nbytes + state.cache.values.nbytes
        assert taken == model.kv_bytes(3, model.layout(), slack=5, guided=True)
        assert slots + 16 + 5 <= state.cache.capacity < slots + 16 + 5 + 2 * BUCKET


def test_a_margin_repeats_the_border_and_is_cut_off(tmp_path):
    save_file(vq_weights(), str(tmp_path / "vq.safetensors"), metadata={"specar": '{"margin": 1}'})
    decoder = load_image_decoder(tmp_path)
    latent = decoder.dequantize(torch.arange(12).view(1, 3, 4))
    wider = torch.nn.functional.pad(latent, (1, 1, 1, 1), mode="replicate")
    with torch.inference_mode():
        expected = decoder.module.decode(wider)[..., 2:-2, 2:-2]
    pixels = decoder.decode(latent)
    assert pixels.shape == (1, 6, 8, 3)
    assert torch.equal(pixels, (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))


@pytest.mark.parametrize("legal, illegal", [(0, -1), (64, 65)])
def test_the_margin_has_both_limits(tmp_path, legal, illegal):
    for margin in (legal, illegal):
        save_file(vq_weights(), str(tmp_path / f"{margin}.safetensors"), metadata={"specar": f'{{"margin": {margin}}}'})
    assert load_image_decoder(tmp_path / f"{legal}.safetensors").margin == legal
    with pytest.raises(ValueError, match=rf"margin is {illegal}.* 0 to 64"):
        load_image_decoder(tmp_path / f"{illegal}.safetensors")
