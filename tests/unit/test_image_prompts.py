"""Prompts with images: what a model reads, and that every method and drafter runs on them."""

import json

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models import branches
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree

from ..support import tiny_chameleon, tiny_emu3, tiny_emu35
from ..support.every_family import FEW, METHODS, asked, make_family
from ..support.tiny_folder import edited

READERS = {
    "emu3.5": "",
    "lumina-mgpt": "Lumina-mGPT-tiny-Omni",
    "glm-image": "",
}  # families that read images, and a name that says so
AUTHORS = {  # cfg, temperature, top_k and top_p of the authors' code for an edit, at most 32 codes here
    "emu3.5": (3.0, 1.0, 32, 1.0),
    "lumina-mgpt": (1.0, 1.0, 32, 1.0),
    "glm-image": (1.0, 0.9, 0, 0.75),
}
IMAGES = [torch.arange(12).view(3, 4), torch.arange(8).view(2, 4) + 20]


@pytest.fixture(scope="module", params=READERS)
def family(request, tmp_path_factory):
    made = make_family(request.param, tmp_path_factory.mktemp("family"), title=READERS[request.param])
    made.prompt = made.model.encode_prompt("3", IMAGES[: made.model.image_prompts.most])
    return made


def request_of(family, temperature=1.0, images=None):
    prompt = family.prompt if images is None else family.model.encode_prompt("3", images)
    cfg = 2.0 if family.model.guidance else 1.0
    return family.model.request(prompt, batch=2, cfg=cfg, temperature=temperature, top_k=0, top_p=1.0)


# Every method with one of the families, where minutes count.
CASES = [
    pytest.param(family, name, marks=[pytest.mark.whole] * ((i + j) % len(READERS) > 0))
    for i, family in enumerate(READERS)
    for j, name in enumerate(METHODS)
]


@pytest.mark.parametrize(("family", "name"), CASES, indirect=["family"])
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
    none, without, with_images = (model.unpack_prompts(family.prompt, each, 1, grid)[1].features for each in prompts)
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
        model.unpack_prompt([[features, others]], 1, "positive", model.grid)
    other = load_model(tiny_emu3.write(tmp_path))
    with pytest.raises(ValueError, match="cannot read images"):
        other.encode_prompt("a", IMAGES)


# Sampling parameters


def test_auto_is_the_authors_choice_for_images(family):
    model = family.model
    edit, plain = (model.request(prompt).params for prompt in (family.prompt, model.encode_prompt("3")))
    assert (edit.cfg, edit.temperature, edit.top_k, edit.top_p) == AUTHORS[model.family]
    assert plain == model.defaults and edit == model.image_defaults
    assert model.request(family.prompt, cfg=1.0, top_k=7).params.top_k == 7
    other = model.encode_prompt("3", IMAGES[:1])
    assert model.request(model.encode_prompt("3"), other).params == model.defaults, "those of the prompt count"


def test_the_trace_and_the_report_have_what_auto_was(family):
    trace = api.sample(family.model, family.prompt, NextToken()).trace
    cfg, temperature, top_k, _top_p = AUTHORS[family.model.family]
    assert (trace.settings["cfg"], trace.settings["temperature"], trace.settings["top_k"]) == (cfg, temperature, top_k)
    assert f"cfg {cfg:g}, temperature {temperature:g}, top_k {top_k}" in api.run_report(trace)


@pytest.mark.parametrize("family", ["emu3.5"], indirect=True)
def test_a_cfg_far_above_that_of_edits_is_said(family):
    plain = family.model.encode_prompt("3")
    edit, without = (family.model.request(prompt, cfg=7.0).notices for prompt in (family.prompt, plain))
    assert "this model's own is 3" in edit[0] and without == ()


def test_names_and_sizes_that_decide(tmp_path):
    omni = tiny_chameleon.write(tmp_path, codes=256)
    model = load_model(omni.rename(omni.with_name("Lumina-mGPT-tiny-Omni")))
    assert (model.defaults.top_k, model.image_defaults.top_k) == (256, 200)
    emu = load_model(tiny_emu35.write(tmp_path / "Emu3.5"))
    assert emu.defaults.cfg == emu.image_defaults.cfg == 2


@pytest.mark.parametrize(("write", "name"), [(tiny_emu35.write, "mine"), (tiny_chameleon.write, "Lumina-tiny-Omni")])
def test_what_a_file_says_of_itself_counts_for_both(write, name, tmp_path):
    folder = write(tmp_path / "folder")
    folder = folder.rename(folder.with_name(name))
    own = json.loads((folder / "config.json").read_text(encoding="utf-8"))["specar"]
    model = load_model(edited(folder, specar=own | {"defaults": {"cfg": 2.5, "top_k": 9}}))
    assert model.defaults == model.image_defaults == SamplingParams(cfg=2.5, top_k=9)
