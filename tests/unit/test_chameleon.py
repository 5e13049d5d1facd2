"""Lumina-mGPT and Anole: distinguished by their weights, laid out and prompted as they were trained, refused in
words.
"""

import json
import shutil

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import chameleon
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError
from comfyui_specar.model_loaders.text.language_model import rope_theta
from safetensors.torch import load_file, save_file

from ..support.tiny_chameleon import FIRST, KINDS, config, random_weights, shapes, vocabulary, write
from ..support.tiny_folder import byte_tokenizer, edited, write_folder

IDS = vocabulary(32)
BOS, BOI, EOI, TURN, ROW = (IDS[t] for t in ("<s>", "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write(tmp_path_factory.mktemp("models"), kind=kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(folders):
    return {kind: api.load_model(folder) for kind, folder in folders.items()}


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of a tiny model's folder, under another name."""
    return lambda kind, name: shutil.copytree(folders[kind], tmp_path / name)


def change(folder, edit):
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), str(folder / "model.safetensors"))
    return folder


def ids(conditioning):
    return conditioning[0][0][0, :, 0].long().tolist()


# What they are


def test_weights_distinguish_the_two_whatever_the_folder_is_called(copy):
    assert api.load_model(copy("anole", "Lumina-mGPT-64")).family == "anole"
    assert api.load_model(copy("lumina", "Anole-64")).family == "lumina-mgpt"


def test_tokens_and_sizes(models):
    lumina, anole = models["lumina"], models["anole"]
    codes = list(range(IDS["IMGIMGAZ"], IDS["IMGIMGAZ"] + 32))
    assert (lumina.vocab, lumina.vocab_total, lumina.word_ids) == (32, 34, (*codes, ROW, EOI))
    assert (anole.vocab, anole.vocab_total, anole.word_ids) == (32, 33, (*codes, EOI))
    assert lumina.grid == anole.grid == (4, 4) and anole.grids == ((4, 4),)
    assert lumina.layout(2, 6).forced[0].tolist() == ([-1] * 6 + [32]) * 2 + [33]
    assert anole.layout().forced[0].tolist() == [-1] * 16 + [32]
    for model in (lumina, anole):
        assert (model.defaults.cfg, model.defaults.top_k, model.defaults.temperature) == (3.0, 32, 1.0)
        assert model.longest == 512 and model.codebook.shape == (32, 6)


@pytest.mark.parametrize(("side", "count"), [(32, 49), (48, 73), (64, 97)])
def test_size_table(side, count):
    """Every size fills the square's area as well as its width in cells allows, and its mirror image is there too."""
    grids = chameleon.size_table(side)
    assert len(grids) == len(set(grids)) == count and (side, side) in grids
    assert {(cols, rows) for rows, cols in grids} == set(grids)
    for rows, cols in grids:
        assert rows % 2 == cols % 2 == 0 and rows * cols <= side * side and max(rows, cols) <= 4 * min(rows, cols)
        assert (rows + 2) * (cols + 2) > side * side


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("Lumina-mGPT-7B-512/model.safetensors", 512),
        ("Lumina-mGPT-7B-768-Omni/model.safetensors.index.json", 768),
        ("Lumina-mGPT-7B-1024/pytorch_model.bin", 1024),
        ("LLM/Lumina-mGPT-7B-768_fp8.safetensors", 768),
    ],
)
def test_released_names_give_the_size(tmp_path, path, size):
    assert chameleon.target_size(tmp_path / path, {}, None) == size


def test_a_square_grid_gives_the_size_where_the_name_does_not(copy):
    folder = edited(copy("lumina", "mine-64"), specar=None)  # no size of a released model
    with pytest.raises(CheckpointError, match="mine-64.*size.*512, 768 or 1024.*grid"):
        api.load_model(folder)
    assert api.load_model(folder, grid=(8, 8)).grids == tuple(chameleon.size_table(8))


def test_length_and_rotation_by_config():
    assert rope_theta({"rope_theta": 5e5}) == rope_theta({"rope_parameters": {"rope_theta": 5e5}}) == 5e5
    assert rope_theta({}) == 1e4
    grids = chameleon.size_table(64)
    assert chameleon.longest({"max_position_embeddings": 10240}, grids) == 10240
    assert chameleon.longest({"max_position_embeddings": 4096}, grids) is None  # carried over from the 768 one
    assert chameleon.longest({}, grids) is None


def test_the_nearest_code_is_not_the_most_similar_direction(models):
    """Chameleon's code vectors have different lengths."""
    model = models["anole"]
    tokens = torch.arange(32).view(1, 4, 8)
    noise = torch.randn((1, 6, 4, 8), generator=torch.Generator().manual_seed(0))
    latent = model.dequantize(tokens) + 0.5 * noise
    distances = (latent[0].flatten(1).T[:, None] - model.codebook).square().sum(-1)
    assert torch.equal(model.quantize(latent).flatten(), distances.argmin(-1))
    cosines = torch.einsum("bchw,vc->bhwv", latent, torch.nn.functional.normalize(model.codebook, dim=-1))
    assert not torch.equal(model.quantize(latent), cosines.argmax(-1))


# Prompts


def test_lumina_names_the_size_of_the_image(models):
    model = models["lumina"]
    conditioning = model.encode_prompt("a fox")
    text = byte_tokenizer(list(IDS)).encode("Generate an image of 96x32 according to the following prompt:\na fox").ids
    wide = model.read(conditioning, 1, "positive", (2, 6)).features[0, :, 0].long().tolist()
    assert wide == [BOS, *text, TURN, BOI, IDS["<reserved08801>"], IDS["<reserved08803>"]]
    assert ids(conditioning)[-3:] == [BOI, IDS["<reserved08802>"], IDS["<reserved08802>"]]
    null = model.prefix.null(torch.zeros(1, 9, 1), (8, 2))
    assert null[0, :, 0].tolist() == [BOI, IDS["<reserved08804>"], IDS["<reserved08801>"]]


def test_anole_takes_the_prompt_as_it_is(models):
    model = models["anole"]
    assert ids(model.encode_prompt("a fox")) == [BOS, *byte_tokenizer(list(IDS)).encode("a fox").ids, TURN, BOI]
    assert model.prefix.null(torch.zeros(1, 9, 1), (4, 4))[0, :, 0].tolist() == [BOS, BOI]


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_tokenizer_a_model_still_generates_from_ids(kind, folders, copy):
    folder = copy(kind, "lonely-64")
    (folder / "tokenizer.json").unlink()
    model = api.load_model(folder)
    with pytest.raises(FileNotFoundError, match=f"tokenizer.json.*-7[Bb]-.*folder.*{folder.name}"):
        model.encode_prompt("a fox")
    prompt = [BOS, 70, 80, TURN, BOI, *([IDS["<reserved08802>"]] * 2 if kind == "lumina" else [])]
    assert api.sample(model, model.encode_ids(prompt), cfg=3).tokens.shape == (1, 4, 4)
    shutil.copytree(folders["lumina"], folder.parent / "Lumina-mGPT-7B-768")  # another of its repositories
    assert api.load_model(folder).encode_prompt("a fox")


def test_the_tokenizer_of_another_model_is_refused(copy):
    folder = copy("anole", "Anole")
    byte_tokenizer(["<s>"]).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="tokenizer.*another model"):
        api.load_model(folder).encode_prompt("a fox")
    byte_tokenizer(["<s>", "<racm3:break>"]).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="tokenizer.*another model"):
        api.load_model(folder).encode_prompt("a fox")


# What is refused


def test_released_ids_without_a_vocabulary_map(tmp_path):
    """As released: 65536 words, of which 4 .. 8195 are codes."""
    settings = {key: value for key, value in config("lumina", width=8).items() if key != "vocabulary_map"}
    settings |= {"vocab_size": 65536, "num_hidden_layers": 1}
    weights = random_weights(shapes("lumina", settings), seed=0)
    model = api.load_model(write_folder(tmp_path / "Lumina-mGPT-7B-512", weights, settings))
    assert model.word_ids == (*range(4, 8196), 8803, 8196) and model.defaults.top_k == 2000
    assert model.prefix.null(torch.zeros(1, 1, 1), (32, 32))[0, :, 0].tolist() == [8197, 8820, 8820]
    assert torch.equal(model.backbone.output.weight[8192], weights["lm_head.weight"][8803])
    assert torch.equal(model.backbone.tok_embeddings.weight[7], weights["model.embed_tokens.weight"][11])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_map": None}, "image tokens.*config.json"),
        ({"vocabulary_map": IDS | {"IMGIMGBZ": 5}}, "order"),
        ({"vocabulary_map": {k: v for k, v in IDS.items() if k != "<eoss>"}}, "<eoss>"),
        ({"swin_norm": True}, "swin_norm.*34B.*7B"),
        ({"mask_image_logits": True}, "output.*switched off.*Anole-7b-v0.1-hf"),
        ({"num_attention_heads": None}, "width.* 32 .*heads"),
    ],
)
def test_configs_of_others(copy, changes, message):
    with pytest.raises(CheckpointError, match=message):
        api.load_model(edited(copy("lumina", "some-64"), **changes))


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("anole", lambda w: {n: t for n, t in w.items() if ".vqmodel.decoder." not in n}, "output.*switched off"),
        (
            "anole",
            lambda w: {n: t.repeat(2, 1) if "_norm." in n else t for n, t in w.items()},
            "2 heads.*4 groups.*34B",
        ),
        ("lumina", lambda w: w | {"lm_head.weight": w["lm_head.weight"] * 0}, "head.*zero.*image tokens"),
        ("anole", lambda w: {n: t for n, t in w.items() if n != "model.layers.1.self_attn.k_norm.bias"}, "k_norm.bias"),
    ],
)
def test_weights_of_others(copy, kind, edit, message):
    with pytest.raises(CheckpointError, match=message):
        api.load_model(change(copy(kind, "some-64"), edit))


@pytest.mark.parametrize("name", ["20240320_lumina", "Lumina-mGPT-v128", "0f96c2e1d4", "a7512bc0", "Lumina-mGPT-7B"])
def test_other_numbers_in_a_name_are_no_size(name, tmp_path):
    with pytest.raises(CheckpointError, match="size"):
        chameleon.target_size(tmp_path / name / "model.safetensors", {}, None)


def test_a_grid_does_not_overrule_the_size_in_a_name(tmp_path):
    assert chameleon.target_size(tmp_path / "Lumina-mGPT-7B-768-Omni" / "model.safetensors", {}, (32, 32)) == 768
    assert chameleon.target_size(tmp_path / "some_lumina.safetensors", {}, (32, 32)) == 512


def test_metas_own_layout_is_refused_with_a_remedy(tmp_path):
    names = (
        "tok_embeddings.weight",
        "norm.weight",
        "output.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention.q_normalization.weight",
        "layers.0.feed_forward.w1.weight",
    )
    torch.save({name: torch.zeros(4, 4) for name in names}, tmp_path / "consolidated.pth")
    with pytest.raises(CheckpointError, match="Meta.*layout.*leloy/Anole-7b-v0.1-hf"):
        api.load_model(tmp_path / "consolidated.pth")


# The released sizes


@pytest.mark.parametrize(
    ("kind", "name"),
    [("lumina", "Lumina-mGPT-7B-512"), ("lumina", "Lumina-mGPT-7B-1024"), ("anole", "Anole-7b-v0.1-hf")],
)
def test_released_models_fit(monkeypatch, tmp_path, kind, name):
    """Names and shapes of 7B, built on the meta device so that no memory is needed."""
    settings = config(kind, codes=8192) | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 65536,
        "vq_config": {"resolution": 512},
        "specar": None,
    }
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes(kind, settings).items()}
    assert sum(tensor.numel() for tensor in tensors.values()) == pytest.approx(7.0137e9, rel=1e-3)
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))  # nothing to look at on the meta device
    monkeypatch.setattr(torch.Tensor, "any", lambda tensor: True)
    checkpoint = Checkpoint(tensors, {}, tmp_path / name / "model.safetensors.index.json")
    assert chameleon.recognise(tensors)
    model = chameleon.load(checkpoint, torch.bfloat16, None, ())
    side = {"Lumina-mGPT-7B-1024": 64}.get(name, 32)
    assert model.grid == (side, side) and model.backbone.config.head_norms == (1 if kind == "lumina" else 32)
    assert model.backbone.output.weight.shape == (8192 + (2 if kind == "lumina" else 1), 4096)
    assert model.word_ids[0] == FIRST + 2 and model.layout().length == side * (side + (kind == "lumina")) + 1
