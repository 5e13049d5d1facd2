"""Keys and values in int8: what rounding does, that nothing else changes, and what it saves."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.kernels.rotation import factors_of
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.models.networks.cache import KVCache
from comfyui_specar.models.networks.positions import RotaryTable
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.captured_runs import assert_same_run, captured
from ..support.closeness import fp64
from ..support.every_family import FAMILIES, METHODS, TREE, asked, make_family
from ..support.tiny_mar import write_mar

ROWS, HEADS, SLOTS, DIM = 2, 2, 12, 8
FEW = ("llamagen-c2i", "emu3", "lumina-mgpt-2")  # shared key heads, norms of queries and keys, tokens between rows
few = pytest.mark.parametrize("family", FEW, indirect=True)


def given_tokens(count, seed=0, dtype=torch.float32, scale=1.0):
    """Queries, keys and values of new tokens [ROWS, count, 3 * HEADS, DIM], and factors that rotate nothing."""
    qkv = torch.randn((ROWS, count, 3 * HEADS, DIM), generator=torch.Generator().manual_seed(seed)) * scale
    factors = factors_of(torch.ones(ROWS, count, DIM // 2), torch.zeros(ROWS, count, DIM // 2), False)
    return qkv.to(dtype), factors


def cache(dtype=torch.float32, narrow=True):
    return KVCache(1, ROWS, HEADS, SLOTS, DIM, dtype, torch.device("cpu"), narrow)


def attend(into, qkv, factors, tree_mask=None):
    new = into.open(qkv.shape[1], tree_mask)
    return into.attend(0, qkv, RotaryTable(factors, False), new)


def widened(into):
    """Keys and values that a cache stands for."""
    return into.buffer.float() * into.scales.float()


# Rounding


@settings(deadline=None, max_examples=25)
@given(st.integers(-20, 20), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_no_number_moves_by_more_than_half_a_level(power, dtype, seed):
    qkv, factors = given_tokens(5, seed, dtype, 10.0**power)
    into = cache(dtype)
    attend(into, qkv, factors)
    stored, scales = widened(into)[0, :, :, :5], into.scales[0, :, :, :5].float()
    error = (stored - qkv[:, :, HEADS:].transpose(1, 2).float()).abs()
    # Half a level, and what rounding the scale itself does to the 127th one.
    assert (error <= scales * (0.5001 + 127 * torch.finfo(dtype).eps)).all()
    assert (into.buffer[0, :, :, :5].abs().amax(-1) >= 126).all(), "every vector uses its whole range"
    assert (into.buffer[0, :, :, 5:] == 0).all() and into.buffer.dtype == torch.int8


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    qkv, factors = given_tokens(3)
    qkv[:, 0], qkv[0, 1, HEADS, 0] = 0, torch.nan
    into = cache()
    attended = attend(into, qkv, factors)
    assert (widened(into)[0, :, :, 0] == 0).all() and attended[1].isfinite().all()
    assert attended[0, 1, 0].isnan().all()


def test_attention_is_that_to_the_rounded_keys_and_values():
    qkv, factors = given_tokens(5)
    into, other = cache(), cache(narrow=False)
    attended = attend(into, qkv, factors)
    rounded = qkv.clone()
    rounded[:, :, HEADS:] = widened(into)[0, :, :, :5].transpose(1, 2)
    assert torch.equal(attended, attend(other, rounded, factors))
    assert not torch.equal(attended, attend(cache(narrow=False), qkv, factors))


def test_what_is_stored_does_not_depend_on_the_pass():
    qkv, factors = given_tokens(6)
    whole, single = cache(), cache()
    attend(whole, qkv, factors)
    for i in range(6):
        attend(single, qkv[:, i : i + 1], factors[:, i : i + 1])
        single.commit(torch.ones(ROWS, dtype=torch.int64))
    assert torch.equal(whole.buffer, single.buffer) and torch.equal(whole.scales, single.scales)


def test_scales_move_with_the_path_that_is_kept():
    qkv, factors = given_tokens(5)
    tree, line = cache(), cache()
    seen = torch.eye(5, dtype=torch.bool).expand(ROWS, -1, -1)
    attend(tree, qkv, factors, seen)
    path = torch.tensor([[0, 2, 4], [1, 3, 4]])
    tree.commit(torch.tensor([3, 2]), path)
    kept = qkv[torch.arange(ROWS)[:, None], path]
    attend(line, kept, factors[:, :3])
    for row, count in enumerate((3, 2)):
        assert torch.equal(tree.buffer[:, row, :, :count], line.buffer[:, row, :, :count])
        assert torch.equal(tree.scales[:, row, :, :count], line.scales[:, row, :, :count])


def test_a_cache_is_reused_only_for_its_own_kind():
    sizes = 1, ROWS, HEADS, SLOTS, DIM, torch.float32, torch.device("cpu")
    narrow = cache()
    attend(narrow, *given_tokens(2))
    assert KVCache.of(*sizes, narrow, True) is narrow and not narrow.scales.any() and not narrow.buffer.any()
    assert KVCache.of(*sizes, narrow, False).scales is None
    assert KVCache.of(*sizes, cache(narrow=False), True).scales is not None
    assert KVCache.of(*sizes[:5], torch.bfloat16, sizes[6], narrow, True) is not narrow


# Models


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    made = make_family(request.param, tmp_path_factory.mktemp("family"))
    made.model.int8_cache = True
    return made


@few
@pytest.mark.parametrize("name", ["blocks", "dynamic", "vvs"])  # of others, the same image is asked below
@torch.inference_mode()
def test_methods_run(family, name):
    wanted = asked(family, True)
    tokens = METHODS[name](family).sample(wanted).tokens
    forced = wanted.layout.forced
    assert torch.equal(tokens[forced >= 0], forced[forced >= 0])
    assert (wanted.layout.to_grid(tokens) < family.model.vocab).all()


@few
@torch.inference_mode()
def test_greedy_and_same_seed_are_the_same_image_for_all(family):
    with fp64():
        for temperature, methods in (
            (0.0, (SJD(window=6), DraftTree(family.eagle, TREE))),
            (1.0, (SJD(window=6, reuse="gumbel"),)),
        ):
            wanted = replace(asked(family, True, temperature=temperature), seed=3)
            image = NextToken().sample(wanted).tokens
            for method in methods:
                assert torch.equal(method.sample(wanted).tokens, image)


@few
@torch.inference_mode()
@fp64()
def test_captured_steps_give_the_same(family):
    """Nothing is read back to the host."""
    wanted, method = asked(family, True, seed=5), SJD(window=4)
    plain = method.sample(wanted)
    family.model.sessions.clear()
    with captured() as graphs:
        assert_same_run(method.sample(wanted), plain)
    family.model.sessions.clear()
    assert graphs[0].captured and graphs[0].replayed


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_bytes(family):
    model, layout = family.model, family.model.layout()
    state = model.start(family.prompt, None, 2, layout, 7, model.guidance)
    prompt = model.prompt_tokens(family.prompt, None, 2, layout, model.guidance)
    held = state.cache.buffer.nbytes + state.cache.scales.nbytes
    copy = state.cache.buffer[0].numel() * 4
    assert model.kv_bytes(2, layout, 7, model.guidance, prompt) == held + copy


def test_only_models_of_token_ids(tmp_path):
    with pytest.raises(CheckpointError, match="continuous model.*cache"):
        load_model(write_mar(tmp_path / "mar.safetensors"), int8_cache=True)
