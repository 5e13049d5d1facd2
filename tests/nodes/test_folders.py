"""What the loaders list, and what they make of a choice."""

import os

import folder_paths
import pytest
import torch
from comfy.cli_args import args
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, title, use_mmap
from comfyui_specar.nodes.comfy_runtime import elsewhere, folders
from comfyui_specar.nodes.comfy_runtime.models import open_model
from safetensors.torch import save_file

from ..support import tiny_janus, tiny_simplear
from ..support.mapped_files import maps
from ..support.tiny import llamagen_weights, vq_weights

SHARDS = "config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors"


@pytest.fixture
def put(tmp_path, monkeypatch):
    """put("vae", "folder/name other", ...) writes empty files into model folders of the test's own."""
    for key in ("ar_models", "ar_drafters", "vae", "text_encoders", "checkpoints"):
        (tmp_path / key).mkdir()
        extensions = folder_paths.folder_names_and_paths[key][1]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, key, ([str(tmp_path / key)], extensions))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    monkeypatch.setattr(elsewhere, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(key, *names):
        for name in " ".join(names).split():
            (tmp_path / key / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key / name).touch()
        return tmp_path / key

    return put


def own(choices):
    return [choice for choice in choices if "(bundled)" not in choice]


FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("files", "main"),
    [
        ("config.json model.safetensors tokenizer.json", "model.safetensors"),
        (f"{SHARDS} model.safetensors.index.json", FIRST),
        ("config.json pytorch_model.bin", "pytorch_model.bin"),
        (SHARDS, FIRST),
        (f"{SHARDS} pytorch_model-00001-of-00003.bin pytorch_model.bin.index.json", "pytorch_model-00001-of-00003.bin"),
    ],
)
def test_a_hugging_face_folder_is_one_choice(put, files, main):
    """Under the name of its first weight file, which ComfyUI's page looks for; the folder's own name means the same."""
    root = put("ar_models", *(f"maker/Model/{name}" for name in files.split()), "single.pt sub/other.sft notes.txt")
    assert own(folders.model_choices()) == [f"maker/Model/{main}", "single.pt", "sub/other.sft"]
    assert folders.resolve(f"maker/Model/{main}", folders.MODELS) == root / "maker/Model"
    assert folders.resolve("maker/Model", folders.MODELS) == root / "maker/Model"
    assert own(folders.drafter_choices()) == []
    put("ar_drafters", *(f"eagle/{name}" for name in files.split()))
    assert own(folders.drafter_choices()) == [f"eagle/{main}"]


def test_a_template_s_file_means_the_release_that_lies_in_its_folder(put):
    """DeepSeek's own Janus-Pro has other file names."""
    root = put("ar_models", "Janus-Pro-1B/pytorch_model.bin other/mine.safetensors")
    assert folders.resolve("Janus-Pro-1B/model.safetensors", folders.MODELS) == root / "Janus-Pro-1B"
    for name in ("Janus-Pro-1B/other.safetensors", "other/model.safetensors", "Janus-Pro-7B/model.safetensors"):
        with pytest.raises(FileNotFoundError):
            folders.resolve(name, folders.MODELS)


def test_a_folder_whose_download_has_only_begun_is_no_choice(put):
    put("ar_models", "Model/config.json Model/model.safetensors.index.json")
    assert own(folders.model_choices()) == []


def test_a_file_in_the_root_or_of_another_kind_stands_for_itself(put, tmp_path, monkeypatch):
    """A folder that is one model in models/ar_models is none in models/loras."""
    root = put("ar_models", "model.safetensors config.json")
    assert folders.resolve("model.safetensors", folders.MODELS) == root / "model.safetensors"
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(tmp_path / "loras")], {".safetensors"}))
    (tmp_path / "loras/mine").mkdir(parents=True)
    (tmp_path / "loras/mine/model.safetensors").touch()
    assert folders.lora_choices() == ["mine/model.safetensors"]
    assert folders.resolve("mine/model.safetensors", "loras") == tmp_path / "loras/mine/model.safetensors"


@pytest.mark.parametrize("known_by", ["its default", "extra_model_paths.yaml"])
def test_models_in_the_folders_of_other_packs_are_listed(put, monkeypatch, known_by):
    put("models/Janus-Pro", "Janus-Pro-1B/config.json Janus-Pro-1B/pytorch_model.bin")
    put("models/emu35", *(f"Emu3.5-Image-NF4/{name}" for name in SHARDS.split()))
    root = put("models/lumina_mgpt", "Lumina-mGPT-7B-768/model.safetensors")
    put("models/other", "no.safetensors")
    default = known_by == "its default"
    monkeypatch.setattr(folder_paths, "models_dir", str(root.parent if default else root / "nothing"))
    if not default:
        for name in elsewhere.OTHER_PACKS:
            places = ([str(root.parent / name)], set())
            monkeypatch.setitem(folder_paths.folder_names_and_paths, name, places)
    folders.register_folders()
    assert own(folders.model_choices()) == [
        "Emu3.5-Image-NF4/model-00001-of-00002.safetensors",
        "Janus-Pro-1B/pytorch_model.bin",
        "Lumina-mGPT-7B-768/model.safetensors",
    ]
    for choice in ("Lumina-mGPT-7B-768", "Lumina-mGPT-7B-768/model.safetensors"):
        assert folders.resolve(choice, folders.MODELS) == root / "Lumina-mGPT-7B-768"
    first = folder_paths.get_folder_paths(folders.MODELS)[0]
    assert first == str(root.parents[1] / "ar_models"), "new files go into the pack's own"


@pytest.mark.parametrize("root", ["checkpoints/{name}", "hub/models--zai-org--{name}/snapshots/0a1b"])
def test_of_shared_folders_released_models_are_listed(put, root):
    """Of models/checkpoints and the cache of huggingface_hub, not what is not ours."""
    for name, part in (("GLM-Image", "vision_language_encoder/"), ("Llama", ""), ("Janus-Pro-7B", "")):
        files = f"{SHARDS} model.safetensors.index.json tokenizer/model.safetensors".split()
        put(root.format(name=name), *(f"{part}{file}" for file in files))
        (put(f"hub/models--zai-org--{name}/refs", "main") / "main").write_text("0a1b\n", encoding="utf-8")
    shard = "model-00001-of-00002.safetensors"
    expected = {f"GLM-Image/vision_language_encoder/{shard}", f"Janus-Pro-7B/{shard}"}
    assert {*own(folders.model_choices())} == expected
    assert own(folders.drafter_choices()) == []
    for choice in (*expected, "Janus-Pro-7B"):
        assert os.path.exists(folders.resolve(choice, folders.MODELS) / "model.safetensors.index.json")
    with pytest.raises(FileNotFoundError):
        folders.resolve("Llama", folders.MODELS)


def test_a_model_in_the_cache_of_huggingface_hub_loads_under_its_name(put):
    home = put("hub/models--deepseek-ai--Janus-Pro-1B/snapshots/0a1b")
    home.mkdir(parents=True)
    tiny_janus.write(home)
    (put("hub/models--deepseek-ai--Janus-Pro-1B/refs", "main") / "main").write_text("0a1b\n", encoding="utf-8")
    [choice] = own(folders.model_choices())
    assert choice == "Janus-Pro-1B/model.safetensors"
    assert title(folders.resolve(choice, folders.MODELS) / "model.safetensors") == "Janus-Pro-1B"


def test_a_decoder_inside_a_model_s_folder_is_no_model(put):
    inside = "config.json model.safetensors vqgan.ckpt tokenizer/vqgan.ckpt vq/model.safetensors"
    root = put("ar_models", *(f"Model/{name}" for name in inside.split()), f"Model/{FIRST}")
    save_file(vq_weights(), root / "Model/vq/model.safetensors")
    mains = ["Model/model.safetensors", "Model/vq/model.safetensors"]
    assert own(folders.model_choices()) == mains
    assert own(folders.decoder_choices()) == [*mains, "Model/tokenizer/vqgan.ckpt", "Model/vqgan.ckpt"]


def test_only_image_decoders_are_listed_as_such(put):
    """By the names of their tensors; a damaged file is listed under its released name, so that loading it says why."""
    models, vae = put("ar_models", "kl16.ckpt"), put("vae", "vq_ds16_c2i.pt", "damaged.safetensors")
    (models / "training").mkdir(), (models / "text").mkdir()
    module = torch.nn.Linear(2, 2)
    torch.save(torch.optim.AdamW(module.parameters()).state_dict(), models / "training/optimizer.pt")
    torch.save({"lr": 1}, models / "training/scheduler.pt")
    save_file(llamagen_weights(True), models / "text/model.safetensors")
    save_file(llamagen_weights(False), models / "c2i_B_256.safetensors")
    torch.save(vq_weights(), models / "training/mine.pth")
    torch.save({"ema": vq_weights()}, vae / "other.pt")
    assert own(folders.decoder_choices()) == "kl16.ckpt other.pt training/mine.pth vq_ds16_c2i.pt".split()
    torch.save({"model": llamagen_weights(False)}, vae / "other.pt")
    torch.save({"model": vq_weights()}, models / "text/vq_ds16_t2i.pt")
    found = "text/model.safetensors kl16.ckpt text/vq_ds16_t2i.pt training/mine.pth vq_ds16_c2i.pt"
    assert own(folders.decoder_choices()) == found.split()


def test_a_name_of_another_system_is_answered_with_this_one_s(put):
    put("ar_models", "maker/Model/model.safetensors")
    with pytest.raises(FileNotFoundError, match="backslash.*write /" if folders.os.sep == "/" else "Model"):
        folders.resolve("maker\\Model2", folders.MODELS)
    for name in ("a" * 5000, "ü" * 200, "a\0b"):  # which no file can have
        with pytest.raises(FileNotFoundError):
            folders.resolve(name, folders.MODELS)
        with pytest.raises((FileNotFoundError, ValueError)):
            folders.trace_path(name)


def test_decoders_may_be_torchscript_and_folders(put):
    put("vae", "Cosmos/decoder.jit Cosmos/encoder.jit cosmos_decoder.jit kl16.ckpt")
    put("vae", "Emu3-VisionTokenizer/config.json Emu3-VisionTokenizer/model.safetensors")
    found = "Cosmos/decoder.jit Emu3-VisionTokenizer/model.safetensors Cosmos/encoder.jit cosmos_decoder.jit kl16.ckpt"
    assert own(folders.decoder_choices()) == found.split()
    assert "cosmos_decoder.jit" not in own(folders.model_choices())


def test_a_folder_without_its_index_says_so(put):
    put("ar_models", *(f"Half/{name}" for name in SHARDS.split()))
    with pytest.raises(CheckpointError, match="Half.*model.safetensors.index.json"):
        open_model("Half", "auto", None)


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("ar_models", "Model/tokenizer.json"),
        ("ar_models", "Model/Cosmos-1.0-Tokenizer-DV8x16x16/decoder.jit"),
        ("vae", "Emu3-VisionTokenizer/model.safetensors"),
        ("vae", "somewhere/encoder.jit"),
        ("ar_models", "single/tokenizer.json"),
        ("text_encoders", "flan-t5-xl/model.safetensors"),
    ],
)
def test_fingerprints_follow_whatever_a_model_may_use(put, nodes, key, file):
    put("ar_models", "Model/config.json Model/model.safetensors")
    prints = nodes["SpecARLoadCheckpoint"].fingerprint_inputs
    before = prints(model_name="Model")
    assert prints(model_name="Model") == before
    root = put(key, file)
    there = prints(model_name="Model")
    (root / file).write_bytes(b"replaced")
    replaced = prints(model_name="Model")
    assert len({before, there, replaced}) == 3
    put(key, "notes.md"), put("vae", "sdxl_vae_of_somebody.safetensors")
    assert prints(model_name="Model") == replaced


def test_a_folder_that_is_deleted_does_no_harm(put, nodes):
    put("ar_models", "single.safetensors")
    root = put("vae", "sub/kl16.ckpt")
    prints = nodes["SpecARLoadCheckpoint"].fingerprint_inputs
    before = prints(model_name="single.safetensors")
    assert "sub/kl16.ckpt" in folders.decoder_choices()
    (root / "sub/kl16.ckpt").unlink(), (root / "sub").rmdir()
    after = prints(model_name="single.safetensors")
    assert before != after == prints(model_name="single.safetensors")
    assert "sub/kl16.ckpt" not in folders.decoder_choices()


def test_models_in_folders_and_shards_load_with_what_lies_beside_them(put, run_node, load):
    tiny_janus.write(put("ar_models") / "Janus-Pro-tiny", shards=2)
    tiny_simplear.write(put("ar_models") / "nested/SimpleAR-tiny", decoder=False)
    tiny_simplear.write_cosmos(put("vae") / tiny_simplear.DECODER)
    choices = {
        "Janus-Pro-tiny/model-00001-of-00002.safetensors": "janus-pro",
        "nested/SimpleAR-tiny/model.safetensors": "simplear",
    }
    assert {*choices} <= {*folders.model_choices()}
    folders_named = {os.path.dirname(name): family for name, family in choices.items()}  # as workflows of before do
    for name, family in (choices | folders_named).items():
        loaded, clip, vae = load(name)
        assert loaded.model.family == family and loaded.decoder is not None
        (latent,) = run_node("EmptyLatent", model=loaded, width=0, height=0).result
        rows, cols = loaded.model.grid
        assert latent["samples"].shape == (1, vae.latent_channels, rows, cols)
        assert vae.decode(latent["samples"]).shape == (1, rows * vae.downscale_ratio, cols * vae.downscale_ratio, 3)
        assert clip.encode_from_tokens_scheduled("a cat")[0][0].shape[-1] == 1
    (vae,) = run_node("LoadImageDecoder", decoder_name=tiny_simplear.DECODER).result
    assert vae.encode(torch.rand(1, 32, 32, 3)).shape[:2] == (1, vae.latent_channels)


def test_a_decoder_that_arrives_later_is_found_by_the_next_run(put, nodes, load):
    tiny_simplear.write(put("ar_models") / "SimpleAR-tiny", decoder=False)
    prints = nodes["SpecARLoadCheckpoint"].fingerprint_inputs
    before, (_, _, vae) = prints(model_name="SimpleAR-tiny"), load("SimpleAR-tiny")
    with pytest.raises(FileNotFoundError, match="Cosmos-1.0-Tokenizer-DV8x16x16.*models/vae"):
        vae.decode(torch.zeros(1, 1, 4, 4))
    tiny_simplear.write_cosmos(put("vae") / tiny_simplear.DECODER)
    assert prints(model_name="SimpleAR-tiny") != before
    assert load("SimpleAR-tiny")[0].decoder is not None


@pytest.mark.parametrize("linked", ["runs", ""])
def test_a_trace_in_a_linked_folder_can_be_chosen(linked, tmp_path, monkeypatch):
    """As on another disk; by its name alone, a choice cannot leave the output folder."""
    elsewhere, output = tmp_path / "nas", tmp_path / "output"
    elsewhere.mkdir()
    if linked:
        output.mkdir()
    (output / linked if linked else output).symlink_to(elsewhere, target_is_directory=True)
    for end in (".json", ".safetensors"):
        (elsewhere / f"a{end}").write_text("{}", encoding="utf-8")
        (tmp_path / f"b{end}").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(folder_paths, "output_directory", str(output))
    choices = [choice for choice in folders.trace_choices() if choice.endswith("[output]")]
    assert choices == [f"{os.path.join(linked, 'a.safetensors')} [output]"]
    assert folders.trace_path(choices[0]).read_text(encoding="utf-8") == "{}"
    for name in ("../b.safetensors [output]", str(tmp_path / "b.safetensors"), "runs/../../b.safetensors"):
        with pytest.raises(ValueError, match="outside"):
            folders.trace_path(name)


@pytest.mark.parametrize("disabled", [True, False])
def test_weights_are_mapped_unless_the_user_says_no(put, monkeypatch, disabled):
    """With --disable-mmap, and without it."""
    tiny_janus.write(put("ar_models") / "Janus")
    monkeypatch.setattr(args, "disable_mmap", disabled)
    folders.set_mmap()
    try:
        model = open_model("Janus", "fp32", None)
    finally:
        use_mmap(True)
    assert bool(maps(put("ar_models"))) == (not disabled)
    del model


def test_links_that_lead_nowhere_are_not_listed(put):
    """Those of a drive that is not connected. An error in a list hides its node."""
    vae = put("vae", "vq_ds16_c2i.pt")
    try:
        (vae / "gone.safetensors").symlink_to(vae / "nowhere.safetensors")
    except OSError:
        pytest.skip("this system or user makes no links")
    assert own(folders.decoder_choices()) == ["vq_ds16_c2i.pt"]
