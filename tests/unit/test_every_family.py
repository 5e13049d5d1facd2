"""Every sampler on every family: forced tokens in place whatever was accepted, and equality where theory promises."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.models.drafters import ModelDrafter
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.trace import Source

from ..support.every_family import COLS, FAMILIES, FEW, METHODS, ROWS, TREE, asked, make_family


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return make_family(request.param, tmp_path_factory.mktemp("family"))


# Every method with a third of the families, and every family with a third of the methods, where minutes count:
# GLM-Image, whose tokens follow those of a preview, with dynamic VVS.
CASES = [
    pytest.param(family, name, marks=[pytest.mark.whole] * ((i + j) % 3 != 2))
    for i, family in enumerate(FAMILIES)
    for j, name in enumerate(METHODS)
]


@pytest.mark.parametrize(("family", "name"), CASES, indirect=["family"])
@torch.inference_mode()
def test_what_is_forced_is_in_place(family, name):
    """Every method is guided in half of the families."""
    specials = FAMILIES[family.model.family].specials
    guided = (list(METHODS).index(name) + list(FAMILIES).index(family.model.family)) % 2 > 0
    wanted = asked(family, guided)
    decoded = METHODS[name](family).sample(wanted)
    tokens, forced, lead = decoded.tokens, wanted.layout.forced, wanted.layout.lead
    assert tokens.shape == (2, lead + ROWS * COLS + specials) and (forced >= family.model.vocab).sum() == 2 * specials
    assert torch.equal(tokens[forced >= 0], forced[forced >= 0])
    assert (tokens >= 0).all() and (wanted.layout.to_grid(tokens) < family.model.vocab).all()
    assert torch.equal(decoded.trace.positions["source"] == Source.FORCED, forced >= 0)
    assert decoded.trace.totals["target_passes"] <= tokens.shape[1]


@pytest.mark.parametrize("guided", [True, False])
@torch.inference_mode()
def test_the_same_seed_is_the_same_image(family, guided):
    wanted = asked(family, guided, seed=3)
    image = NextToken().sample(wanted).tokens
    assert torch.equal(SJD(window=6, reuse="gumbel").sample(wanted).tokens, image)
    assert not torch.equal(SJD(window=6, reuse="gumbel").sample(replace(wanted, seed=11)).tokens, image)


@torch.inference_mode()
def test_the_beginning_of_an_image_is_generated_as_in_the_whole(family):
    """A run over it sees the prompt and the positions of the whole image (Emu3 and Lumina put its size there)."""
    wanted = replace(asked(family, True), layout=family.model.layout())
    short = replace(wanted, layout=wanted.layout.beginning(COLS + 2))
    length = short.layout.length
    assert COLS + 2 <= length < wanted.layout.length
    for method in (NextToken(), SJD(window=3)):
        begun = method.sample(short)
        assert torch.equal(begun.tokens, method.sample(wanted).tokens[:, :length])
        assert begun.trace.summary()["tokens"] == 2 * (COLS + 2)
    assert DraftTree(family.eagle, TREE).sample(short).tokens.shape == (2, length)


@torch.inference_mode()
def test_greedy_is_the_same_image_for_all(family):
    greedy = asked(family, True, temperature=0)
    image = NextToken().sample(greedy).tokens
    for method in (Jacobi(window=6), DraftTree(family.small, Chain(3)), DraftTree(family.eagle, FEW)):
        assert torch.equal(method.sample(greedy).tokens, image)


@torch.inference_mode()
def test_a_model_accepts_all_of_its_own_drafts(family):
    wanted = asked(family, True)
    decoded = DraftTree(ModelDrafter(family.model), Chain(4)).sample(wanted)
    passes = [1 + -(-(end - 1) // 5) for end in wanted.layout.end.tolist()]
    assert decoded.trace.totals["passes_per_image"] == passes
