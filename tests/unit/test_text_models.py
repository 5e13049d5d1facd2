"""Samplers on a language model that generates: forced row ends, prompts of unequal length, shared key heads."""

import itertools

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.models.drafters import ModelDrafter
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.positions import SequencePositions, rotation_at
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Static
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.probabilities import sampling_probs

from ..support.models import of_ids, teacher_forced
from ..support.tiny import fill
from ..support.tiny_text import BEGIN, GRIDS, null, text_model
from ..support.toy import chi_square

PROMPT = [35, 37, 36, 39, 34, 38, 2, BEGIN]  # the model's own has 4 words


@pytest.fixture(scope="module")
def model():
    return text_model()


@pytest.mark.parametrize("norms", [0, 1, 4])
def test_a_backbone_with_shared_heads_is_one_with_copies_of_them(norms):
    shared = text_model(head_norms=norms).backbone
    config = shared.config
    whole = Backbone(BackboneConfig(**(vars(config) | {"kv_heads": 0})))
    weights = shared.state_dict()
    for name in list(weights):
        if "wqkv" in name:
            q, k, v = weights[name].unflatten(0, (-1, config.head_dim)).split((4, 2, 2))
            weights[name] = torch.cat((q, *(x.repeat_interleave(2, 0) for x in (k, v)))).flatten(0, 1)
        if "k_norm" in name and norms > 1:
            weights[name] = weights[name].repeat_interleave(2, 0)
    whole.load_state_dict(weights)
    x = fill("x embedding", (2, 7, config.dim))
    rotation = rotation_at(SequencePositions(), 3, 4, (2, 2), config.head_dim, "cpu")
    assert torch.allclose(shared(x, rotation), whole(x, rotation), atol=1e-5)


# The distribution


@pytest.fixture(scope="module")
def distribution():
    """A model of 3 codes, and the probability of all 81 images of 2 x 2 tokens under guidance."""
    model = text_model(codes=3, sharpness=0.4, dim=16, layers=1)
    model.grids = (model.grid,) = ((2, 2),)
    asked = Request(model, of_ids(model, PROMPT), model.layout(), SamplingParams(cfg=1.5), batch=4000)
    images = torch.tensor(list(itertools.product(range(3), repeat=4))).view(-1, 2, 2)
    own = of_ids(model, null(torch.zeros(1, 1, 1), (2, 2)).flatten().long().tolist())
    logits = torch.cat([teacher_forced(model, branch, images) for branch in (asked.conditioning, own)])
    tokens = asked.layout.keeping(images, torch.ones_like(images, dtype=torch.bool)).forced
    p = sampling_probs(logits, asked.params, 3, asked.layout.forced.expand(81, -1))
    whole = p.gather(-1, tokens[..., None])[..., 0].double().prod(-1)
    assert whole.sum() == pytest.approx(1, abs=1e-5) and whole.max() < 0.3
    return asked, {tuple(line): float(mass) for line, mass in zip(tokens.tolist(), whole, strict=True)}


SMALL = {"dim": 16, "layers": 1, "head_norms": 0, "kv_heads": 4, "qkv_bias": False}


@pytest.mark.parametrize(
    "method",
    [NextToken(), SJD(window=4), DraftTree(ModelDrafter(text_model(codes=3, **SMALL)), Static(((0,), (1,), (0, 0))))],
    ids=lambda method: type(method).__name__,
)
@torch.inference_mode()
def test_images_follow_the_distribution_of_the_model(distribution, method):
    asked, wanted = distribution
    if isinstance(method, DraftTree):
        method.drafter.module.grids = (method.drafter.module.grid,) = ((2, 2),)
    assert chi_square(method.sample(asked).tokens, wanted).z < 4


@torch.inference_mode()
def test_another_distribution_is_noticed(distribution):
    """The same images under another guidance: the test above would have failed."""
    asked, wanted = distribution
    other = Request(**(vars(asked) | {"params": SamplingParams(cfg=1.0)}))
    assert chi_square(NextToken().sample(other).tokens, wanted).z > 6


# Sizes and lengths


def test_prompts_name_the_size_of_the_image(model):
    """A prompt that was encoded once generates every size, and tells the model which."""
    conditioning = model.encode_prompt("fox")
    for grid in GRIDS:
        ids = model.unpack_prompt(conditioning, 1, "p", grid).features.flatten().tolist()
        assert ids[-3:] == [*map(float, grid), BEGIN]
        out = api.sample(model, conditioning, SJD(), layout=model.layout(*grid), seed=1)
        assert out.tokens.shape == (1, *grid) and out.latent.shape == (1, 4, *grid)
    assert model.unpack_prompt(of_ids(model, [3, 4]), 1, "p", GRIDS[2]).features.flatten().tolist() == [3, 4]


def test_illegal_sizes_and_lengths_are_named(model):
    with pytest.raises(ValueError, match=r"16 x 80 pixels \(1 x 5 tokens\).* 32 x 48, "):
        model.layout(5, 1)
    with pytest.raises(ValueError, match="prompt.* 47 tokens.* 18.* 64"):
        api.sample(model, of_ids(model, [1] * 47), layout=model.layout(4, 3))
    api.sample(model, of_ids(model, [1] * 46), NextToken(), layout=model.layout(4, 3))
