"""Files of other programs: refused with what they are and what to use instead, by every loader."""

import pytest
import torch
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.model_loaders.families.glm_image_diffusion import MODEL
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from safetensors.torch import save_file

from ..support import tiny, tiny_chameleon
from ..support.bad_files import refused

LAYER = "model.layers.0.self_attn.q_proj"
KINDS = {
    "PEFT adapter": ((f"base_model.model.{LAYER}.lora_A.weight",), ("adapter", "merge_and_unload")),
    "Kohya's LoRA": (("lora_unet_down_blocks_0.lora_down.weight",), ("adapter", "Merge")),
    "diffusers' LoRA": (("unet.mid.to_q_lora.up.weight",), ("adapter", "Merge")),
    "LyCORIS' full": (("lora_unet_x.diff", "lora_unet_x.diff_b"), ("adapter", "Merge")),
    "LoKr": (("lycoris_blocks_0.lokr_w1",), ("adapter", "Merge")),
    "unmerged PEFT": (
        (f"base_model.model.{LAYER}.base_layer.weight", f"base_model.model.{LAYER}.lora_A.default.weight"),
        ("not merged", "merge_and_unload"),
    ),
    "MLX": ((f"{LAYER}.weight", f"{LAYER}.scales", f"{LAYER}.biases"), ("MLX", "as they were released")),
    "FSDP": (("layers.0._fsdp_wrapped_module._flat_param",), ("FSDP", "FULL_STATE_DICT")),
    "HQQ": ((f"{LAYER}.W_q", f"{LAYER}.zero"), ("HQQ", "as they were released")),
    "SDNQ": ((f"{LAYER}.weight", f"{LAYER}.scale", f"{LAYER}.zero_point"), ("SDNQ", "as they were released")),
    "GPTQ alone": ((f"{LAYER}.qweight", f"{LAYER}.qzeros"), ("GPTQ", "config.json", "Download the whole folder")),
    "scales alone": ((f"{LAYER}.weight", f"{LAYER}.weight_scale"), ("quantised with scales", "plain fp8")),
}


@pytest.mark.parametrize("load", [open_checkpoint, load_model, load_image_decoder])
@pytest.mark.parametrize(("names", "words"), KINDS.values(), ids=KINDS)
def test_files_of_other_programs(tmp_path, names, words, load):
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "some.safetensors")
    refused(tmp_path / "some.safetensors", "some.safetensors", *words, loader=load)


def test_what_hqq_saves_as_a_pickle(tmp_path):
    torch.save({LAYER: {"W_q": torch.ones(2, 2), "meta": {"nbits": 4}}}, tmp_path / "qmodel.pt")
    refused(tmp_path / "qmodel.pt", "HQQ")


def test_a_folder_with_an_adapter_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").touch()
    refused(tmp_path, "adapter", "merge_and_unload")


def test_the_whole_release_of_glm_image_names_its_model(tmp_path):
    (tmp_path / "GLM-Image" / MODEL).mkdir(parents=True)
    refused(tmp_path / "GLM-Image", "GLM-Image", MODEL)


def test_a_folder_of_folders_names_those_with_weights(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part/model.safetensors").touch()
    refused(tmp_path, "no model.safetensors", "part")


def test_a_byte_order_mark_in_front_of_settings_is_read_over(tmp_path):
    folder = tiny_chameleon.write(tmp_path, kind="anole", shards=2)
    for file in (folder / "config.json", folder / "model.safetensors.index.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_model(folder).family == "anole"


# Image decoders in folders


@pytest.mark.parametrize("name", ["vq-ds16-t2i/model.pt", "vq-ds16-t2i/model.sft", "vq-ds16-t2i/pytorch_model.bin"])
def test_the_folder_that_the_search_takes_is_taken_by_the_loader(tmp_path, name):
    model = tiny.write_llamagen(tmp_path / "t2i_256.safetensors", True)
    file = tmp_path / "vae" / name
    file.parent.mkdir(parents=True)
    if file.suffix == ".sft":
        save_file(tiny.vq_weights(), file)
    else:
        torch.save(tiny.vq_weights(), file)
    assert find_image_decoder(model, "llamagen-t2i", [tmp_path / "vae"]) == file
    assert load_image_decoder(file.parent).name == file.name


def test_a_decoder_beside_a_model_in_a_folder_is_found_by_both(tmp_path):
    tiny.write_llamagen(tmp_path / "model.safetensors", True)
    torch.save(tiny.vq_weights(), tmp_path / "vq_ds16_t2i.pt")
    assert find_image_decoder(tmp_path, "llamagen-t2i").name == "vq_ds16_t2i.pt"
    assert load_image_decoder(tmp_path).name == "vq_ds16_t2i.pt"
