"""Weight files in every container they come in, and every way in which a file can be wrong."""

import argparse
import pickle
import re
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders import detect
from comfyui_specar.model_loaders.detect import bundled, load_image_decoder, load_model
from comfyui_specar.model_loaders.families import llamagen
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.methods.jacobi import SJD
from safetensors.torch import save_file

from ..support.bad_files import Attack, refused
from ..support.models import teacher_forced
from ..support.tiny import GRID, HEADS, VOCAB, caption_features, llamagen_weights, vq_weights, write_llamagen
from ..support.tiny_folder import write_folder


@pytest.fixture
def known_size(monkeypatch):
    """Make the tiny size one of the released ones, so that a .pt file, which has no metadata, can be read."""
    monkeypatch.setitem(llamagen._HEADS, (64, 2), HEADS)


def logits(model):
    prompt = model.encode_features(caption_features()) if model.family == "llamagen-t2i" else model.encode_prompt("3")
    return teacher_forced(model, prompt, torch.arange(16)[None] % VOCAB)


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that pickles through torch._tensor._rebuild_from_type_v2, as FSDP-saved files do."""
    tensor = tensor.clone()
    tensor.marker = 1
    return tensor


CONTAINERS = {  # others are in test_pickles
    "flat": lambda w: w,
    "ordered": OrderedDict,
    "FSDP": lambda w: OrderedDict((name, with_attribute(tensor)) for name, tensor in w.items()),
    "stray rope table": lambda w: w | {"freqs_cis": torch.zeros(4, 4, 2)},
    "half precision": lambda w: {name: tensor.to(torch.bfloat16) for name, tensor in w.items()},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_model(tmp_path, known_size, container):
    text = container in ("FSDP", "stray rope table", "half precision")
    wanted = load_model(write_llamagen(tmp_path / "model.safetensors", text))
    torch.save(CONTAINERS[container](llamagen_weights(text)), tmp_path / "tiny_256.pt")
    found = load_model(tmp_path / "tiny_256.pt", grid=GRID)
    assert found.family == wanted.family == f"llamagen-{'t2i' if text else 'c2i'}" and found.grid == GRID
    if container == "half precision":
        wanted.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(logits(found), logits(wanted))
    assert {p.dtype for p in found.parameters()} == {torch.float32}


RENAMED = {"attention.wo": "self_attn.o_proj", "tok_embeddings": "embed_tokens", "attention_norm": "input_layernorm"}
RENAMED |= {"ffn_norm": "post_attention_layernorm"}
RENAMED |= {f"feed_forward.w{i}": f"mlp.{part}_proj" for i, part in ((1, "gate"), (3, "up"), (2, "down"))}


def hugging_face_names(weights):
    out = {}
    for name, tensor in weights.items():
        if name == "output.weight":
            out["lm_head.weight"] = tensor
        elif "wqkv" in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                out["model." + name.replace("attention.wqkv", f"self_attn.{part}_proj")] = rows.contiguous()
        else:
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            out[f"model.{name}"] = tensor
    return out


def test_hugging_face_names_give_the_same_model(tmp_path, known_size):
    """A lone file, as people copy it: heads by its size, and the grid that is asked for."""
    wanted = load_model(write_llamagen(tmp_path / "model.safetensors", True))
    folder = tmp_path / "LlamaGen-T2I"
    folder.mkdir()
    save_file(hugging_face_names(llamagen_weights(True)), str(folder / "model.safetensors"))
    assert torch.equal(logits(load_model(folder, grid=GRID)), logits(wanted))
    assert load_model(folder).grid == (16, 16)


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize(("shards", "pickled"), [(3, False), (1, True)])
def test_hugging_face_folders_give_heads_grid_and_norms(tmp_path, text, shards, pickled):
    """The layout of jadohu/LlamaGen-T2I: a size that was never released loads too, as its config.json tells."""
    wanted = load_model(write_llamagen(tmp_path / "model.safetensors", text))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "block_size": GRID[0] * GRID[1],
        "vocab_size": VOCAB,
    }
    weights = hugging_face_names(llamagen_weights(text))
    folder = write_folder(tmp_path / "converted", weights, config, shards, pickled)
    found = load_model(folder)
    assert found.family == wanted.family and found.grid == GRID and found.backbone.config == wanted.backbone.config
    assert torch.equal(logits(found), logits(wanted))
    write_folder(folder, weights, config | {"rms_norm_eps": 1e-3, "num_attention_heads": 2}, shards, pickled)
    other = load_model(folder).backbone.config
    assert other.norm_eps == 1e-3 and other.heads == 2


SIDES = {  # released names and folders -> tokens beside each other
    16: "c2i_B_256.pt t2i_XL_stage1_256.pt LlamaGen-T2I/model.safetensors 512/c2i_L_256.safetensors "
    "LlamaGen-T2I-256/model.safetensors",
    24: "c2i_XXL_384.pt runs_256/c2i_L_384.safetensors",
    32: "t2i_XL_stage2_512.pt LlamaGen-T2I-2/model.safetensors LlamaGen-T2I-2/model.safetensors.index.json "
    "LlamaGen-T2I-2/pytorch_model.bin",
}


@pytest.mark.parametrize(("side", "name"), [(side, name) for side, names in SIDES.items() for name in names.split()])
def test_the_released_names_give_the_grid(name, side):
    assert llamagen.own_grid(Checkpoint({}, {}, Path("models") / name)) == (side, side)


@pytest.mark.parametrize(("weights", "faster"), [(1, True), (1, False), (10**9, True)])
def test_a_large_model_takes_bf16_on_a_cpu_where_that_is_faster(tmp_path, monkeypatch, weights, faster):
    monkeypatch.setattr(detect, "LARGE", weights)
    monkeypatch.setattr(detect, "bf16_is_faster", lambda: faster)
    path = write_llamagen(tmp_path / "model.safetensors", True, grid=[4, 4])
    assert load_model(path).dtype == (torch.bfloat16 if weights == 1 and faster else torch.float32)
    assert load_model(path, dtype=torch.float16).dtype == torch.float16


def test_metadata_describes_models_of_our_own(tmp_path):
    about = {"grid": [2, 8], "pixels_per_token": 8, "defaults": {"cfg": 3.0, "top_k": 0, "temperature": 0.9}}
    path = write_llamagen(tmp_path / "model.safetensors", True, **about)
    model = load_model(path)
    assert model.grid == (2, 8) and model.pixels_per_token == 8
    assert model.defaults == SamplingParams(cfg=3.0, temperature=0.9)
    assert load_model(path, grid=(8, 2)).grid == (8, 2)
    with pytest.raises(ValueError, match=r"32 x 32 pixels.*4 x 4 tokens.*64 x 16 pixels"):
        model.layout(4, 4)


@pytest.mark.parametrize("legal, illegal", [(1, 0), (1024, 1025)])
def test_the_pixels_of_a_token_have_both_limits(tmp_path, legal, illegal):
    model = load_model(write_llamagen(tmp_path / "a.safetensors", True, pixels_per_token=legal))
    assert model.pixels_per_token == legal
    with pytest.raises(ValueError, match=rf"pixels_per_token is {illegal}.* 1 to 1024"):
        load_model(write_llamagen(tmp_path / "b.safetensors", True, pixels_per_token=illegal))


def test_dtype_and_defaults(tmp_path):
    path = write_llamagen(tmp_path / "model.safetensors", False)
    assert load_model(path).dtype == torch.float32
    half = load_model(path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in half.parameters())
    assert half.defaults == SamplingParams(cfg=4.0, top_k=VOCAB)
    tokens = api.sample(half, half.encode_prompt("0"), SJD(window=4)).tokens
    assert tokens.shape == (1, *GRID)
    text = load_model(write_llamagen(tmp_path / "text.safetensors", True))
    assert text.defaults == SamplingParams(cfg=7.5, top_k=VOCAB)


# Files that cannot be used


def test_missing_files_and_strange_kinds(tmp_path):
    refused(tmp_path / "none.safetensors", "none.safetensors", "exist")
    refused(tmp_path, "no model.safetensors", error=CheckpointError)
    (tmp_path / "weights.txt").write_text("hello", encoding="utf-8")
    refused(tmp_path / "weights.txt", "weights.txt", "weight file", ".safetensors")


@pytest.mark.parametrize("loader", [load_model, load_image_decoder])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_files(tmp_path, known_size, suffix, loader):
    """Truncated anywhere, empty, or random: the message names the file, its size, and what to do."""
    path = tmp_path / f"c2i_B_256{suffix}"
    if suffix == ".pt":
        torch.save(llamagen_weights(False), path)
        remedy = "damaged or contains code"
    else:
        write_llamagen(path, False)
        remedy = "Download or copy it again"
    whole = path.read_bytes()
    noise = bytes(torch.randint(256, (5000,), generator=torch.Generator().manual_seed(0)).tolist())
    cut = [whole[:-1000], whole[: len(whole) // 2], whole[:100], whole[:7], b""]
    for content in (*cut, noise, b"\0" * 64, b"<html>404</html>"):
        path.write_bytes(content)
        refused(path, path.name, f"({len(content)} bytes)", remedy, loader=loader)


@pytest.mark.parametrize("metadata", ["not json", "[]", "null", "3"])
def test_metadata_of_another_kind(tmp_path, known_size, metadata):
    """Broken JSON is an error; JSON that is no object says nothing about the model."""
    path = tmp_path / "c2i_B_256.safetensors"
    save_file(llamagen_weights(False), str(path), metadata={"specar": metadata})
    if metadata == "not json":
        refused(path, path.name, "damaged")
    else:
        assert load_model(path).grid == (16, 16)


@pytest.mark.parametrize("loader", [load_model, load_image_decoder])
def test_code_in_a_file_is_never_run(tmp_path, known_size, loader):
    proof, path = tmp_path / "proof", tmp_path / "c2i_B_256.pt"
    weights = llamagen_weights(False)
    for content in (
        Attack(proof),
        weights | {"x": Attack(proof)},
        {"model": weights, "args": Attack(proof)},
        {"model": weights, "args": argparse.Namespace(x=Attack(proof))},
    ):
        for zipped in (True, False):
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
            refused(path, path.name, "never run", ".safetensors", loader=loader)
            assert not proof.exists()
    path.write_bytes(pickle.dumps(Attack(proof)))
    refused(path, path.name, loader=loader)
    assert not proof.exists()


def test_the_attack_of_the_test_above_works(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "proof")))
    assert (tmp_path / "proof").read_text(encoding="utf-8") == "gotcha"


def test_files_without_tensors(tmp_path):
    torch.save({"model": {}, "steps": 3}, tmp_path / "empty_256.pt")
    refused(tmp_path / "empty_256.pt", "empty_256.pt", "tensors")
    torch.save([torch.zeros(3)], tmp_path / "list_256.pt")
    refused(tmp_path / "list_256.pt", "list_256.pt", "tensors")
    save_file({}, str(tmp_path / "empty.safetensors"))
    refused(tmp_path / "empty.safetensors", "empty.safetensors", "tensors")


def test_wrong_families(tmp_path):
    save_file({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(1)}, str(tmp_path / "sd15.safetensors"))
    refused(tmp_path / "sd15.safetensors", "sd15.safetensors", "family", "LlamaGen", "input_blocks")
    refused(tmp_path / "sd15.safetensors", "sd15.safetensors", "image decoder", loader=load_image_decoder)
    save_file(vq_weights(), str(tmp_path / "vq_ds16_c2i.safetensors"))
    refused(tmp_path / "vq_ds16_c2i.safetensors", "vq_ds16_c2i.safetensors", "Load AR Image Decoder")
    write_llamagen(tmp_path / "c2i.safetensors", False)
    refused(tmp_path / "c2i.safetensors", "c2i.safetensors", "image decoder", loader=load_image_decoder)


def test_unknown_size_and_grid(tmp_path, known_size):
    save_file(llamagen_weights(False, layers=3), str(tmp_path / "c2i_256.safetensors"))
    refused(tmp_path / "c2i_256.safetensors", "c2i_256.safetensors", "width 64 and 3 layers", "metadata")
    write_llamagen(tmp_path / "odd.safetensors", False, heads=7)
    refused(tmp_path / "odd.safetensors", "odd.safetensors", "width 64")
    save_file(llamagen_weights(False), str(tmp_path / "mine.safetensors"))
    refused(tmp_path / "mine.safetensors", "mine.safetensors", "grid", "16 for 256", "24 for 384", "32 for 512")
    for grid in ((0, 4), (4,), (-1, 4)):
        refused(tmp_path / "mine.safetensors", "between 1 and 1024", grid=grid, error=ValueError)


def test_unknown_bundled_models_are_named():
    with pytest.raises(FileNotFoundError, match="'nonsense'.*continuous, .*default/eagle"):
        bundled("nonsense")


def test_bundled_files_load_as_they_are():
    """Every model folder in assets/ loads with the key names of the released files, and nothing in it is a pickle."""
    root = Path(sys.modules["comfyui_specar"].__file__).parent / "assets"
    assert not [p for p in root.rglob("*") if re.fullmatch(r"\.(pt|pth|bin|ckpt|pkl)", p.suffix)]
    telling = {"default": "tok_embeddings.weight", "continuous": "diffloss.net.input_proj.weight"}
    assert {path.parent.name for path in root.glob("*/model.safetensors")} == set(telling)
    for name, tensor in telling.items():
        model, decoder = load_model(bundled(name)), load_image_decoder(bundled(name))
        file = open_checkpoint(bundled(name) / "model.safetensors")
        assert tensor in file.tensors
        assert file.metadata["pixels_per_token"] == model.pixels_per_token == decoder.factor
