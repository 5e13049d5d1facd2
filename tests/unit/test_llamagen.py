"""LlamaGen: models joined with their image decoder, conditioning that does not fit, memory."""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_image_decoder, load_model
from comfyui_specar.models.networks.cache import BUCKET
from comfyui_specar.samplers.methods.jacobi import SJD
from safetensors.torch import save_file

from ..support.tiny import CLASSES, GRID, SLOTS, caption_features, llamagen, vq_weights, write_llamagen


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return llamagen(tmp_path_factory.mktemp("text"), True)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return llamagen(tmp_path_factory.mktemp("classes"), False)


def test_an_image_decoder_is_found_and_joined(tmp_path, caplog):
    path = write_llamagen(tmp_path / "model.safetensors", False)
    model = load_model(path)
    assert model.codebook is None
    with pytest.raises(ValueError, match="(?i)no image decoder"):
        model.dequantize(torch.zeros(1, 4, 4, dtype=torch.int64))
    assert api.sample(model, model.encode_prompt("1"), SJD(window=4)).latent is None
    save_file(vq_weights() | {"quantize.embedding.weight": torch.randn(64, 8)}, str(tmp_path / "vq.safetensors"))
    model = load_model(path)
    assert model.codebook is None and model.image_decoder is None
    assert "vq.safetensors" in caplog.text and "32 codes" in caplog.text
    with pytest.raises(ValueError, match="64 codes.*32"):
        model.attach_codebook(load_image_decoder(tmp_path / "vq.safetensors").codebook, 16)
    save_file(vq_weights(), str(tmp_path / "vq_ds16_c2i.safetensors"))  # the next one, which fits
    model, decoder = load_model(path), load_image_decoder(tmp_path / "vq_ds16_c2i.safetensors")
    assert torch.equal(model.codebook, decoder.codebook) and decoder.factor == 2 == model.pixels_per_token
    out = api.sample(model, model.encode_prompt("1"), SJD(window=4), batch_size=2)
    assert out.latent.shape == (2, 8, *GRID) and torch.allclose(out.latent.norm(dim=1), torch.ones(2, *GRID), atol=1e-5)
    assert torch.equal(decoder.decode(out.latent), decoder.decode(decoder.dequantize(out.tokens)))


def test_conditioning_of_another_kind_is_refused(text, classes):
    good = text.encode_features(caption_features())
    for conditioning, words in (
        (classes.encode_prompt("1"), "positive.*llamagen-c2i.*llamagen-t2i"),
        ([[torch.zeros(1, 77, 768), {}]], "CLIP"),
        (good + good, "2 prompts"),
        ([], "0 prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            api.sample(text, conditioning, SJD(window=4))
    with pytest.raises(ValueError, match="negative.*llamagen-c2i"):
        api.sample(text, good, SJD(window=4), negative=classes.encode_prompt("1"))
    three = text.encode_features(caption_features().expand(3, -1, -1))
    with pytest.raises(ValueError, match="positive.*3 prompts.*2"):
        api.sample(text, three, SJD(window=4), batch_size=2)
    assert api.sample(text, three, SJD(window=4), batch_size=3).tokens.shape == (3, *GRID)
    for wrong in (CLASSES, -1):
        with pytest.raises(ValueError, match="0 to 9"):
            classes.encode_prompt(str(wrong))


def test_kv_bytes_is_what_the_caches_take(text, classes):
    captions = text.encode_features(torch.zeros(1, SLOTS, 24))
    for model, prompt, slots in ((text, captions, SLOTS), (classes, classes.encode_prompt("0"), 1)):
        state = model.start(prompt, None, 3, model.layout(), slack=5, guided=True)
        taken = state.cache.keys.nbytes + state.cache.values.nbytes
        assert taken == model.kv_bytes(3, model.layout(), slack=5, guided=True)
        assert slots + 16 + 5 <= state.cache.capacity < slots + 16 + 5 + 3 * BUCKET
