"""Matrices kept in 8 or 4 bits, files that store them so, and a head that is also the token table."""

import shutil
from pathlib import Path

import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model, stays_narrow
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.files.scaled import with_scales
from comfyui_specar.models.conditions import conditions
from comfyui_specar.nodes.comfy_runtime import memory
from comfyui_specar.nodes.comfy_runtime.models import open_model
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support import tiny_chameleon, tiny_simplear
from ..support.comfy_quant import mark, quantise_file, rewritten
from .conftest import plain_fp8

BYTES = {"fp8 (storage)": torch.uint8, "int8 (storage)": torch.int8, "int4 (storage)": torch.uint8}


def kept_narrow(model, dtype):
    return {name for name, parameter in model.named_parameters() if parameter.dtype == BYTES[dtype]}


def drawn(model, prompt="red apple", **settings):
    return api.sample(model, model.encode_prompt(prompt), NextToken(), **{"cfg": 2.0, "seed": 3} | settings).tokens


@pytest.mark.parametrize("dtype", BYTES)
def test_the_matrices_of_the_layers_are_small_and_there_is_room_to_widen_one(dtype, tiny):
    """A byte per number, in int8 with four per row and for the head too; in int4 half a byte and a scale per group."""
    loaded, whole = open_model("tiny", dtype, None), tiny[0].model
    head = (".output.",) if "int8" in dtype else ()
    wanted = {n: p for n, p in whole.named_parameters() if p.ndim == 2 and any(m in n for m in (".layers.", *head))}
    assert kept_narrow(loaded.model, dtype) == set(wanted)
    saved = sum(3 * p.numel() - 4 * len(p) * ("int8" in dtype) for p in wanted.values())
    if dtype != "int4 (storage)":
        assert loaded.patcher.model_size() == tiny[0].patcher.model_size() - saved
    stored = max(loaded.model.get_parameter(name).numel() for name in wanted) * (2 if "int4" in dtype else 1)
    assert memory.cast_room(loaded.model) == 2 * 4 * stored and memory.cast_room(whole) == 0
    assert loaded.model.dtype == torch.float32 and loaded.patcher.model_size() < tiny[0].patcher.model_size()


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("fp8 (storage)", "float8_e4m3fn"),
        ("int8 (storage)", "int8"),
        ("int8 (storage and KV cache)", "KV cache per image in int8"),
        ("int4 (storage)", "int4"),
    ],
)
def test_the_nodes_generate_with_them_and_say_so(dtype, words, load, run_node, sample):
    loaded = load("tiny", dtype=dtype)[0]
    latent, trace = sample("SJD", model=loaded)
    assert latent["ar_tokens"].shape == (1, 4, 4) and trace.totals["tokens"] == 16
    assert trace.settings["dtype"] == conditions(loaded.model)["dtype"]
    assert loaded.model.int8_cache == ("KV cache" in dtype)
    assert words in run_node("ModelInfo", model=loaded).result[0]


def test_shards_in_fp8_are_noticed_and_continuous_models_stay_wide(tmp_path, vectors):
    folder = tiny_chameleon.write(tmp_path, shards=2)
    assert stays_narrow(folder) is stays_narrow(vectors) is None
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    continuous = Path(shutil.copy(vectors / "model.safetensors", tmp_path))
    for file in (shard, continuous):
        rewritten(file, plain_fp8)
    assert stays_narrow(folder) == torch.float8_e4m3fn and stays_narrow(continuous) is None
    with pytest.raises(ValueError, match="vectors.*continuous.*fp8"):
        open_model("vectors", "fp8 (storage)", None)
    shard.write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="damaged"):
        stays_narrow(folder)


def test_caches_are_reserved_for_the_real_prompts(tiny, sample, loads, monkeypatch):
    """The unconditional branch of some families is longer than the prompt."""
    counted, model = [], tiny[0].model
    count = type(model).kv_bytes
    monkeypatch.setattr(type(model), "kv_bytes", lambda *given: counted.append(given[-1]) or count(*given))
    long = model.encode_prompt("red apple on a blue background")
    for negative, tokens in ((None, 2), (long, 3)):
        sample("NextToken", negative=negative)
        assert counted.pop() == tokens and loads[-1][1]["memory_required"] > 0


# Files in ComfyUI's quantised formats


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("plain fp8", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e4m3fn"), ("int8_tensorwise", "int8"), ("nvfp4", None)],
)
def test_auto_keeps_what_the_file_stores(kind, kept, models, load, run_node):
    folder = models / "quantised"
    shutil.copytree(models / "tiny", folder)
    try:
        rewritten(folder, plain_fp8 if kind == "plain fp8" else lambda tensors: (quantise_file(tensors, kind)[0], {}))
        loaded = load("quantised")[0]
        [about] = run_node("ModelInfo", model=loaded).ui["specar"]
        assert set(about["bytes_by_dtype"]) == {"float32", kept} - {None}
        if kind == "plain fp8":
            assert torch.equal(drawn(loaded.model), drawn(open_model("quantised", "fp32", None).model))
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("float8_e4m3fn", "TensorCoreFP8E4M3Layout"),
        ("int8_tensorwise", "TensorWiseINT8Layout"),
        ("nvfp4", "TensorCoreNVFP4Layout"),
    ],
)
def test_what_comfyui_itself_quantises_is_read_as_it_reads_it(kind, layout):
    pytest.importorskip("comfy_kitchen", reason="this ComfyUI does not write these formats")
    from comfy.quant_ops import QuantizedTensor

    weight = torch.randn(272, 256, generator=torch.Generator().manual_seed(0))
    own = QuantizedTensor.from_float(weight, layout, scale="recalculate")
    tensors = own.state_dict("a.weight") | {"a.comfy_quant": mark({"format": kind})}
    found = with_scales(tensors)["a.weight"]
    assert torch.equal(found.float(), own.dequantize()) and not torch.equal(found.float(), weight)


def test_a_head_that_is_the_token_table_is_counted_and_moved_once(tmp_path):
    """SimpleAR's, under partial loading."""
    folder = tiny_simplear.write(tmp_path / "model", decoder=False)
    drawing = {"prompt": "a red cup", "cfg": 6.0, "temperature": 0}
    wanted = drawn(load_model(folder), **drawing)
    model, cpu = load_model(folder, operations=Operations), torch.device("cpu")
    patcher = ModelPatcher(model, cpu, cpu)
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    assert patcher.model_size() == 4 * numbers == 4 * sum(p.numel() for p in set(model.parameters()))
    patcher.load(cpu, lowvram_model_memory=1)  # nothing fits: every layer casts its weights when it is used
    assert model.backbone.tok_embeddings.comfy_cast_weights and torch.equal(drawn(model, **drawing), wanted)
    patcher.unpatch_model(cpu)
    assert torch.equal(drawn(model, **drawing), wanted)
