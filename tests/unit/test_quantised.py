"""Weights in one byte per number: what rounding does, and that every family loads and generates with them."""

from functools import partial
from itertools import cycle

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.device.cpu import unpack
from comfyui_specar.kernels.linear import GROUP, widen
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.models.networks import quantised
from comfyui_specar.models.networks.quantised import NarrowLinear, quantise, quantise_groups
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ..support import tiny_mar
from ..support.bad_files import refused
from ..support.every_family import FAMILIES
from ..support.models import teacher_forced
from ..support.tiny import write_llamagen
from ..support.tiny_simplear import write as write_simplear

INT8, FP8, INT4 = torch.int8, torch.float8_e4m3fn, torch.uint4
SELF_CONTAINED = [name for name in FAMILIES if name != "llamagen-t2i"]  # those whose folder has a text encoder


def restored(narrow: NarrowLinear) -> torch.Tensor:
    """The matrix that a narrow one stands for."""
    if narrow.scale is None:
        return narrow.weight.view(FP8).float()
    if narrow.scale.ndim == 3:
        step, minimum = narrow.scale.float().split(1, dim=-1)
        levels = torch.cat((narrow.weight % 16, narrow.weight // 16), dim=-1)
        return (levels * step + minimum).flatten(1)[:, : narrow.in_features]
    return narrow.weight.float() * narrow.scale[:, None]


# Rounding


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_number_moves_by_more_than_half_a_level(rows, columns, power, dtype):
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    magnitudes = 10.0 ** torch.linspace(-2, 2, rows)[:, None] * 10.0**power
    weight = (torch.randn(rows, columns, generator=generator) * magnitudes).to(dtype)
    rounded, scale = quantise(weight)
    assert rounded.dtype == INT8 and scale.dtype == torch.float32 and int(rounded.min()) >= -127
    error = (rounded.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5001).all()  # levels of up to 127 are off by 127 * 2^-23 in fp32
    assert (rounded.abs().amax(1) == 127).all(), "every row uses its whole range"


def test_rows_are_rounded_in_parts(monkeypatch):
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    wanted = quantise(weight)
    monkeypatch.setattr(quantised, "_TOGETHER", 70)  # two rows
    assert all(torch.equal(a, b) for a, b in zip(quantise(weight), wanted, strict=True))


def test_rows_of_zeros_and_the_smallest_numbers_stay_finite():
    weight = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [3e38, -1e38], [1e-38, 0.0]])
    rounded, scale = quantise(weight)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert ((rounded * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_scale(value):
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    assert torch.isfinite(quantise(weight)[1]).tolist() == [True, False, True]
    finite = torch.isfinite(quantise_groups(torch.cat((weight, torch.ones(3, 2 * GROUP - 4)), 1))[1]).all(-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]


# Groups of 4 bits


def by_groups(weight):
    """[N, K] -> [N, groups, GROUP], the last number repeated."""
    last = weight[:, -1:].expand(-1, -weight.shape[1] % GROUP)
    return torch.cat((weight, last), dim=1).unflatten(1, (-1, GROUP))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_number_moves_by_more_than_a_thirtieth_of_its_groups_range(rows, columns, power, dtype):
    """But for the rounding of step and minimum to bf16, of 2^-9 each."""
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    magnitudes = 10.0 ** torch.linspace(-2, 2, rows)[:, None] * 10.0**power
    weight = (torch.randn(rows, columns, generator=generator) * magnitudes).to(dtype)
    rounded, scale = quantise_groups(weight)
    groups = -(-columns // GROUP)
    assert rounded.dtype == torch.uint8 and rounded.shape == (rows, groups, GROUP // 2)
    assert scale.dtype == torch.bfloat16 and scale.shape == (rows, groups, 2)
    found = widen(rounded, scale, torch.float64)
    wanted = by_groups(weight).double()
    spread, largest = wanted.amax(-1) - wanted.amin(-1), wanted.abs().amax(-1)
    bound = spread / 30 * (1 + 2**-8) + largest * 2**-8
    assert ((found.view_as(wanted) - wanted).abs() <= bound[..., None]).all()


def test_groups_use_all_levels_and_know_no_others():
    """A group far from zero keeps its resolution, and an outlier costs only its own group."""
    weight = torch.linspace(-1, 1, GROUP).repeat(2, 3)
    weight[0, GROUP : 2 * GROUP] += 100
    weight[1, 5] = 1000
    rounded, scale = quantise_groups(weight)
    levels = torch.cat((rounded & 15, rounded >> 4), dim=-1)
    assert levels[1, 1:].flatten(0).unique().tolist() == list(range(16))
    assert torch.equal(scale[0, 0], scale[1, 2]) and torch.equal(rounded[0, 0], rounded[1, 2])
    error = (widen(rounded, scale, torch.float32) - weight).abs().view(2, 3, GROUP).amax(-1)
    assert (error[0] <= torch.tensor([0.068, 0.068 + 0.25, 0.068])).all() and (error[1, 1:] <= 0.068).all()


def test_groups_of_equal_numbers_are_kept():
    for value in (0.0, 1.0, -0.375, 1e30, 1e-30):
        weight = torch.full((2, 70), value).bfloat16()
        assert torch.equal(widen(*quantise_groups(weight), torch.bfloat16)[:, :70], weight)


# Models


# Rounding knows no families: each of these has one storage, and one of them all.
CASES = [*zip(SELF_CONTAINED, cycle((INT8, INT4)), strict=False), *(("simplear", kind) for kind in (INT8, FP8, INT4))]
CASES = sorted(set(CASES), key=str)


@pytest.mark.parametrize(("name", "storage"), CASES, ids=str)
def test_every_family_computes_with_the_rounded_weights_and_generates(name, storage, tmp_path):
    """With Gumbel noise, SJD generates what the next-token sampler generates: how wide a pass is does not matter."""
    folder = FAMILIES[name].write(tmp_path, layers=2)
    whole, narrow = load_model(folder), load_model(folder, storage=storage)
    layers = {n: m for n, m in narrow.named_modules() if isinstance(m, NarrowLinear)}
    parts = (".layers.", "backbone.output") if storage == INT8 else (".layers.",)
    wanted = {n for n, m in whole.named_modules() if isinstance(m, nn.Linear) and any(part in n for part in parts)}
    assert set(layers) == wanted and len(wanted) >= 8 and narrow.dtype == torch.float32
    assert {p.dtype for n, p in narrow.named_parameters() if n.rpartition(".")[0] not in layers} == {torch.float32}
    assert {layer.weight.dtype for layer in layers.values()} == {INT8 if storage == INT8 else torch.uint8}, "Metal's"
    prompt = narrow.encode_prompt("3")
    layout = narrow.layout()
    tokens = (torch.arange(layout.length)[None] if layout.lead else torch.arange(16).view(1, 4, 4)) % narrow.vocab
    before = teacher_forced(whole, prompt, tokens)
    unpack(whole)
    for n, layer in layers.items():
        linear = whole.get_submodule(n)
        difference = (restored(layer) - linear.weight).abs()
        bound = {
            INT8: lambda: 0.501 * layer.scale[:, None],
            FP8: lambda: (linear.weight.to(FP8).float() - linear.weight).abs(),
            INT4: lambda: (
                0.501 * layer.scale[..., :1].repeat(1, 1, GROUP).flatten(1)[:, : linear.in_features]
                + linear.weight.abs().amax() * 2**-8
            ),
        }[storage]()
        assert (difference <= bound).all() and difference.any()
        linear.weight.copy_(restored(layer))
    found = teacher_forced(narrow, prompt, tokens)
    torch.testing.assert_close(found, teacher_forced(whole, prompt, tokens), rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-3, "rounding shows"

    ask = partial(api.sample, narrow, prompt, cfg=2.0 if narrow.guidance else 1.0, top_k=16, seed=1)
    assert torch.equal(ask(SJD(window=5, reuse="gumbel")).tokens, ask(NextToken()).tokens)


def test_a_matrix_in_several_tensors_is_rounded_row_by_row(tmp_path):
    """Queries, keys and values come apart in most files."""
    folder = write_simplear(tmp_path)
    weights = load_file(folder / "model.safetensors")
    layer = load_model(folder, storage=INT8).backbone.layers[0].attention.wqkv
    stacked = torch.cat([weights[f"model.layers.0.self_attn.{part}_proj.weight"].float() for part in "qkv"])
    rounded, scale = quantise(stacked)
    assert torch.equal(layer.weight, rounded) and torch.equal(layer.scale, scale)
    assert layer.bias is not None and layer.bias.dtype == torch.float32


@pytest.mark.parametrize("storage", [INT8, FP8, INT4], ids=str)
def test_a_layer_is_one_graph(storage, tmp_path):
    """Nothing in it is read on the host."""
    model = load_model(write_simplear(tmp_path), storage=storage)
    layer, x = model.backbone.layers[0].attention.wqkv, torch.randn(2, 3, model.backbone.config.dim)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_other_precisions_compute_with_the_same_levels(tmp_path):
    folder = FAMILIES["llamagen-c2i"].write(tmp_path, layers=1)
    wide, half = load_model(folder, storage=INT8), load_model(folder, dtype=torch.bfloat16, storage=INT8)
    name = "layers.0.feed_forward.w2"
    assert torch.equal(wide.backbone.get_submodule(name).weight, half.backbone.get_submodule(name).weight)
    assert half.backbone.get_submodule(name).scale.dtype == torch.float32
    tokens = torch.zeros(1, 4, 4, dtype=torch.int64)
    prompt = wide.encode_prompt("3")
    found, wanted = (teacher_forced(model, prompt, tokens) for model in (half, wide))
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.3)


# What is refused


def spoilt(tmp_path, change):
    """A tiny model of which one matrix was changed."""
    file = write_llamagen(tmp_path / "model.safetensors", False)
    weights = load_file(file)
    name = "layers.1.feed_forward.w2.weight"
    weights[name] = change(weights[name])
    with safe_open(str(file), "pt") as opened:
        about = opened.metadata()
    save_file(weights, file, about)
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.index_fill(0, torch.tensor([2]), float("nan")), "w2.weight.*NaN"),
        (lambda w: w.index_fill(1, torch.tensor([2]), float("inf")), "w2.weight.*NaN"),
        (lambda w: w[:, ::2].to(torch.int8), "w2.weight.*torch.int8.*quantisation"),  # which is half as wide
        (lambda w: w[:, :-1].contiguous(), "w2.weight.*shape"),
    ],
    ids=["NaN", "infinite", "whole", "shape"],
)
@pytest.mark.parametrize("storage", [INT8, INT4], ids=str)
def test_files_that_cannot_be_rounded(tmp_path, change, message, storage):
    with pytest.raises(CheckpointError, match=message):
        load_model(spoilt(tmp_path, change), storage=storage)


def test_numbers_too_large_for_the_precision_are_no_damage(tmp_path):
    file, bf16, fp16 = spoilt(tmp_path, lambda w: w * 1e6), torch.bfloat16, torch.float16
    for storage in (None, INT8, INT4):
        load_model(file, dtype=bf16, storage=storage)
    for dtype, storage in ((fp16, None), (fp16, INT8), (fp16, INT4), (bf16, FP8)):
        with pytest.raises(CheckpointError, match="w2.weight.*too large for torch.float.*bf16"):
            load_model(file, dtype=dtype, storage=storage)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.float8_e5m2], ids=str)
def test_other_storage_is_refused(tmp_path, storage):
    with pytest.raises(ValueError, match=f"storage.*{storage}.*torch.int8, torch.float8_e4m3fn"):
        load_model(tmp_path, storage=storage)


@pytest.mark.parametrize("storage", [INT8, FP8, INT4], ids=str)
def test_continuous_models_are_refused(tmp_path, storage):
    refused(tiny_mar.write_mar(tmp_path / "vectors.safetensors"), "vectors", "continuous", "int8", storage=storage)


def test_drafters_stay_in_the_models_precision(tmp_path):
    write = FAMILIES["janus-pro"].write
    model, drafter = load_model(write(tmp_path / "large"), storage=INT8), write(tmp_path / "small", layers=1)
    drafter = load_drafter(drafter, model)
    assert {p.dtype for p in drafter.module.parameters()} == {torch.float32}
