"""dtype "auto" on a GPU: which storage is chosen for which card and model, before weights are read."""

import random
import re
from pathlib import Path

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.kernels import linear
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.storage import Plan, choose_storage, explain, storages
from comfyui_specar.models.memory import offload_embedding, weight_bytes
from comfyui_specar.models.networks.quantised import quantise_groups
from comfyui_specar.tools.benchmarks import automatic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..support.tiny_family import declared

GIB = 2**30
CARDS = 6, 8, 12, 16, 24, 32, 80
# GiB of weights in bf16, int8 and int4, and beside them in bf16 and in narrow storage. Weights of a layer: dim x (heads
# + 2 kv heads) x head_dim + dim^2 + 3 x dim x ffn numbers, of 2, 1 (and 4 bytes a row) and 9/16 bytes. Beside: keys and
# values of 2 branches, slots x kv heads x head_dim x layers x 2 x 2 bytes each; two of the largest matrix (gate and up)
# in bf16 if it is stored in another; 8 x 33 rows of probabilities a branch; activations; and 0.4 GiB. At least 1.2.
# What fits: 1.1 x the weights, and what is beside them.
# Lumina-mGPT-7B: 128 + 2432 slots, so caches of 2 x 2560 x 4096 x 32 x 2 x 2 bytes = 2.5 GiB, and matrices of
# 2 x 2 x 22016 x 4096 bytes = 0.34 GiB.
MODELS = {
    "llamagen-xl": ((1.45, 0.75, 0.47), (1.2, 1.2)),
    "janus-pro-1b": ((2.38, 1.19, 0.72), (1.2, 1.2)),
    "janus-pro-7b": ((11.50, 5.77, 3.37), (1.2, 1.51)),
    "lumina-mgpt-7b": ((12.19, 6.13, 3.52), (2.95, 3.29)),
    "emu3-8b": ((13.50, 6.88, 4.16), (2.57, 3.07)),
}
BF16, INT8, INT4 = None, torch.int8, torch.uint4
CHOSEN = {  # with Triton, on a card of so many GiB, of which 1 is taken: what fits, else the narrowest
    "llamagen-xl": (BF16,) * 7,
    "janus-pro-1b": (BF16,) * 7,
    "janus-pro-7b": (INT4, INT4, INT8, BF16, BF16, BF16, BF16),
    "lumina-mgpt-7b": (INT4, INT4, INT8, INT8, BF16, BF16, BF16),
    "emu3-8b": (INT4, INT4, INT8, INT8, BF16, BF16, BF16),
}
# Without, in GiB of the GPU's memory. Janus-Pro-7B moves 11.5 in bf16, 9 x 5.77 = 51.9 in int8, 13 / 0.5625 x 3.37 =
# 77.9 in int4. With 7 free: 11.5 + 16 x 5.7 = 102.7, 51.9 + 16 x 0.28 = 56.4, 77.9; with 11: 11.5 + 16 x 1.7 = 38.7,
# 51.9, 77.9. Lumina-mGPT with 11: 12.2 + 16 x 4.14 = 78.4, 55.2, 81.3; with 15: 12.2 + 16 x 0.14 = 14.4. Emu3 with 7:
# 13.5 + 16 x 9.07 = 158.6, 61.9 + 16 x 2.95 = 109.1, 96.1 + 16 x 0.23 = 99.7; with 15: 13.5 + 16 x 1.07 = 30.6, 61.9.
WITHOUT = CHOSEN | {
    "janus-pro-7b": (INT4, INT8, BF16, BF16, BF16, BF16, BF16),
    "lumina-mgpt-7b": (INT4, INT4, INT8, BF16, BF16, BF16, BF16),
    "emu3-8b": (INT4, INT4, INT8, BF16, BF16, BF16, BF16),
}
DISCRETE = declared("TINY", continuous=False)


def ways_of(weights, beside, dtype=torch.bfloat16, storages=(BF16, INT8, INT4)):
    sizes = zip(storages, weights, strict=True)
    return [Plan(dtype, each, int(size * GIB), beside[each is not None] * GIB) for each, size in sizes]


@pytest.mark.parametrize("reads_narrow", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_choice_for_every_card_and_model(name, reads_narrow):
    ways = ways_of(*MODELS[name])
    found = tuple(choose_storage(ways, (card - 1) * GIB, reads_narrow).storage for card in CARDS)
    assert found == (CHOSEN if reads_narrow else WITHOUT)[name]


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_those_of_the_models(name):
    ways, (weights, beside) = automatic.plans(name), MODELS[name]
    assert [round(way.weights / GIB, 2) for way in ways] == list(weights)
    assert [round(way.beside / GIB, 2) for way in ways] == [beside[0], beside[1], beside[1]]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("reads_narrow", [True, False])
def test_never_narrower_than_what_fits_nor_with_more_memory(seed, reads_narrow):
    draw = random.Random(seed)
    dtype, own = draw.choice([torch.bfloat16, torch.float16, torch.float32]), draw.choice([None, torch.int8])
    numbers, more, rest, room = (draw.uniform(0.1, 40) for _ in range(4))
    bytes_of = {None: dtype.itemsize, torch.int8: 1, torch.uint4: 0.5625}
    ways = [
        Plan(dtype, each, int((numbers * bytes_of[each] + more) * GIB), (rest + room * (each is not None)) * GIB)
        for each in storages(own, reads_narrow)
    ]
    chosen = [ways.index(choose_storage(ways, free * GIB, reads_narrow)) for free in range(0, 300)]
    assert chosen == sorted(chosen, reverse=True) and chosen[-1] == 0
    for free, index in enumerate(chosen):
        assert not any(way.bytes_needed <= free * GIB for way in ways[:index])


def test_where_nothing_fits_the_narrowest_copies_least_and_the_gpu_reads_least():
    """Whatever PCIe and the GPU's memory are, so with Triton its passes take least time."""
    for weights, beside in MODELS.values():
        ways = ways_of(weights, beside)
        for free in range(0, int(ways[-1].bytes_needed), GIB // 4):
            copied = [way.bytes_streamed(free) for way in ways]
            assert copied == sorted(copied, reverse=True) and choose_storage(ways, free, True) is ways[-1]
        assert [way.weights for way in ways] == sorted((way.weights for way in ways), reverse=True)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views read nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        result = function(*given, **(named or {}))
        if function.namespace == "aten" and not function.is_view:
            leaves = torch.utils._pytree.tree_leaves((given, named, result))
            self.bytes += sum(each.numel() * each.element_size() for each in leaves if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn, torch.uint4])
def test_the_bytes_that_widening_moves_are_those_of_its_operations(storage, dtype):
    """Of a matrix on a GPU, in the torch version of the kernel; the vectors beside it are small."""
    rows, columns = 2048, 1024
    if storage == torch.uint4:
        weight, scale = quantise_groups(torch.zeros(8, columns))
        weight, scale = weight.repeat(rows // 8, 1, 1), scale.repeat(rows // 8, 1, 1)
    else:
        weight = torch.zeros(rows, columns, dtype=torch.int8 if storage == torch.int8 else torch.uint8)
        scale = torch.ones(rows) if storage == torch.int8 else None
    size = weight.numel() + (0 if scale is None else scale.numel() * scale.element_size())
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        given = [None if each is None else fake.from_tensor(each).to("cuda:0") for each in (weight, scale)]
        x = torch.zeros(1, columns, dtype=dtype, device="cuda:0")
        with Traffic() as traffic:
            linear.few_rows.reference(x, *given)
    assert traffic.bytes == pytest.approx(Plan(dtype, storage, size, 0).bytes_moved(), rel=0.06)


@pytest.mark.parametrize(
    ("free", "reads_narrow", "words"),
    [
        (23, True, r"auto: bf16, as bf16 needs 16.4 GiB and 23.0 GiB are free$"),
        (11.1, True, r"auto: int8 \(storage\), as bf16 needs 16.4 GiB and 11.1 GiB are free$"),
        (8, True, r"auto: int4 .*bf16 needs 16.4 .*int8 \(storage\) needs 10.0 .* 4 bits change images much"),
        (5, True, r"int4 \(storage\) needs 7.2 GiB and 5.0 GiB are free; 1.8 GiB are copied(?!.*Triton)"),
        (14, False, r"auto: bf16, .*; 1.1 GiB are copied .*Triton"),
        (15.5, False, r"auto: bf16, .* 15.5 GiB are free, which is just enough$"),
    ],
)
def test_the_choice_in_words(free, reads_narrow, words):
    ways, free = ways_of(*MODELS["lumina-mgpt-7b"]), free * GIB
    assert re.search(words, explain(ways, choose_storage(ways, free, reads_narrow), free, reads_narrow))


def test_a_narrow_file_is_not_rounded_to_other_bits():
    """Without Triton, it is widened if that fits. One in 8 bits may become one in 4."""
    for own in (torch.float8_e4m3fn, torch.int8):
        assert storages(own, True) == (own, torch.uint4) and storages(own, False) == (None, own, torch.uint4)
    assert storages(torch.uint4, True) == (torch.uint4,) and storages(torch.uint4, False) == (None, torch.uint4)
    assert storages(None, True) == storages(None, False) == (None, torch.int8, torch.uint4)


@pytest.mark.parametrize("reads_narrow", [True, False])
def test_of_a_file_in_4_bits_nothing_is_said_about_what_it_changes(reads_narrow):
    wide, _, narrow = ways_of(*MODELS["lumina-mgpt-7b"])
    ways = [narrow if each else wide for each in storages(torch.uint4, reads_narrow)]
    said = explain(ways, ways[-1], 8 * GIB, reads_narrow)
    assert "int4 (storage)" in said and "change images" not in said


@pytest.mark.parametrize("family", DISCRETE)
def test_the_choice_is_made_before_any_weight_is_read(family, tmp_path):
    """For a model on the meta device, of which it knows what it will take with each storage."""
    file, asked = DISCRETE[family].write(tmp_path), []

    def choice(model):
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        asked.append({each: weight_bytes(model, model.dtype, each) for each in (None, torch.int8, torch.uint4)})
        return storage

    for storage in (None, torch.int8, torch.uint4):
        model = load_model(file, dtype=torch.bfloat16, storage=choice)
        offload_embedding(model)
        there = sum(parameter.numel() * parameter.element_size() for parameter in set(model.parameters()))
        assert asked.pop()[storage] == there and not asked


def test_a_continuous_model_has_no_choice():
    asked = []
    model = specar.load_model(specar.bundled("continuous"), storage=lambda model: asked.append(model))
    assert asked == [model]
    with pytest.raises(ValueError, match="storage is int8"):
        specar.load_model(Path("model.safetensors"), storage="int8")
