"""What files, folders and other nodes can do to a language model that generates: answered in words, or harmless."""

import json
import shutil

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.drafters import ModelDrafter
from comfyui_specar.model_loaders.families.chameleon import target_size
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from safetensors.torch import load_file, save_file

from ..support import tiny_chameleon, tiny_simplear
from ..support.every_family import FAMILIES

WRITE = {name: tiny.write for name, tiny in FAMILIES.items() if not name.startswith("llamagen")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> its folder, which tests must not change."""
    return {family: write(tmp_path_factory.mktemp(family)) for family, write in WRITE.items()}


@pytest.fixture(scope="module")
def models(folders):
    return {family: load_model(folder) for family, folder in folders.items()}


@pytest.fixture
def copied(folders, tmp_path):
    """Copies a family's folder: copied(family) -> folder."""
    return lambda family: shutil.copytree(folders[family], tmp_path / folders[family].name)


def start(model, prompt, negative=None):
    return model.start(prompt, negative, 1, model.layout(), 2, guided=model.guidance or negative is not None)


@pytest.fixture(params=WRITE)
def family(request):
    return request.param


# Prompts


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda ids: ids * 0.5, lambda ids: torch.cat((ids, ids), dim=1), lambda ids: ids[:, 1:]],
    ids=["zeroed", "averaged", "joined", "cut"],
)
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_a_prompt_that_another_node_changed_is_refused(models, family, change, side):
    model = models[family]
    [[ids, extra]] = prompt = model.encode_prompt("a red circle")
    changed = [[change(ids), extra]]
    with pytest.raises(ValueError, match=f"{side}.*another node"):
        start(model, *((changed, None) if side == "positive" else (prompt, changed)))


@pytest.mark.parametrize("ids", [[10**6], [-1], [], [1.5], [0, float("nan")]])
def test_ids_that_are_no_words_are_refused(models, family, ids):
    with pytest.raises(ValueError, match="words"):
        start(models[family], models[family].encode_ids(ids))


def test_image_tokens_written_into_a_prompt_are_refused(models):
    with pytest.raises(ValueError, match="Image tokens"):
        start(models["emu3"], models["emu3"].encode_prompt("a <|visual token 000001|> b"))


def test_a_prompt_may_hold_anything_that_json_can(models, family):
    prompt = models[family].encode_prompt("half a character: \ud83d, braces: {0} {}, %s, 日本語 🎨 \x00")
    assert start(models[family], prompt).prefill.logits.isfinite().all()


# Folders


@pytest.mark.parametrize("name", ["20240320_lumina", "Lumina-mGPT-v128", "0f96c2e1d4", "a7512bc0", "Lumina-mGPT-7B"])
def test_other_numbers_in_a_name_are_no_size(name, tmp_path):
    with pytest.raises(CheckpointError, match="size"):
        target_size(tmp_path / name / "model.safetensors", {}, None)


def test_a_grid_does_not_overrule_the_size_in_a_name(tmp_path):
    assert target_size(tmp_path / "Lumina-mGPT-7B-768-Omni" / "model.safetensors", {}, (32, 32)) == 768
    assert target_size(tmp_path / "some_lumina.safetensors", {}, (32, 32)) == 512


@pytest.mark.parametrize("stray", ["other codes", "junk"])
def test_a_stray_decoder_does_not_keep_a_model_from_loading(folders, tmp_path, stray):
    file = tmp_path / "vqgan.ckpt"
    file.write_bytes(b"junk") if stray == "junk" else tiny_chameleon.write_vqgan(file, codes=16)
    for family in ("anole", "lumina-mgpt"):
        assert load_model(folders[family], search_folders=[tmp_path]).codebook.shape[0] == 32


def test_one_of_several_shards_is_no_model(tmp_path):
    folder = tiny_simplear.write(tmp_path, shards=2)
    with pytest.raises(CheckpointError, match="shards"):
        load_model(folder / "model-00001-of-00002.safetensors")


# Weights and settings


def test_integers_are_not_weights(copied, family):
    file = copied(family) / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t.to(torch.int8) if "down_proj" in name else t for name, t in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="feed_forward.*int8.*released"):
        load_model(file.parent)


@pytest.mark.parametrize(("part", "shape"), [("q_proj.weight", (-1,)), ("embed_tokens.weight", ())])
def test_misshapen_weights(copied, family, part, shape):
    file = copied(family) / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(part)]:
        tensors[name] = tensors[name].flatten() if shape == (-1,) else torch.zeros(shape)
    save_file(tensors, file)
    with pytest.raises(CheckpointError):
        load_model(file.parent)


NONSENSE = {
    "janus-pro": [("text_config", "x"), ("vision_config", [1])],
    "simplear": [
        ("rope_theta", "x"),
        ("rope_theta", -7),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", -7),
        ("specar", 3),
        ("max_position_embeddings", "x"),
        ("rope_parameters", "x"),
        ("num_attention_heads", 3),
    ],
    "lumina-mgpt": [("vocabulary_map", [1, "a"]), ("num_attention_heads", -2), ("max_position_embeddings", [])],
    "anole": [("vq_config", "x"), ("rope_theta", [1])],
    "emu3": [("text_config", -7), ("vq_config", "x"), ("vocabulary_map", {"<|visual token 000000|>": "x"})],
}


CASES = [(family, *case) for family, cases in NONSENSE.items() for case in cases]


@pytest.mark.parametrize(("family", "key", "value"), CASES)
def test_settings_that_make_no_sense(copied, family, key, value):
    folder = copied(family)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_model(folder)


@pytest.mark.parametrize(
    "value", [{"grid": [10**9, 10**9]}, {"grid": None}, {"defaults": {"foo": 1}}, {"defaults": {"cfg": "x"}}], ids=str
)
def test_metadata_that_makes_no_sense(copied, family, value):
    file = copied(family) / "model.safetensors"
    save_file(load_file(file), file, metadata={"specar": json.dumps(value)})
    with pytest.raises(CheckpointError):
        load_model(file.parent)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("janus-pro", {"vision_config": {"num_image_tokens": 10**30}}),
        ("emu3", {"image_area": 10**30}),
        ("anole", {"vq_config": {"resolution": 10**12}}),
    ],
    ids=str,
)
def test_an_image_without_end(copied, family, setting):
    folder = copied(family)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key != "specar"} | setting
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_model(folder)


@pytest.mark.parametrize("method", ["next token", "SJD", "draft tree"])
def test_a_model_that_overflows_generates_nothing(models, folders, method):
    model = load_model(folders["janus-pro"])
    model.backbone.norm.weight.data[0] = torch.inf
    tree = DraftTree(ModelDrafter(models["janus-pro"]), Chain(2))
    method = {"next token": NextToken(), "SJD": SJD(), "draft tree": tree}[method]
    request = Request(model, model.encode_prompt("a"), model.layout(), SamplingParams())
    with pytest.raises(ValueError, match="NaN.*torch.float32.*bf16 or fp32"):
        method.sample(request)
