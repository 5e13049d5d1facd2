"""flan-t5-xl under ComfyUI's management: loaded for a prompt, whole, and away when memory is short."""

import comfy.model_management as mm
import folder_paths
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar.model_loaders.text.t5 import T5Encoder
from comfyui_specar.nodes.comfy_runtime.models import manage_text_encoder
from safetensors.torch import save_file

from ..support import tiny, tiny_t5


@pytest.fixture
def captioned(models, load, monkeypatch, tmp_path):
    """(AR_MODEL, CLIP) of a text model whose captions a T5 in models/text_encoders reads."""
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths,
        "text_encoders",
        ([str(tmp_path)], folder_paths.folder_names_and_paths["text_encoders"][1]),
    )
    save_file(tiny_t5.weights(tiny.CAPTION), tmp_path / "flan_t5_xl_encoder.safetensors")
    tiny_t5.write_words(tmp_path / "t5_tokenizer")
    name = "captioned.safetensors"
    tiny.write_llamagen(models / name, True)
    try:
        yield load(name)[:2]
    finally:
        (models / name).unlink()


def test_a_prompt_brings_the_encoder_and_another_model_may_take_its_place(captioned, loads):
    loaded, clip = captioned
    encoder = loaded.model.prompt_encoder
    assert isinstance(encoder, T5Encoder) and encoder._module is None, "read with the first prompt"
    features = clip.encode_from_tokens_scheduled("a red cat")[0][0]
    assert features.shape == (1, 4, tiny.CAPTION)
    assert torch.equal(features, clip.encode_from_tokens_scheduled("a red cat")[0][0])
    ((patcher,), how), again = loads
    assert ([patcher], how) == again and patcher.model is encoder.module(), "one patcher, kept"
    assert how == {"force_full_load": True}, "transformers' layers cannot be loaded in part"
    assert patcher in [m.model for m in mm.current_loaded_models]
    mm.free_memory(1e30, mm.get_torch_device())
    assert patcher not in [m.model for m in mm.current_loaded_models]
    assert torch.equal(features, clip.encode_from_tokens_scheduled("a red cat")[0][0]), "and comes back"


def test_it_is_no_part_of_the_model(captioned):
    loaded, clip = captioned
    before = loaded.patcher.model_size()
    clip.encode_from_tokens_scheduled("a cat")
    assert not any(name.startswith("prompt_encoder") for name, _ in loaded.model.named_parameters())
    assert ModelPatcher(loaded.model, loaded.model.device, loaded.model.device).model_size() == before


@pytest.mark.parametrize(("able", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_it_computes_in_bf16_where_the_device_does(captioned, monkeypatch, able, dtype):
    loaded, clip = captioned
    monkeypatch.setattr(mm, "should_use_bf16", lambda device: able)
    manage_text_encoder(loaded.model.prompt_encoder)
    features = clip.encode_from_tokens_scheduled("a cat")[0][0]
    assert features.dtype == torch.float32 and next(loaded.model.prompt_encoder.module().parameters()).dtype == dtype
