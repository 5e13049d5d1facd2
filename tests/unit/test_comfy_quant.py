"""Files that ComfyUI's tools quantised: what is read of them, in which storage it stays, and what is refused."""

import json
import math
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import count_weights, load_model, stays_narrow
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, open_checkpoint, outline, use_mmap
from comfyui_specar.model_loaders.files.quantised import LazyMatrix
from comfyui_specar.model_loaders.files.scaled import with_scales
from comfyui_specar.models.networks.quantised import NarrowLinear
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file, save_file

from ..support import comfy_quant, tiny_mar
from ..support.comfy_quant import FP8, INT8, quantise_file, rewritten
from ..support.every_family import FAMILIES
from ..support.models import teacher_forced

SELF_CONTAINED = [name for name in FAMILIES if name != "llamagen-t2i"]  # those whose folder has a text encoder
KEPT = {"float8_e4m3fn": FP8, "int8_tensorwise": INT8, "int8 by row": INT8}
KINDS = KEPT | {"nvfp4": None, "mxfp8": None} | dict.fromkeys(comfy_quant.ROTATED)


def both(name, tmp_path, kind, **options):
    """Paths of a tiny model quantised, and of the same in the wide values of its numbers."""
    for which in ("narrow", "wide"):
        (tmp_path / which).mkdir(parents=True)
    narrow, wide = (FAMILIES[name].write(tmp_path / which, layers=2) for which in ("narrow", "wide"))
    rewritten(narrow, lambda tensors: (quantise_file(tensors, kind, **options)[0], {}))
    rewritten(wide, lambda tensors: (quantise_file(tensors, kind, **options)[1], {}))
    return narrow, wide


def same(found, wanted, kind):
    """Whether a matrix is as wanted: to the last bit, but turned in fp32 and not in fp64 (see convrot.rotated)."""
    error, steps = (found - wanted).abs().max(), 4 if kind in comfy_quant.ROTATED else 0  # of groups of 256 = 4^4
    return error <= steps * 2.0**-22 * wanted.abs().max()


def assert_same_models(narrow, wide):
    """Whatever is loaded of the second file is in the first, to the last bit."""
    found, wanted = load_model(narrow).state_dict(), load_model(wide).state_dict()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


# What a format means is decided in one place, before any family sees it: so each family once, and each format once.
CASES = [(name, "float8_e4m3fn") for name in SELF_CONTAINED] + [("simplear", kind) for kind in list(KINDS)[1:]]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_family_and_every_format_load(name, kind, tmp_path):
    narrow, wide = both(name, tmp_path, kind)
    assert stays_narrow(narrow) == KINDS[kind] and stays_narrow(wide) is None
    assert count_weights(narrow) == count_weights(wide)
    widened, wanted = load_model(narrow), load_model(wide)
    for key, parameter in wanted.named_parameters():
        found = widened.get_parameter(key)
        assert same(found, parameter, kind), "loaded in fp32, they are widened"
    if KINDS[kind] is None:
        return
    kept = load_model(narrow, storage=KINDS[kind])
    layers = [layer for layer in kept.modules() if isinstance(layer, NarrowLinear)]
    assert len(layers) >= 8 and all(layer.scale is not None for layer in layers)
    if KINDS[kind] == FP8:  # which leaves heads wide
        layout = kept.layout()
        shape = (1, layout.length) if layout.lead else (1, 4, 4)  # with the tokens before the image, or an image
        prompt, tokens = kept.encode_prompt("3"), torch.arange(math.prod(shape)).view(shape) % kept.vocab
        found = teacher_forced(kept, prompt, tokens)
        torch.testing.assert_close(found, teacher_forced(wanted, prompt, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KEPT)
def test_numbers_and_scales_stay_what_they_are(kind, tmp_path):
    narrow, wide = both("simplear", tmp_path, kind)
    file, model = load_file(str(narrow / "model.safetensors")), load_model(narrow, storage=KINDS[kind])
    layer = model.backbone.layers[1].feed_forward.w2
    numbers = file["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(layer.weight, numbers.view(torch.uint8) if KINDS[kind] == FP8 else numbers)
    scale = file["model.layers.1.mlp.down_proj.weight_scale"]
    assert torch.equal(layer.scale, scale.flatten().expand(len(numbers)))
    stacked = model.backbone.layers[0].attention.wqkv
    scales = [file[f"model.layers.0.self_attn.{part}_proj.weight_scale"] for part in "qkv"]
    assert {float(scale) for scale in stacked.scale} == {float(one) for scale in scales for one in scale.flatten()}
    restored = layer.weight.view(KINDS[kind]).float() * layer.scale[:, None]
    assert torch.equal(restored, load_model(wide).backbone.layers[1].feed_forward.w2.weight)
    prompt = model.encode_prompt("3")
    assert api.sample(model, prompt, NextToken(), top_k=16, seed=1).tokens.shape == (1, 4, 4)


PADDED = [*product(("emu3.5", "simplear", "llamagen-c2i"), ("layers.", "layers.1.mlp", "head"), ("nvfp4", "mxfp8"))]
FEW = {PADDED[i] for i in (0, 3, 4, 7, 8, 11, 12, 15, 16)}  # every family with every part, each in one of the formats


@pytest.mark.parametrize(
    ("name", "which", "kind"), [pytest.param(*case, marks=[pytest.mark.whole] * (case not in FEW)) for case in PADDED]
)
def test_padding_is_left_out(name, which, kind, tmp_path):
    """Of rows and columns: known from biases, sizes of config.json, or what the model expects. As ComfyUI's tools do,
    sizes that are no multiples of 16 and 32 are filled up."""
    assert_same_models(*both(name, tmp_path, kind, chosen=lambda key: which in key and "embed" not in key))


def test_what_is_no_padding_stays_in_the_matrix():
    """Rows that are not zeros, and more of them than a format adds."""
    for rows, filled, said in ((40, 0, False), (40, 1, True), (32, 0, True)):
        weight = torch.cat((torch.ones(rows, 64), torch.full((64 - rows, 64), float(filled))))
        parts, wide = comfy_quant.quantised(weight, "mxfp8")
        matrix = with_scales(
            {f"a.{part}": tensor for part, tensor in parts.items()}
            | {"a.comfy_quant": comfy_quant.mark({"format": "mxfp8"}), "a.bias": torch.ones(rows)}
        )["a.weight"]
        assert matrix.shape == ((64, 64) if said else (rows, 64)) and torch.equal(matrix.float(), wide[: len(matrix)])


OTHERS = [("float8_e4m3fn", INT8), ("int8 by row", FP8), ("int8_tensorwise", torch.uint4), ("nvfp4", INT8)]


@pytest.mark.parametrize(("kind", "storage"), OTHERS, ids=str)
def test_other_storage_rounds_the_wide_values(kind, storage, tmp_path):
    narrow, wide = (load_model(path, storage=storage) for path in both("simplear", tmp_path, kind))
    for key, tensor in wide.state_dict().items():
        assert torch.equal(narrow.state_dict()[key], tensor)


def test_a_matrix_with_a_part_that_was_not_quantised(tmp_path):
    """fp8 without a scale beside fp8 with one."""
    narrow, wide = both("simplear", tmp_path, "float8_e4m3fn", chosen=lambda name: "q_proj" in name)
    model, plain = load_model(narrow, storage=FP8), load_model(wide)
    layer, matrix = model.backbone.layers[0].attention.wqkv, plain.backbone.layers[0].attention.wqkv.weight
    rows = len(load_file(str(narrow / "model.safetensors"))["model.layers.0.self_attn.q_proj.weight"])
    restored = layer.weight.view(FP8).float() * layer.scale[:, None]
    assert torch.equal(restored[:rows], matrix[:rows])
    assert torch.equal(restored[rows:], matrix[rows:].to(FP8).float()) and (layer.scale[rows:] == 1).all()


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_tables_and_heads_may_be_quantised_too(name, tmp_path):
    """Families read parts of their rows, and look into some."""
    assert_same_models(*both(name, tmp_path, "int8 by row", chosen=lambda key: True))


def marked_in_metadata(tensors):
    narrow, _ = quantise_file(tensors, "nvfp4")
    layers = {
        name.removesuffix(".comfy_quant"): json.loads(bytes(tensor.tolist()))
        for name, tensor in narrow.items()
        if name.endswith(".comfy_quant")
    }
    rest = {name: tensor for name, tensor in narrow.items() if not name.endswith(".comfy_quant")}
    return rest, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


@pytest.mark.parametrize("mapped", [True, False])
def test_layers_may_be_marked_in_the_metadata(tmp_path, mapped):
    narrow, wide = both("simplear", tmp_path, "nvfp4")
    other = rewritten(FAMILIES["simplear"].write(tmp_path / "other", layers=2), marked_in_metadata)
    try:
        use_mmap(mapped)
        assert_same_models(other, wide)
    finally:
        use_mmap(True)
    shapes = {name: tensor.shape for name, tensor in outline(other / "model.safetensors").tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in load_file(str(wide / "model.safetensors")).items()}


def test_layers_of_before_are_marked_by_their_scales(tmp_path):
    """And the file by a tensor scaled_fp8."""
    narrow, wide = both("simplear", tmp_path, "float8_e4m3fn")

    def as_before(tensors):
        names = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
        split = [(name.rpartition("."), tensor) for name, tensor in tensors.items() if not name.endswith("comfy_quant")]
        old = {f"{layer}.{names.get(part, part)}": tensor for (layer, _, part), tensor in split}
        return old | {"model.scaled_fp8": torch.zeros(2).to(FP8)}, {}

    rewritten(narrow, as_before)
    assert stays_narrow(narrow) == FP8
    assert_same_models(narrow, wide)


def test_scales_may_lie_in_another_shard(tmp_path):
    narrow, wide = both("simplear", tmp_path, "int8_tensorwise")
    tensors = load_file(str(narrow / "model.safetensors"))
    first = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    (narrow / "model.safetensors").unlink()
    shards = {f"model-0000{number}-of-00002.safetensors": part for number, part in ((1, first), (2, second))}
    for file, part in shards.items():
        save_file(part, str(narrow / file))
    index = {name: file for file, part in shards.items() for name in part}
    (narrow / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    assert stays_narrow(narrow) == INT8
    assert_same_models(narrow, wide)


def test_parts_of_rows_are_not_widened():
    """So that a large matrix is widened in parts when it is rounded again."""
    for kind in KINDS:
        parts, wide = comfy_quant.quantised(torch.randn(320, 64), kind)
        marked = {f"a.{name}": part for name, part in parts.items()}
        marked["a.comfy_quant"] = comfy_quant.mark(comfy_quant.MARKS.get(kind, {"format": kind}))
        matrix = with_scales(marked)["a.weight"]
        assert same(matrix.float(), wide, kind) and matrix.shape == wide.shape
        wide = matrix.float()
        assert torch.equal(matrix + 0, wide) and torch.equal(matrix.to(torch.bfloat16), wide.bfloat16())
        sizes = (100, (30, 100, 190))
        pieces = (pair for size in sizes for pair in zip(matrix.split(size), wide.split(size), strict=True))
        for found, wanted in ((matrix[7:140], wide[7:140]), *pieces):
            assert isinstance(found, LazyMatrix) and torch.equal(found.float(), wanted)
        assert torch.equal(matrix[torch.tensor([5, 2])], wide[[5, 2]]) and torch.equal(matrix[:, 3:5], wide[:, 3:5])


def test_continuous_models_are_widened(tmp_path):
    narrow, wide = (tiny_mar.write_mar(tmp_path / f"{which}.safetensors") for which in ("narrow", "wide"))
    found = quantise_file(load_file(str(wide)), "float8_e4m3fn", lambda name: "blocks." in name)
    rewritten(narrow, lambda _: (found[0], {}))
    rewritten(wide, lambda _: (found[1], {}))
    assert stays_narrow(narrow) is None
    assert_same_models(narrow, wide)


# What is refused

LAYER = "model.layers.1.mlp.down_proj"


def marked(about):
    return {"comfy_quant": comfy_quant.mark(about)}


REFUSED = [  # what is different about the tensors of a layer (None: it is left out), and what is said
    (marked({"format": "mxfp4"}), "mxfp4.*not supported"),
    (marked({"format": "int8_tensorwise", "convrot": True}), "convrot_groupsize is 256, not a power of 4 that divides"),
    (marked({"format": "int8_tensorwise", "params": {"convrot": 1, "convrot_groupsize": 8}}), "is 8, not a power of 4"),
    ({"pre_quant_scale": torch.ones(4)}, "not supported"),
    (marked({"format": "nvfp4"}), "weight has.*int8"),
    ({"comfy_quant": torch.zeros(3, dtype=torch.uint8)}, "comfy_quant cannot be read"),
    ({"comfy_quant": torch.ones(3)}, "comfy_quant cannot be read"),
    (marked([1]), "comfy_quant cannot be read"),
    ({"weight_scale": None}, f"lacks {LAYER}.weight_scale"),
    ({"weight": None}, f"lacks {LAYER}.weight"),
    ({"comfy_quant": None}, f"{LAYER}.weight_scale"),
    ({"weight_scale": torch.ones(3)}, r"weight_scale has.*\[3\]"),
    ({"weight_scale": torch.ones((), dtype=torch.int32)}, "weight_scale has.*int32"),
    ({"weight_scale": torch.tensor(float("nan"))}, "w2.weight.*NaN"),
    ({"weight": torch.ones(4, 4, dtype=INT8)}, "w2.weight.*shape"),
]


@pytest.fixture(scope="module")
def int8_file(tmp_path_factory):
    return both("simplear", tmp_path_factory.mktemp("int8"), "int8_tensorwise")[0]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_read_is_refused_in_words(int8_file, tmp_path, changes, message):
    def change(tensors):
        changed = tensors | {f"{LAYER}.{part}": tensor for part, tensor in changes.items()}
        return {name: tensor for name, tensor in changed.items() if tensor is not None}, {}

    path = rewritten(Path(shutil.copytree(int8_file, tmp_path / "copy")), change)
    for storage in (None, INT8):
        with pytest.raises(CheckpointError, match=message) as error:
            load_model(path, storage=storage)
        assert LAYER in str(error.value) or "w2.weight" in str(error.value)


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_scales_of_nvfp4_are_checked(tmp_path, part):
    path, _ = both("simplear", tmp_path, "nvfp4")
    name = f"{LAYER}.{part}"
    rewritten(path, lambda tensors: (tensors | {name: tensors[name].flatten().repeat(2)}, {}))
    with pytest.raises(CheckpointError, match=f"{name} has"):
        open_checkpoint(path / "model.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": []}', '{"layers": {"a": 3}}'])
def test_metadata_that_cannot_be_read(tmp_path, text):
    path = rewritten(FAMILIES["simplear"].write(tmp_path / "a"), lambda t: (t, {"_quantization_metadata": text}))
    with pytest.raises(CheckpointError, match="_quantization_metadata|comfy_quant|lacks a.weight"):
        load_model(path)
