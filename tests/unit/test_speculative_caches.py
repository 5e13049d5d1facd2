"""Caches and bookkeeping of the drafting loop on a tiny LlamaGen: after any round they are those of a fresh pass."""

import pytest
import torch
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree

from ..support.rounds import begin

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
