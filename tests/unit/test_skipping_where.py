"""Skipping only where a mask allows it: nothing outside is ever accepted unverified, whatever else is chosen."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.skipping import PATHS, Skipping, choose_path, decide
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.samplers.trace import Source
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.captured_runs import assert_captured_as_plain
from ..support.random_trees import random_tree, tree_of_paths
from ..support.tiny import VOCAB, caption_features, fill, llamagen, write_llamagen
from ..support.toy import ToyDrafter, ToyModel, request, with_line_ends

LAYOUT = with_line_ends(2, 3)
MODEL = ToyModel(LAYOUT, 2)
DRAFTER = ToyDrafter(MODEL, stale=True)
ADT = ADTTree(depths=(1, 3), widths=(1, 3), width_step=1, first=(2, 2), nodes=6)
STRUCTURES = [Chain(1), Chain(3), Static(((0,), (1,), (0, 0), (0, 0, 0))), Dynamic(2, 3, 5), ADT]
EAGER = Skipping(interval=2, guard=0)  # whenever it may
DYNAMIC = Skipping("dynamic", threshold=0.0, guard=0)


def draw(structure, skipping, skippable=None, seed=0, batch=64, rule=None):
    asked = replace(request(MODEL, LAYOUT, seed=seed, batch=batch), skippable=skippable)
    return DraftTree(DRAFTER, structure, rule or Exact(), skipping).sample(asked)


def random_masks(seed: int, rows: int) -> torch.Tensor:
    return torch.rand(rows, LAYOUT.length, generator=torch.Generator().manual_seed(seed)) < 0.7


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(PATHS))
@settings(max_examples=60, deadline=None)
def test_a_path_that_is_taken_lies_inside(seed, truncate, path):
    """Random trees, masks and places: where ``decide`` says so, every token of the path may be taken."""
    tree = random_tree(seed, batch=4)
    generator = torch.Generator().manual_seed(seed)
    skippable = torch.rand((4, 12), generator=generator) < 0.8
    committed = torch.randint(1, 12, (4,), generator=generator)
    setting, never = Skipping(interval=2, guard=0, truncate=truncate, path=path), torch.zeros(4, dtype=torch.bool)
    skip = decide(setting, tree, None, 2, committed, 12, never, skippable)
    anywhere = decide(setting, tree, None, 2, committed, 12, never)
    _, count = choose_path(setting, tree, torch.rand(4, generator=generator))
    for b in range(4):
        inside = skippable[b, committed[b] : committed[b] + count[b]].all()
        assert not skip[b] or (anywhere[b] and inside)
    everywhere = torch.ones_like(skippable)
    assert torch.equal(decide(setting, tree, None, 2, committed, 12, never, everywhere), anywhere)
    assert not decide(setting, tree, None, 2, committed, 12, never, ~everywhere).any()


def test_a_path_that_may_reach_outside_is_judged():
    """By hand: a draft of three tokens after five decided ones, and a mask that ends before, at and after its end."""
    found = []
    for end in (5, 7, 8, 9):
        mask = torch.arange(20)[None] < end
        found.append(bool(decide(EAGER, tree_of_paths(3), None, 2, torch.tensor([5]), 20, torch.tensor([False]), mask)))
    assert found == [False, False, True, True]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("skipping", [EAGER, DYNAMIC, replace(EAGER, path="first", refresh=False)], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_nothing_outside_the_mask_is_taken_unverified(structure, skipping, truncate):
    skipping, happened = replace(skipping, truncate=truncate), 0
    for seed in range(3):
        masks = random_masks(seed, 64 if seed else 1)
        source = draw(structure, skipping, masks, seed=100 * seed).trace.positions["source"]
        skipped = source == Source.SKIPPED
        assert not (skipped & ~masks).any()
        happened += int(skipped.sum())
    assert happened > 0 or (skipping.schedule == "dynamic" and isinstance(structure, (Chain, Static)))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_all_and_nothing(structure):
    """Allowed everywhere is no mask; allowed nowhere is no skipping."""
    every, none = torch.ones(1, LAYOUT.length, dtype=torch.bool), torch.zeros(64, LAYOUT.length, dtype=torch.bool)
    for skipping in (EAGER, DYNAMIC):
        assert torch.equal(draw(structure, skipping, every).tokens, draw(structure, skipping).tokens)
        assert torch.equal(draw(structure, skipping, none).tokens, draw(structure, None).tokens)


def test_rows_of_a_batch_have_masks_of_their_own():
    masks = random_masks(5, 6)
    many = draw(STRUCTURES[3], EAGER, masks, seed=9, batch=6, rule=CoolSD(2.0))
    for i in range(6):
        one = draw(STRUCTURES[3], EAGER, masks[i : i + 1], seed=9 + i, batch=1, rule=CoolSD(2.0))
        assert torch.equal(one.tokens[0], many.tokens[i])
        assert torch.equal(one.trace.positions["source"][0], many.trace.positions["source"][i])


def test_a_mask_is_an_input_of_rounds_on_a_gpu(on_tape, monkeypatch):
    asked = [replace(request(MODEL, LAYOUT, seed=2, batch=4), skippable=random_masks(seed, 1)) for seed in range(3)]
    assert_captured_as_plain(DraftTree(DRAFTER, STRUCTURES[2], skipping=EAGER), asked, monkeypatch)
    assert len(on_tape) == 1
    on_tape.clear()
    DraftTree(DRAFTER, STRUCTURES[2], skipping=EAGER).sample(replace(asked[0], skippable=random_masks(0, 4)))
    assert len(on_tape) == 1, "masks of other sizes make a run of another kind"


def test_another_mask_is_refused():
    with pytest.raises(ValueError, match=r"skippable.*\(1, 5\)"):
        draw(Chain(1), EAGER, torch.ones(1, 5, dtype=torch.bool), batch=2)


def test_headless(tmp_path):
    model = llamagen(tmp_path, text=True)
    model.attach_codebook(fill("codebook", (VOCAB, 4)), 16)
    drafter = api.load_drafter(write_llamagen(tmp_path / "small.safetensors", True), model)
    method = api.methods.VVS(drafter, Chain(1), Exact(), interval=2, guard=0)
    prompt, where = model.encode_features(caption_features(5)), torch.zeros(4, 4, dtype=torch.bool)
    where[2:, 1:] = True
    trace = api.sample(model, prompt, method, skippable=where, batch_size=8).trace
    skipped = trace.grid("source") == Source.SKIPPED
    assert skipped.any() and not (skipped & ~where).any()
