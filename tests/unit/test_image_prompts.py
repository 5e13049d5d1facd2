"""Prompts with images: what a model reads, and that every method and drafter runs on them."""

import pytest
import torch
from comfyui_specar.model_loaders import branches
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree

from ..support import tiny_emu3
from ..support.every_family import FEW, METHODS, asked, make_family

READERS = {
    "emu3.5": "",
    "lumina-mgpt": "Lumina-mGPT-tiny-Omni",
    "glm-image": "",
}  # families that read images, and a name that says so
IMAGES = [torch.arange(12).view(3, 4), torch.arange(8).view(2, 4) + 20]


@pytest.fixture(scope="module", params=READERS)
def family(request, tmp_path_factory):
    made = make_family(request.param, tmp_path_factory.mktemp("family"), title=READERS[request.param])
    made.prompt = made.model.encode_prompt("3", IMAGES[: made.model.image_prompts.most])
    return made


def request_of(family, cfg=2.0, temperature=1.0, negative=None, images=None, text="3"):
    prompt = family.prompt if images is None else family.model.encode_prompt(text, images)
    params = SamplingParams(cfg=cfg if family.model.guidance else 1.0, temperature=temperature).__dict__
    return family.model.request(prompt, negative, batch=2, **params | {"order": None, "entropy": None})


@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_every_method_reads_images(family, name):
    wanted = asked(family, guided=True)
    decoded = METHODS[name](family).sample(wanted)
    forced = wanted.layout.forced
    assert torch.equal(decoded.tokens[forced >= 0], forced[forced >= 0]) and (decoded.tokens >= 0).all()


@torch.inference_mode()
def test_the_image_depends_on_them(family):
    seen = {
        str(NextToken().sample(request_of(family, images=images)).tokens) for images in (IMAGES[:1], IMAGES[1:], [])
    }
    assert len(seen) == 3


@torch.inference_mode()
def test_same_image_by_every_drafter_and_in_shorter_passes(family, monkeypatch):
    greedy = request_of(family, temperature=0)
    image = NextToken().sample(greedy).tokens
    assert torch.equal(SJD(window=5).sample(greedy).tokens, image)
    for length in (1024, 7):
        monkeypatch.setattr(branches, "PROMPT_PASS", length)
        for method in (NextToken(), DraftTree(family.small, Chain(3)), DraftTree(family.eagle, FEW)):
            assert torch.equal(method.sample(greedy).tokens, image)


@pytest.mark.parametrize("family", ["emu3.5"], indirect=True)
def test_both_branches_read_them(family):
    """Where the model was trained so, also after a negative prompt of CLIP Text Encode, which has none."""
    model, grid = family.model, family.model.grid
    prompts = [None, model.encode_prompt("2"), model.encode_prompt("2", IMAGES)]
    none, without, with_images = (model.read_both(family.prompt, each, 1, grid)[1].features for each in prompts)
    assert torch.equal(without, with_images) and not torch.equal(none, with_images)
    assert none.shape[1] == without.shape[1] - 1
    counted = model.prompt_tokens(family.prompt, None, 1, model.layout(), guided=True)
    assert counted == max(none.shape[1], family.prompt[0][0].shape[1])


def test_long_prompts_take_memory_by_the_pass(family):
    model, length = family.model, branches.PROMPT_PASS
    short, long, longer = (model.activation_bytes(2, 1, count * length) for count in (1, 12, 24))
    assert short == model.activation_bytes(2, length) and longer - long == (long - short)


def test_what_is_no_prompt_with_images(family, tmp_path):
    model = family.model
    with pytest.raises(ValueError, match="at most"):
        model.encode_prompt("3", [IMAGES[0]] * (model.image_prompts.most + 1))
    for wrong in (IMAGES[0].float(), IMAGES[0].flatten(), IMAGES[0][:0], IMAGES[0] + model.vocab, -IMAGES[0]):
        with pytest.raises(ValueError, match="grids of tokens"):
            model.encode_prompt("3", [wrong])
    features, extra = model.encode_prompt("3", IMAGES[:1])[0]
    others = {"ar": extra["ar"] | {"images": IMAGES[1:]}}
    with pytest.raises(ValueError, match="changed by another node"):
        model.read([[features, others]], 1, "positive", model.grid)
    other = load_model(tiny_emu3.write(tmp_path))
    with pytest.raises(ValueError, match="cannot read images"):
        other.encode_prompt("a", IMAGES)
