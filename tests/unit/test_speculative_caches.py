"""Caches and bookkeeping of the drafting loop on a tiny LlamaGen: after any round they are those of a fresh pass."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.samplers.trace import Source

from ..support.rounds import begin
from ..support.tiny import caption_features

STRUCTURES = {
    "chain": Chain(3),
    "blocks": Chain(4, "block"),
    "static": Static("eagle_25"),
    "dynamic": Dynamic(3, 4, 12),
    "adt": ADTTree(depths=(1, 4), widths=(1, 4), width_step=1, first=(2, 3), nodes=12),
}
SKIPS = {
    "always": None,
    "uniform": Skipping(interval=2),
    "stale": Skipping(interval=3, refresh=False),
    "dynamic": Skipping(schedule="dynamic", threshold=0.0, path="confident", truncate=False),
}


def assert_cache_is_fresh(run, model):
    """Keys, values and lengths of the target's cache against one pass over the prompt and the committed tokens."""
    held, cache = run.held, run.run.cache.cache
    batch = len(held)
    request = run.request
    fresh = model.start(request.conditioning, request.negative, batch, request.layout, slack=0, guided=True)
    prompt = fresh.cache.lengths.clone()
    model.step(fresh, run.run.record.image, torch.arange(run.run.layout.length).expand(batch, -1))
    assert torch.equal(cache.lengths, prompt + held.repeat(2))
    for row, length in enumerate(cache.lengths.tolist()):
        for buffer, expected in ((cache.keys, fresh.cache.keys), (cache.values, fresh.cache.values)):
            assert torch.allclose(buffer[:, row, :, :length], expected[:, row, :, :length], atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_cache_is_that_of_a_fresh_pass_after_every_round(text_model, text_drafters, structure, skips):
    for kind, drafter in text_drafters.items():
        if kind == "model" and skips == "stale":
            continue  # the small model takes no hidden states
        run = begin(text_model, DraftTree(drafter, STRUCTURES[structure], skipping=SKIPS[skips]), forced=True)
        while not run.done:
            run.round()
            if not (run.state.committed < run.run.layout.length).all():
                continue
            assert_cache_is_fresh(run, text_model)
            last = run.run.record.tokens[torch.arange(3), run.state.committed - 1]
            assert torch.equal(run.state.root, last)
        forced = run.run.layout.forced[0]
        assert (run.run.record.image[:, forced >= 0] == 7).all()


@torch.inference_mode()
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_eagle_drafter_knows_the_true_pairs(text_model, text_drafters, structure):
    """Its cache is that of one pass over all true pairs that it has observed, those of the round before the last, after
    skipped rounds were verified as well (refresh)."""
    for skipping in (None, Skipping(interval=2, guard=0)):
        run = begin(text_model, DraftTree(text_drafters["eagle"], STRUCTURES[structure], skipping=skipping), batch=2)
        checked = 0
        while not run.done:
            run.round()
            state, observed = run.state, run.state.observed.begin
            if run.done or (skipping and state.skipped.any()) or not (state.committed < run.run.layout.length).all():
                continue
            request = run.request
            fresh = text_model.start(request.conditioning, request.negative, 2, request.layout, slack=0, guided=True)
            behind = text_drafters["eagle"].start(
                fresh, request.conditioning, request.negative, 2, request.layout, 9, True
            )
            begun = behind.cache.lengths.clone()
            before = fresh.prefill.hidden
            out = text_model.step(fresh, run.run.record.image, torch.arange(run.run.layout.length).expand(2, -1))
            hidden = torch.cat((before, out.hidden[:, :-1]), dim=1)
            positions = torch.arange(run.run.layout.length).expand(2, -1)
            text_drafters["eagle"].observe(behind, run.run.record.image, positions, hidden, observed)
            cache = run.run.memory.cache
            assert torch.equal(cache.lengths, begun + observed.repeat(2))
            for row, length in enumerate(cache.lengths.tolist()):
                assert torch.allclose(cache.keys[:, row, :, :length], behind.cache.keys[:, row, :, :length], atol=1e-4)
            checked += 1
        assert checked > 0


def test_the_small_model_needs_no_hidden_states(text_model, text_drafters):
    """The target drafting for itself: accepted throughout, also where rounds were skipped before."""
    for skipping in (None, Skipping(interval=2, guard=0)):
        run = begin(text_model, DraftTree(text_drafters["model"], Chain(3), skipping=skipping))
        while not run.done:
            run.round()
        sources = run.finish().positions["source"]
        assert not (sources == Source.RESIDUAL).any()
        assert (sources == Source.SKIPPED).any() == (skipping is not None)


def test_skipping_never_is_the_host(text_model, text_drafters):
    for structure in STRUCTURES.values():
        host = DraftTree(text_drafters["eagle"], structure)
        for never in (Skipping(interval=1000), Skipping(schedule="dynamic", threshold=1.01)):
            a, b = (begin(text_model, m) for m in (host, replace(host, skipping=never)))
            while not (a.done and b.done):
                a.round()
                b.round()
            assert torch.equal(a.run.record.image, b.run.record.image)


def test_rounds_are_never_skipped_twice_running(text_model, text_drafters):
    greedy = Skipping(schedule="dynamic", threshold=0.0)
    run = begin(text_model, DraftTree(text_drafters["eagle"], Static("eagle_25"), skipping=greedy), batch=4)
    while not run.done:
        run.round()
    trace = run.finish()
    skipped = trace.rounds["skipped"].bool()
    assert skipped.any() and not (skipped[1:] & skipped[:-1]).any()
    taken = trace.positions["source"] == Source.SKIPPED
    assert (trace.positions["p"][taken] > 0).any() and (trace.positions["tv_bound"][taken] > 0).any()
    totals = trace.totals
    assert totals["passes_per_image"] == ((trace.rounds["committed"] > 0) & ~skipped).sum(0).tolist()


def test_relaxation_means_fewer_passes_on_a_real_backbone(text_model, text_drafters):
    """Through the headless interface, with a strength map that forbids it on the upper half."""
    prompt = text_model.encode_features(caption_features())
    strength = torch.ones(4, 4)
    strength[:2] = 0
    method = DraftTree(text_drafters["eagle"], Static(), CoolSD(8.0))
    out = api.sample(text_model, prompt, method, top_k=0, batch_size=8, strength=strength)
    tv_bound = out.trace.grid("tv_bound")
    assert not tv_bound[:, :2].any() and tv_bound[:, 2:].any()
