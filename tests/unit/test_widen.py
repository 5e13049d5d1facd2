"""A widened model is the small one at a larger one's cost."""

from dataclasses import replace

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.benchmarks.widen import widen, widen_eagle
from comfyui_specar.samplers.layout import TokenLayout

PROMPT = "heart, 3d, on a blue background"


@pytest.fixture(scope="module")
def small():
    return specar.load_model(specar.bundled("default"), dtype=torch.float64)


@pytest.fixture(scope="module")
def large(small):
    own = small.backbone.config
    sizes = {"dim": own.dim + 2 * own.head_dim, "heads": own.heads + 2, "layers": own.layers + 1, "ffn_dim": 1024}
    return widen(small, replace(own, **sizes))


def test_it_gives_the_small_model_s_logits_and_images(small, large):
    own, wide = small.backbone.config, large.backbone.config
    assert (wide.dim, wide.layers, wide.heads) == (own.dim + 2 * own.head_dim, own.layers + 1, own.heads + 2)
    runs, states = [], []
    for model in (small, large):
        prompt = model.encode_prompt(PROMPT)
        states.append(model.start(prompt, None, 1, TokenLayout.plain(2, 16), slack=1, guided=True).prefill)
        runs.append(specar.sample(model, prompt, specar.methods.NextToken(), layout=TokenLayout.plain(2, 16)).tokens)
    assert torch.allclose(states[0].logits, states[1].logits, rtol=0, atol=1e-4)  # fp32, of logits below 100
    assert torch.allclose(states[0].hidden, states[1].hidden[..., : own.dim])
    assert torch.equal(*runs)


def test_its_drafter_proposes_what_the_small_one_does(small, large):
    layout, found = TokenLayout.plain(2, 16), []
    eagle = specar.load_drafter(specar.bundled("default") / "eagle", small)
    for model, drafter in ((small, eagle), (large, widen_eagle(eagle, large))):
        method = specar.methods.DraftTree(drafter)
        out = specar.sample(model, model.encode_prompt(PROMPT), method, layout=layout)
        found.append((out.tokens, out.trace.summary()["target_passes"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_smaller_shapes_and_other_heads_are_refused(small):
    own = small.backbone.config
    for other in (replace(own, layers=own.layers - 1), replace(own, heads=2 * own.heads)):
        with pytest.raises(ValueError, match="layers|heads"):
            widen(small, other)
