"""Files that other programs than ComfyUI quantised, and what each format costs in precision."""

import json
from functools import partial

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels.linear import widen as in_storage
from comfyui_specar.model_loaders.detect import count_weights, family_of, load_model, model_file, stays_narrow
from comfyui_specar.model_loaders.files import quantised
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, open_checkpoint, outline, with_matrices
from comfyui_specar.model_loaders.files.convrot import rotate_groups
from comfyui_specar.models.networks.quantised import NarrowLinear, narrow_matrix
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file, save_file

from ..support import comfy_quant
from ..support import quantised_layouts as layouts
from ..support.bad_files import refused
from ..support.closeness import assert_as_exact
from ..support.comfy_quant import INT8, rewritten
from ..support.every_family import FAMILIES
from ..support.models import teacher_forced

INT4, BF16 = torch.uint4, torch.bfloat16
AUTOROUND = layouts.config("auto-round", packing_format="auto_round:auto_gptq", bits=4, sym=True)
GPTQ = layouts.config("gptq", desc_act=False)
SHUFFLED = layouts.config("gptq", desc_act=True)
V2 = layouts.config("gptq", checkpoint_format="gptq_v2")


def read(tensors, path, about=None):
    """The only tensor of a file, by every reader."""
    (matrix,) = with_matrices(tensors, path, lambda: (about or {}).get("quantization_config")).values()
    return matrix


# Matrices

MATRICES = {  # how one is packed, and what config.json says
    "nf4": (layouts.bitsandbytes, None),
    "fp4": (partial(layouts.bitsandbytes, kind="fp4"), None),
    "nf4 with plain scales": (partial(layouts.bitsandbytes, nested=False), None),
    "nf4 in bf16": (partial(layouts.bitsandbytes, storage=BF16), None),
    "nf4, blocks of 128": (partial(layouts.bitsandbytes, block=128, step=64), None),
    "nf4, blocks over rows": (partial(layouts.bitsandbytes, block=96, step=10), None),
    "int8 of bitsandbytes": (layouts.llm_int8, None),
    "autoround": (layouts.gptq, AUTOROUND),
    "gptq": (layouts.gptq, GPTQ),
    "gptq with zero points": (partial(layouts.gptq, symmetric=False, group=32), GPTQ),
    "gptq v2": (partial(layouts.gptq, symmetric=False, more=0), V2),
    "gptq under newer names": (
        partial(layouts.gptq, symmetric=False, more=0),
        {"quantization_config": {"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 128, "sym": False}},
    ),
    **{
        packing: (partial(layouts.gptq, symmetric=False, more=0), layouts.config("auto-round", packing_format=packing))
        for packing in ("auto_round", "auto_round:gptqmodel")
    },
    "gptq in 8 bits": (partial(layouts.gptq, bits=8), GPTQ),
    "gptq in 2 bits": (partial(layouts.gptq, bits=2, group=32), GPTQ),
    "gptq in order of activations": (partial(layouts.gptq, order=torch.randperm(256) // 128), SHUFFLED),
    "gptq with named groups": (partial(layouts.gptq, order=torch.arange(256) // 64, group=64), GPTQ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_what_its_layout_says(name, tmp_path, monkeypatch):
    """To the last bit, whole and in parts, in fp32 and rounded."""
    monkeypatch.setattr(quantised, "_TOGETHER", 2600)  # ten rows at a time
    pack, about = MATRICES[name]
    weight = torch.randn(64, 256)
    tensors, wide = pack("a.weight", weight)
    matrix = read(tensors, tmp_path / "some.safetensors", about)
    assert matrix.shape == wide.shape and torch.equal(matrix.float(), wide) and torch.equal(matrix + 0, wide)
    assert torch.equal(matrix.to(BF16), wide.bfloat16())
    for found, wanted in zip(matrix.split((10, 54)), wide.split((10, 54)), strict=True):
        assert torch.equal(found.float(), wanted)
    save_file(tensors, tmp_path / "model.safetensors")
    if about:
        (tmp_path / "config.json").write_text(json.dumps(about), "utf-8")
    seen, opened = (each(tmp_path / "model.safetensors").tensors for each in (outline, open_checkpoint))
    assert {key: tensor.shape for key, tensor in seen.items()} == {"a.weight": wide.shape}
    assert seen["a.weight"].format.storage == opened["a.weight"].format.storage == matrix.format.storage
    assert torch.equal(opened["a.weight"].float(), wide)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("about", [GPTQ, V2, AUTOROUND], ids=["gptq", "gptq v2", "autoround"])
@pytest.mark.parametrize("more", [0, 1])
def test_numbers_tell_what_their_zero_points_are_where_they_can(more, about, bits, tmp_path):
    """Whatever the description says of it, also if it does not say ``sym``, which is usual."""
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256), bits=bits, more=more)
    for said in ({"sym": True}, {"sym": 1}, {"sym": None}):
        symmetric = {"quantization_config": about["quantization_config"] | said | {"bits": bits}}
        assert torch.equal(read(tensors, tmp_path / "x", symmetric).float(), wide)


def test_layers_of_which_other_things_are_said_are_read_as_they_are(tmp_path):
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256), symmetric=False, group=32)
    for entry in ("dynamic", "extra_config"):
        about = layouts.config("gptq", sym=True, bits=8, group_size=128, **{entry: {"a": {"sym": False}}})
        assert torch.equal(read(tensors, tmp_path / "x", about).float(), wide)


def test_an_index_of_zeros_is_none(tmp_path):
    """Programs write it for groups in a row."""
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256), group=64)
    tensors["a.g_idx"] = torch.zeros(256, dtype=torch.int32)
    for about in (GPTQ, layouts.config("gptq", desc_act=True, static_groups=True)):
        matrix = read(tensors, tmp_path / "x", about)
        assert torch.equal(matrix.float(), wide) and matrix.format.storage == INT4
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256), group=256, order=torch.zeros(256).long())
    assert torch.equal(read(tensors, tmp_path / "x", SHUFFLED).float(), wide), "one group"


def test_the_last_group_may_be_smaller(tmp_path):
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 96), group=32)
    words, index = tensors["a.qweight"][:10], torch.arange(80, dtype=torch.int32) // 32
    for about, order in ((GPTQ, index), (layouts.config("gptq", group_size=32), None)):
        shorter = tensors | {"a.qweight": words} | ({} if order is None else {"a.g_idx": order})
        assert torch.equal(read(shorter, tmp_path / "x", about).float(), wide[:, :80])


WRONG = [  # what the description says, the index of groups (None: there is none), and what is said about it
    ({"sym": True}, None, ("zero points of a", "sym")),
    ({"bits": 8}, None, ("256 columns of 4 bits in 4 groups", "8 bits")),
    ({"bits": 3}, None, ("3 bits",)),
    ({"group_size": 128}, None, ("4 groups", "group_size 128")),
    ({"group_size": -1}, None, ("4 groups", "group_size -1")),
    ({"group_size": 0}, None, ("4 groups", "group_size 0")),
    ({"checkpoint_format": "gptq", "format": "gptq_v2"}, None, ("contradicts", "'gptq_v2'", "'gptq'")),
    ({"method": "awq"}, None, ("contradicts", "'awq'", "'gptq'")),
    ({"method": "awq", "quant_method": None}, None, ("'awq'", "not supported")),
    ({"format": "marlin"}, None, ("'marlin'", "not supported")),
    ({"format": ["gptq"]}, None, ("a list", "not supported")),
    ({"desc_act": True}, None, ("desc_act", "a.g_idx", "missing")),
    ({"desc_act": True}, torch.zeros(256), ("desc_act", "a.g_idx", "zeros")),
    ({}, torch.arange(256).clamp(max=3), ("a.g_idx", "64 columns")),
    ({}, (torch.arange(256) // 64).clamp(max=2), ("a.g_idx", "64 columns")),
    ({}, torch.arange(4).repeat_interleave(torch.tensor([64, 65, 63, 64])), ("a.g_idx", "64 columns")),
    ({}, torch.arange(256) // 64 - 1, ("groups that are not there",)),
]


@pytest.mark.parametrize(("says", "order", "words"), WRONG, ids=lambda each: str(each)[:40])
def test_what_the_numbers_prove_wrong_is_refused(says, order, words, tmp_path):
    tensors, _ = layouts.gptq("a.weight", torch.randn(64, 256), symmetric=False, group=64)
    if order is not None:
        tensors["a.g_idx"] = order.int()
    about = {"quantization_config": {"quant_method": "gptq"} | says}
    with pytest.raises(CheckpointError) as error:
        read(tensors, tmp_path / "model.safetensors", about)
    assert all(word in str(error.value) for word in ("model.safetensors", *words)), error.value
    assert "ownload it again" not in str(error.value)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_that_programs_read_differently_are_refused(bits, tmp_path):
    """The largest number, if one more than what is stored is meant."""
    tensors, _ = layouts.gptq("a.weight", torch.randn(64, 256), bits=bits, symmetric=False, more=0)
    tensors["a.qzeros"] = layouts.words(torch.full((64, 2), 2**bits - 2), bits).T.contiguous()
    assert read(tensors, tmp_path / "x", GPTQ).parts[1].max() == 2**bits - 2
    tensors["a.qzeros"][0, 0] |= 1
    with pytest.raises(CheckpointError, match=f"stored as {2**bits - 1}.* as {2**bits}\\)"):
        read(tensors, tmp_path / "x", GPTQ)


def test_the_description_of_before_config_json(tmp_path):
    """AutoGPTQ wrote a file of its own, which named no method."""
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256), symmetric=False)
    save_file(tensors, tmp_path / "model.safetensors")
    about = {"bits": 4, "group_size": 128, "sym": False, "desc_act": False}
    for name in ("config.json", "quantize_config.json"):
        refused(tmp_path / "model.safetensors", "config.json", "quantize_config.json", loader=open_checkpoint)
        (tmp_path / name).write_text(json.dumps(about), "utf-8")
    assert torch.equal(open_checkpoint(tmp_path / "model.safetensors").tensors["a.weight"].float(), wide)


def test_odd_shapes_of_bitsandbytes(tmp_path):
    for shape in ((3, 7), (1, 1), (5, 64), (64, 5)):
        tensors, wide = layouts.bitsandbytes("a.weight", torch.randn(*shape))
        assert torch.equal(read(tensors, tmp_path / "x").float(), wide)


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_a_rotation_undoes_itself(size):
    weight = torch.randn(5, 512)
    wanted = (weight.double().unflatten(1, (-1, size)) @ comfy_quant.rotation(size).T).flatten(1)
    assert_as_exact(lambda: rotate_groups(weight, size), wanted)
    assert_as_exact(lambda: rotate_groups(rotate_groups(weight, size), size), weight)


# What rounding costs: the figures in files/quantised.py

ERRORS = {  # format -> root mean square of the error by that of the numbers, in percent
    "int8_tensorwise": 1.1,
    "int8 by row": 0.8,
    "int8 convrot": 0.8,
    "nvfp4": 9.5,
    "mxfp8": 2.6,
    "nf4": 9.2,
    "fp4": 12,
    "int8 of bitsandbytes": 0.8,
    "autoround": 11,
    "gptq in 8 bits": 0.65,
}


def error_of(name, weight, path):
    """The error of a format for ``weight``, as it is read, in percent."""
    if name in MATRICES:
        pack, about = MATRICES[name]
        tensors = pack("a.weight", weight)[0]
    else:
        about, size = None, {"convrot_groupsize": 256} if name in comfy_quant.ROTATED else {}
        parts = comfy_quant.quantised(weight, name, **size)[0]
        tensors = {f"a.{part}": tensor for part, tensor in parts.items()}
        tensors["a.comfy_quant"] = comfy_quant.mark(comfy_quant.MARKS.get(name, {"format": name}) | size)
    return 100 * float((read(tensors, path, about).float() - weight).norm() / weight.norm())


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_a_format(name, tmp_path):
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    assert error_of(name, weight, tmp_path / "x") == pytest.approx(ERRORS[name], rel=0.06)


def test_what_rotation_is_for(tmp_path):
    """A number of 40 in a row makes the steps of all others coarse; rotated, it does not."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 40
    errors = [error_of(name, weight, tmp_path / "x") for name in ("int8 by row", "int8 convrot")]
    assert errors == pytest.approx([5.7, 0.76], rel=0.06)


@pytest.mark.parametrize(("name", "total"), [("nf4", 13), ("autoround", 14.7)])
def test_what_a_second_rounding_to_4_bits_costs(name, total, tmp_path):
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    pack, about = MATRICES[name]
    matrix = read(pack("a.weight", weight)[0], tmp_path / "x", about)
    again = in_storage(*narrow_matrix(matrix, INT4), torch.float32).view_as(weight)
    assert 100 * float((again - weight).norm() / weight.norm()) == pytest.approx(total, rel=0.06)


# Models

FILES = {  # name -> family, how its matrices are packed, config.json, and the storage in which they are kept
    "nf4": ("emu3.5", layouts.bitsandbytes, None, None),
    "int8 of bitsandbytes": ("janus-pro", layouts.llm_int8, None, INT8),
    "autoround": ("glm-image", partial(layouts.gptq, group=32), AUTOROUND, None),
    "autoround, groups of 64": ("simplear", partial(layouts.gptq, group=64), AUTOROUND, INT4),
}


def written(name, folder):
    """A tiny model, packed, and the wide values of its tensors in another folder."""
    family, pack, about, _ = FILES[name]
    sizes = {"dim": 64} if "64" in name else {}
    folders = folder / "narrow", folder / "wide"
    for each in folders:
        each.mkdir()
    narrow, wide = (FAMILIES[family].write(each, layers=2, **sizes) for each in folders)
    values = layouts.in_folder(narrow, pack, about)
    rewritten(wide, lambda tensors: ({key: values[key] for key in tensors}, {}))
    return narrow, wide


@pytest.mark.parametrize("name", FILES)
def test_a_model_loads_and_draws(name, tmp_path):
    narrow, wide = written(name, tmp_path)
    storage = FILES[name][-1]
    assert stays_narrow(narrow) == storage and count_weights(narrow) == count_weights(wide)
    found, wanted = load_model(narrow), load_model(wide)
    for key, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(key), parameter), key
    kept = load_model(narrow, storage=storage)
    assert any(isinstance(layer, NarrowLinear) for layer in kept.modules()) == bool(storage)
    draws = [api.sample(model, model.encode_prompt("3"), NextToken(), top_k=16, seed=1) for model in (found, wanted)]
    assert torch.equal(draws[0].tokens, draws[1].tokens)
    assert api.sample(kept, kept.encode_prompt("3"), NextToken()).tokens.shape == draws[0].tokens.shape


def test_4_bits_of_a_file_stay_what_they_are(tmp_path):
    """But for step and minimum, in bf16. Rounded again, as other files are, they change more."""
    tensors, wide = layouts.gptq("a.weight", torch.randn(64, 256))
    numbers, scale = read(tensors, tmp_path / "x", AUTOROUND).kept()
    assert numbers.shape == (64, 4, 32) and scale.shape == (64, 4, 2) and scale.dtype == BF16
    assert torch.equal(scale[:, ::2], scale[:, 1::2]), "two groups of 64 for one of 128"
    restored = in_storage(numbers, scale, torch.float32).view_as(wide)
    assert float((restored - wide).norm() / wide.norm()) < 0.002
    halves = torch.cat((numbers & 15, numbers >> 4), dim=-1).flatten(1).float()
    steps = tensors["a.scales"].T.repeat_interleave(128, 1).float()
    assert torch.equal((halves - 8) * steps, wide)


WITHOUT = ["janus-pro", "lumina-mgpt", "anole", "emu3", "emu3.5", "simplear", "glm-image"]  # some biases, or all


def with_biases(value):
    """AutoGPTQ gives every layer a bias, of zeros where there was none."""

    def change(tensors):
        layers = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
        added = {f"{layer}.bias": torch.full_like(tensors[f"{layer}.scales"][0], value) for layer in layers}
        return added | tensors, {}

    return change


@pytest.mark.parametrize("name", WITHOUT)
def test_biases_of_zeros_are_no_biases(name, tmp_path):
    path = FAMILIES[name].write(tmp_path, layers=1)
    layouts.in_folder(path, partial(layouts.gptq, group=8), GPTQ)
    wanted = load_model(path)
    rewritten(path, with_biases(0))
    found = load_model(path)
    seen, opened = (family_of(each(model_file(path))) for each in (outline, open_checkpoint))
    assert found.family == wanted.family and seen == opened
    for key, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(key), parameter), key
    prompt = wanted.encode_prompt("3")
    tokens = torch.zeros(1, wanted.layout().length, dtype=torch.long) if wanted.layout().lead else torch.zeros(1, 4, 4)
    logits = [teacher_forced(model, prompt, tokens.long()) for model in (found, wanted)]
    assert torch.equal(*logits)


def test_other_biases_are_not_left_out(tmp_path):
    path = FAMILIES["emu3"].write(tmp_path, layers=1)
    layouts.in_folder(path, partial(layouts.gptq, group=8), GPTQ)
    rewritten(path, with_biases(0))
    half = {"model.text_model.layers.0.mlp.up_proj.bias": 0.5, "text_model.model.layers.0.mlp.up_proj.bias": 0.5}
    rewritten(path, lambda t: ({key: tensor + half.get(key, 0) for key, tensor in t.items()}, {}))
    refused(path, "does not fit", "w1_w3.bias")


# What is refused

REFUSED = [  # a matrix, parts of it that differ (None: left out), config.json, and what is said
    ("autoround", {}, {"quantization_config": None}, ("config.json", "whole folder")),
    ("autoround", {}, layouts.config("awq", version="gemm"), ("'awq'", "as they were released")),
    ("autoround", {}, layouts.config("auto-round", packing_format="auto_round:auto_awq"), ("auto_round:auto_awq",)),
    ("autoround", {}, layouts.config("gptq", checkpoint_format="marlin"), ("'gptq'", "'marlin'")),
    ("autoround", {"scales": None}, {}, ("lacks a.scales",)),
    ("autoround", {"scales": torch.ones(1, 64)}, {}, ("qzeros has the shape",)),
    ("autoround", {"qweight": torch.ones(8, 8)}, {}, ("qweight has the shape",)),
    ("autoround", {"qzeros": torch.full((2, 8), -1, dtype=torch.int32)}, {}, ("zero points", "sym")),
    ("autoround", {"qzeros": torch.full((2, 8), -1, dtype=torch.int32)}, GPTQ, ("stored as 15", "gptq_v2")),
    ("autoround", {"qzeros": torch.zeros(2, 6, dtype=torch.int32)}, GPTQ, ("3 bits", "released")),
    ("autoround", {"g_idx": torch.full((256,), 2, dtype=torch.int32)}, {}, ("groups that are not there",)),
    ("autoround", {"g_idx": torch.zeros(3, dtype=torch.int32)}, {}, ("g_idx has the shape",)),
    ("nf4", {"weight.absmax": None}, {}, ("lacks", "absmax")),
    ("nf4", {"weight.absmax": torch.ones(3)}, {}, ("absmax has the shape",)),
    ("nf4", {"weight.quant_map": torch.ones(3)}, {}, ("quant_map has the shape",)),
    ("nf4", {"weight.nested_absmax": torch.ones(300)}, {}, ("nested_absmax has the shape",)),
    ("nf4", {"weight.nested_quant_map": torch.ones(3)}, {}, ("nested_quant_map has the shape",)),
    ("nf4", {"weight": torch.ones(3, 1, dtype=torch.uint8)}, {}, ("weight has the shape",)),
    ("nf4", {"weight": None}, {}, ("lacks a.weight",)),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": None}, {}, ("quant_state", "a.weight", "as they were released")),
    ("int8 of bitsandbytes", {"weight_format": torch.tensor(2, dtype=torch.uint8)}, {}, ("order", "released")),
    ("int8 of bitsandbytes", {"SCB": torch.ones(3)}, {}, ("SCB has the shape",)),
    ("int8 of bitsandbytes", {"SCB": None}, {}, ("SCB", "as they were released")),
    ("int8 of bitsandbytes", {"weight": torch.ones(2, 2)}, {}, ("weight has the shape",)),
]


@pytest.mark.parametrize(("name", "changes", "about", "words"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_cannot_be_read_is_refused_in_words(name, changes, about, words, tmp_path):
    pack, config = MATRICES[name]
    tensors = pack("a.weight", torch.randn(64, 256))[0] | {f"a.{part}": tensor for part, tensor in changes.items()}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps((config or {}) | about), "utf-8")
    refused(tmp_path / "model.safetensors", *words, loader=open_checkpoint)


def test_scales_that_are_not_finite_are_refused(tmp_path):
    path, layer = FAMILIES["simplear"].write(tmp_path, layers=2), "model.layers.1.mlp.down_proj"
    layouts.in_folder(path, layouts.llm_int8, None)
    nan = {f"{layer}.SCB": torch.full((32,), torch.nan)}
    refused(rewritten(path, lambda tensors: (tensors | nan, {})), "NaN")


BIG = 2**40
STATES = [  # what the description of a matrix states
    ({"shape": [BIG, BIG]}, "more than any file holds"),
    ({"shape": [BIG, 2]}, "weight has the shape"),
    ({"shape": [64, 32, 1]}, "3 dimensions"),
    ({"shape": None}, "sizes"),
    ({"shape": [0, 32]}, "weight has the shape"),
    ({"blocksize": 0}, "blocksize is 0"),
    ({"blocksize": True}, "blocksize is True"),
    ({"nested_blocksize": BIG}, "nested_blocksize"),
    ({"nested_offset": float("nan")}, "nested_offset is nan"),
    ({"nested_offset": "1"}, "nested_offset is '1'"),
]


@pytest.mark.parametrize(("change", "words"), STATES, ids=str)
def test_descriptions_are_checked_before_they_are_used(change, words, tmp_path):
    tensors, _ = layouts.bitsandbytes("a.weight", torch.randn(32, 64))
    state = "a.weight.quant_state.bitsandbytes__nf4"
    about = json.loads(bytes(tensors[state].tolist())) | change
    save_file(tensors | {state: comfy_quant.mark(about)}, tmp_path / "x.safetensors")
    for load in (open_checkpoint, outline):
        refused(tmp_path / "x.safetensors", state if "weight has" not in words else "a.weight", words, loader=load)


@pytest.mark.parametrize("size", [0, 8, BIG, "16"])
def test_sizes_of_groups_are_checked_before_they_are_used(size, tmp_path):
    kind = "int8 convrot"
    tensors = {f"a.{part}": each for part, each in comfy_quant.quantised(torch.randn(4, 64), kind)[0].items()}
    tensors["a.comfy_quant"] = comfy_quant.mark(comfy_quant.ROTATED[kind] | {"convrot_groupsize": size})
    save_file(tensors, tmp_path / "x.safetensors")
    for load in (open_checkpoint, outline):
        refused(tmp_path / "x.safetensors", "power of 4", loader=load)


def test_long_descriptions_are_not_read(tmp_path):
    save_file({"a.comfy_quant": torch.zeros(5000, dtype=torch.uint8), "a.weight": torch.ones(2, 2)}, tmp_path / "x.sft")
    for load in (open_checkpoint, outline):
        refused(tmp_path / "x.sft", "a.comfy_quant", "no short string", loader=load)


def test_pickles_are_read_too(tmp_path):
    tensors, wide = layouts.bitsandbytes("a.weight", torch.randn(32, 64))
    torch.save(tensors, tmp_path / "x.pt")
    assert torch.equal(open_checkpoint(tmp_path / "x.pt").tensors["a.weight"].float(), wide)
    assert outline(tmp_path / "x.pt").tensors["a.weight"].shape == wide.shape
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", "Save it as .safetensors", loader=outline)


def test_the_numbers_stay_in_the_file_until_they_are_used(tmp_path):
    """Kept int8 is mapped, not copied."""
    narrow, _ = written("int8 of bitsandbytes", tmp_path)
    file = load_file(str(narrow / "model.safetensors"))
    opened = open_checkpoint(narrow / "model.safetensors").tensors
    name = next(key.removesuffix(".SCB") for key in file if key.endswith(".SCB"))
    numbers, _ = opened[f"{name}.weight"].kept()
    assert numbers.data_ptr() == opened[f"{name}.weight"].parts[0].data_ptr()
