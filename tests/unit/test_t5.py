"""flan-t5-xl as LlamaGen reads captions through it, as small as transformers makes it."""

from functools import partial
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.text import t5
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from ..support.bad_files import refused
from ..support.closeness import assert_as_exact, fp64
from ..support.tiny import CAPTION, write_llamagen
from ..support.tiny_folder import write_folder
from ..support.tiny_t5 import WORDS, weights, write_words

SIZES = {"vocab_size": len(WORDS), "d_model": CAPTION, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def reference():
    """What the encoder of transformers computes in fp64, with random weights that make a difference."""
    from transformers import T5Config, T5EncoderModel

    own = weights(CAPTION)
    with fp64():
        model = T5EncoderModel(T5Config(**SIZES, feed_forward_proj="gated-gelu")).eval()
        model.load_state_dict(own | {"encoder.embed_tokens.weight": own["shared.weight"]})
    return fp64()(lambda ids: model(ids).last_hidden_state.detach())


@pytest.fixture
def folder(tmp_path):
    """models/text_encoders/flan-t5-xl in two shards, with a decoder that nobody needs."""
    tensors = weights(CAPTION)
    tensors |= {"decoder.final_layer_norm.weight": torch.ones(CAPTION), "lm_head.weight": torch.zeros(6, CAPTION)}
    write_folder(tmp_path / "text_encoders/flan-t5-xl", tensors, {"model_type": "t5"}, shards=2)
    write_words(tmp_path / "text_encoders/flan-t5-xl")
    return tmp_path / "text_encoders/flan-t5-xl"


def model_of(folder):
    return load_model(write_llamagen(folder.parent.parent / "model.safetensors", True), search_folders=[folder.parent])


def test_features_are_those_of_transformers(folder, reference):
    model, ids = model_of(folder), torch.tensor([[3, 4, 5, 1]])
    [[features, _]] = model.encode_prompt("  A red CAT ")
    assert features.shape == (1, 4, CAPTION), "three words and the end token, no padding"
    assert_as_exact(lambda: model.encode_prompt("  A red CAT ")[0][0], reference(ids))


def test_positions_far_apart_are_those_of_transformers(folder, reference):
    ids = torch.randint(6, (1, 200), generator=torch.Generator().manual_seed(1))
    encoder = t5.load_t5(folder, CAPTION, torch.float32)
    assert_as_exact(lambda: encoder(ids), reference(ids))


def test_captions_are_cleaned(folder):
    encoder = model_of(folder).prompt_encoder
    assert encoder.ids("<b>red</b> cat https://a.com/b") == [4, 5, 1]
    assert encoder.ids("a red cat " * 50) == ([3, 4, 5] * 40)[: encoder.slots - 1] + [1]
    assert encoder.ids("") == [1]


@pytest.mark.parametrize("root", ["", "text_encoders.t5xl.transformer."])
def test_a_file_of_the_encoder_alone(tmp_path, reference, root):
    (tmp_path / "text_encoders/t5").mkdir(parents=True)
    file = tmp_path / "text_encoders/t5/flan_t5_xl_encoder_fp16.safetensors"
    save_file({root + name: tensor.half() for name, tensor in weights(CAPTION).items()}, str(file))
    write_words(tmp_path / "text_encoders/t5_tokenizer")  # ComfyUI's own
    model = load_model(write_llamagen(tmp_path / "m.safetensors", True), search_folders=[tmp_path / "text_encoders"])
    assert model.prompt_encoder.weights == file
    [[features, _]] = model.encode_prompt("a red cat")
    expected = reference(torch.tensor([[3, 4, 5, 1]])).float()
    torch.testing.assert_close(features, expected, atol=0.05, rtol=0.05)


def test_the_larger_t5_is_left_alone(tmp_path):
    (tmp_path / "flan-t5-xxl.safetensors").touch(), (tmp_path / "t5xxl_fp16.safetensors").touch()
    assert t5.find_t5(tmp_path / "model.safetensors", 5, CAPTION, [tmp_path]) is None


def test_weights_are_read_with_the_first_prompt_and_put_in_place(folder):
    encoder = model_of(folder).prompt_encoder
    assert encoder._module is None
    placed = []
    encoder.place = placed.append
    encoder.encode("a cat"), encoder.encode("red")
    assert len(placed) == 2 and placed[0] is placed[1] is encoder.module()


def test_damaged_and_foreign_files_are_named(folder):
    load = partial(t5.load_t5, width=CAPTION, dtype=torch.float32)
    encoder = model_of(folder).prompt_encoder
    refused(folder, " 24 ", "per token", "2048", loader=load, width=2048)
    encoder.tokenizer.file.write_bytes(b"broken")
    refused("a cat", "tokenizer.json", loader=encoder.encode)
    shard = folder / "model-00001-of-00002.safetensors"
    whole = load_file(str(shard))
    save_file({name: tensor for name, tensor in whole.items() if "relative" not in name}, str(shard))
    refused(folder, "tensors are not in the shards", loader=load)
    save_file({"conv.weight": torch.zeros(1)}, str(folder / "model.safetensors"))
    refused(folder, "model.safetensors", "T5", loader=load)
    shard.unlink(), (folder / "model.safetensors").unlink()
    refused(folder, "flan-t5-xl", "shards", loader=load)


def test_a_tokenizer_that_is_missing_or_of_another_model(folder):
    encoder = model_of(folder).prompt_encoder
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 7}, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    refused("a cat", "tokenizer", "flan-t5-xl", loader=encoder.encode)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json.*google/flan-t5-xl"):
        model_of(folder).encode_prompt("a cat")


def test_released_names_and_sizes_fit():
    """Every tensor of flan-t5-xl's encoder has its place, and each of ours is filled."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"vocab_size": 32128, "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32}
    with torch.device("meta"):
        released = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).state_dict()
        named = t5.encoder_tensors(t5.Checkpoint(released))
        own = t5.build(named, 2048, Path("flan-t5-xl")).state_dict()
    shapes = {name: tensor.shape for name, tensor in own.items() if "embed_tokens" not in name}
    assert {name: tensor.shape for name, tensor in named.items()} == shapes
