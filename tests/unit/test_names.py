"""Names: of wrappers around tensors, of sizes in names of files, of tensors that a model does not need."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.decoders import cosmos
from comfyui_specar.model_loaders.detect import load_drafter, load_image_decoder, load_model
from comfyui_specar.model_loaders.families import chameleon, llamagen
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError, open_checkpoint, weight_file
from comfyui_specar.model_loaders.files.names import meaning, unwrap_names
from comfyui_specar.model_loaders.text.t5 import _is_encoder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ..support import tiny, tiny_chameleon
from ..support.bad_files import refused
from ..support.tiny_family import declared
from ..support.tiny_folder import edited, write_folder

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "_forward_module.")
FAMILIES = declared("TINY")


@pytest.fixture(scope="module", params=FAMILIES)
def sound(request, tmp_path_factory):
    """A tiny model of every family: its folder."""
    return FAMILIES[request.param].write(tmp_path_factory.mktemp("sound"))


def copied(sound: Path, to: Path, change) -> Path:
    """A copy of a model of one file with other tensors."""
    source, target = weight_file(sound), to / sound.name
    shutil.copytree(source.parent, target)
    tensors, metadata = load_file(source), open_checkpoint(source).metadata
    save_file(change(tensors), target / source.name, metadata={"specar": json.dumps(metadata)} if metadata else None)
    return target / source.name if sound.is_file() else target


# Wrappers


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_stripped_from_files_of_every_kind(tmp_path, wrapper):
    plain = {"layers.0.weight": torch.ones(1), "norm.weight": torch.zeros(1)}
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in plain.items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    torch.save(wrapped, tmp_path / "wrapped.pt")
    shards = weight_file(write_folder(tmp_path / "folder", wrapped, {}, shards=2))
    for file in (tmp_path / "wrapped.safetensors", tmp_path / "wrapped.pt", shards):
        assert open_checkpoint(file).tensors.keys() == plain.keys()


def test_a_wrapped_model_is_the_model(sound, tmp_path):
    wanted = load_model(sound)
    found = load_model(copied(sound, tmp_path, lambda t: {f"module._orig_mod.{n}": x for n, x in t.items()}))
    assert found.family == wanted.family
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())


names = st.lists(st.sampled_from(["layers.0.a.weight", "module_b.c", "model.norm.bias", "x"]), min_size=1, unique=True)


@given(names, st.lists(st.sampled_from(WRAPPERS), max_size=4), st.booleans())
def test_only_what_is_around_all_names_is_stripped(plain, wrappers, averaged):
    around = "".join(wrappers)
    given = [f"{around}{name}" for name in plain]
    assert unwrap_names([*given, "n_averaged"] if averaged else given) == dict(zip(given, plain, strict=True))
    if wrappers and len(plain) > 1 and not around.startswith("_"):
        assert unwrap_names([*given, "other.weight"])["other.weight"] == "other.weight"


def test_wrappers_of_single_layers_are_stripped_and_no_name_is_lost():
    assert unwrap_names(["layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w.weight"]) == {
        "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w.weight": "layers.0.w.weight"
    }
    assert unwrap_names(["a._orig_mod.w", "a.w"]) == {"a._orig_mod.w": "a._orig_mod.w", "a.w": "a.w"}
    assert unwrap_names(["module.a", "b"]) == {"module.a": "module.a", "b": "b"} and unwrap_names([]) == {}


# Sizes in names


@given(st.sampled_from(["256", "512"]), st.text("0123456789", min_size=1, max_size=6), st.booleans())
def test_a_number_within_another_says_nothing(size, digits, after):
    assert meaning(f"step-{size}{digits}" if after else f"step-{digits}{size}", {"256": 1, "512": 2}) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("c2i_B_256", 256),
        ("0512000", None),
        ("20240512_c2i", None),
        ("my-512-lora-768", None),
        ("512-and-512", 512),
        ("Emu3.5-Image", "image"),
        ("emu3_5", "mixed"),
        ("Emu35", "mixed"),
        ("genshin-emu3", None),
        ("Emu3-Gen", "gen"),
        ("run-5-12", None),
        ("c2i_L_256px", 256),
        ("c2i-512x512-ema", 512),
        ("512x768", None),
        ("0512px", None),
        ("256x256-to-512x512", None),
        ("v256x256", None),
        ("", None),
    ],
)
def test_only_whole_words_and_numbers_count(name, found):
    table = {"256": 256, "512": 512, "768": 768, "emu35": "mixed", "emu35image": "image", "gen": "gen"}
    assert meaning(name, table) == found


@pytest.mark.parametrize("name", ["0512000.pt", "20240512_c2i.pt", "c2i_256_to_512.pt", "c2i_B_1256.pt"])
def test_names_that_show_no_one_size_ask_for_it(name):
    with pytest.raises(CheckpointError, match=r"grid.*32 for 512"):
        llamagen.own_grid(Checkpoint({}, {}, Path(name)))
    with pytest.raises(CheckpointError, match="size.*512, 768 or 1024"):
        chameleon.target_size(Path(f"my-512-lora-768-{name}/model.safetensors"), {}, None)


def test_names_of_decoders_and_encoders(tmp_path):
    for name in ("abcDI8x8", "Cosmos-1.0-Tokenizer-DV8x16x16", "mydv16x16x16"):
        cosmos._check_kind(tmp_path / name / "decoder.jit")
    with pytest.raises(CheckpointError, match="CI8x8"):
        cosmos._check_kind(tmp_path / "Cosmos-0.1-Tokenizer-CI8x8/decoder.jit")
    cosmos._check_kind(tmp_path / "CI8x8-and-others/cosmos_dv8x16x16_decoder.jit")
    for name, found in (("flan_t5_xl_fp16", True), ("FlanT5XL", True), ("flan-t5-xlarge", False)):
        (tmp_path / f"{name}.safetensors").touch()
        assert _is_encoder(tmp_path / f"{name}.safetensors") == found


# Tensors that a model does not need


HARMLESS = "v_head.summary.weight value_head.0.weight optimizer.step score.weight rotary_emb.inv_freq lm_loss.scale"


def test_harmless_tensors_are_ignored_by_every_family(sound, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        found = load_model(copied(sound, tmp_path, lambda t: t | {name: torch.ones(1) for name in HARMLESS.split()}))
    wanted = load_model(sound)
    assert found.family == wanted.family
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())
    assert "5 tensors that this model does not use" in caplog.text and "'lm_loss.scale'" in caplog.text


def test_tensors_within_the_layers_are_refused_by_every_family(sound, tmp_path):
    """Biases, norms and parameters of another architecture would compute something else."""
    stack = re.compile(r"^(model\.(language_model\.|text_model\.)?layers|layers|(mar\.)?encoder_blocks)\.0\.")
    first = next(found[0] for name in load_file(weight_file(sound)) if (found := stack.match(name)))
    cache = {f"{first}attention.kv_cache.{part}": torch.ones(1) for part in ("k_cache", "v_cache")}
    assert load_model(copied(sound, tmp_path / "cache", lambda t: t | cache))
    for extra in ("extra.bias", "sandwich_norm.weight", "layer_scale"):
        path = copied(sound, tmp_path / extra, lambda t, extra=extra: t | {f"{first}{extra}": torch.ones(1)})
        refused(path, "1 unknown", extra)


LAYER = "model.layers.0.self_attn"
PARTS = ["model.norm.bias", "lm_head.bias", f"{LAYER}.o_proj.bias", "model.embed_norm.weight", f"{LAYER}.sinks"]


@pytest.mark.parametrize("extra", PARTS)
def test_parts_of_a_language_model_that_change_its_result_are_refused(tmp_path, extra):
    sound = FAMILIES["lumina-mgpt"].write(tmp_path / "sound")
    refused(copied(sound, tmp_path, lambda t: t | {extra: torch.ones(1)}), extra.rpartition(".")[2])


def test_a_drafter_s_head_is_ignored_and_its_second_layer_is_not(tmp_path):
    target = load_model(tiny.write_llamagen(tmp_path / "t2i_256.safetensors", True), grid=(16, 16))
    weights = tiny.eagle_weights()
    with_head = weights | {"lm_head.weight": torch.ones(3, 64), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert load_drafter(tiny.write_eagle(tmp_path / "a", with_head), target)
    for extra in ("layers.1.input_layernorm.weight", "norm.weight", "layers.0.mlp.up_proj.bias"):
        with pytest.raises(CheckpointError, match="1 unknown"):
            load_drafter(tiny.write_eagle(tmp_path / extra, weights | {extra: torch.ones(64)}), target)


def test_statistics_of_a_training_are_ignored_by_a_decoder(tmp_path):
    extra = {"quantize.embed_avg": torch.ones(1), "quantize.cluster_size": torch.ones(1), "logvar": torch.ones(())}
    save_file(tiny.vq_weights() | extra, tmp_path / "vq.safetensors")
    assert load_image_decoder(tmp_path / "vq.safetensors").codes == tiny.VOCAB


# Identity


def test_an_anole_without_its_decoder_is_told_from_nothing_and_taken_at_its_word(tmp_path):
    def without_decoder(tensors):
        return {name: tensor for name, tensor in tensors.items() if ".vqmodel.decoder." not in name}

    path = copied(tiny_chameleon.write(tmp_path / "sound", kind="anole"), tmp_path, without_decoder)
    refused(path, "either Meta's Chameleon", "Anole", "mask_image_logits", "Anole-7b-v0.1-vqvae-hf")
    assert load_model(edited(path, mask_image_logits=False)).family == "anole"


@pytest.mark.parametrize("kind", ["lumina", "lumina2"])
def test_a_lumina_with_a_left_over_encoder_is_a_lumina(tmp_path, kind):
    sound = edited(tiny_chameleon.write(tmp_path / "sound", kind=kind), mask_image_logits=None)
    encoder = {f"model.vqmodel.{n}": t for n, t in tiny_chameleon.vqgan_weights().items() if n.startswith("encoder.")}
    assert load_model(copied(sound, tmp_path, lambda t: t | encoder)).family.startswith("lumina-mgpt")
