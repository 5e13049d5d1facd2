"""What the Python interface says of arguments that cannot be meant."""

from dataclasses import dataclass
from functools import partial

import comfyui_specar as specar
import numpy
import pytest
import torch

SJD = specar.methods.SJD
KEPT, IDS = torch.ones(1, 16, 16).bool(), torch.zeros(1, 16, 16).long()
VECTORS_KEPT, VECTORS = torch.ones(1, 8, 8).bool(), torch.zeros(1, 8, 8, 16)


@dataclass(frozen=True)
class Double(specar.rules.AcceptanceRule):
    """A rule of the user's own: min(1, 2p/q)."""

    name = "double"

    def accepted_mass(self, p, q, depth, strength):
        return torch.minimum(q, (1 + strength)[..., None] * p)


@pytest.fixture(scope="module")
def model():
    return specar.load_model(specar.bundled("default"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"method": "sjd"}, TypeError, r"'sjd'.*methods\.SJD\(\).*NextToken"),
        ({"method": SJD}, TypeError, r"methods\.SJD\(\)"),
        ({"method": specar.methods.DraftTree(None)}, TypeError, "DraftTree.*drafter.*load_drafter"),
        ({"method": specar.methods.CoolSD(None)}, TypeError, "drafter.*load_drafter"),
        ({"method": specar.methods.CoolSD(specar.bundled("default/eagle"))}, TypeError, "drafter.*load_drafter"),
        ({"method": SJD(window="a")}, TypeError, "window is 'a'.*whole"),
        ({"method": SJD(window=2.5)}, TypeError, "window is 2.5.*whole"),
        ({"method": SJD(threshold="a")}, TypeError, "threshold is 'a'.*number"),
        ({"method": SJD(rule="lantern")}, TypeError, r"rule is 'lantern'.*rules\."),
        ({"method": SJD(rule=specar.rules.CoolSD(delta="1"))}, TypeError, "delta is '1'.*number"),
        ({"negative": torch.ones(2)}, TypeError, "negative prompt is .*encode_prompt"),
        ({"grid": numpy.array([16, 16])}, TypeError, "grid is .*rows"),
        ({"negative": "ugly"}, TypeError, r"negative prompt is 'ugly'.*encode_prompt"),
        ({"seed": -1}, ValueError, "seed.*-1.*0 to 18446744073709551615"),
        ({"seed": 2**64}, ValueError, "seed.*0 to"),
        ({"seed": 1.5}, TypeError, "seed is 1.5.*whole"),
        ({"seed": "7"}, TypeError, "seed is '7'.*whole"),
        ({"batch_size": 0}, ValueError, "batch_size is 0.*1"),
        ({"batch_size": 10**6}, ValueError, "batch_size is 1000000.*1 to 4096"),
        ({"cgf": 2}, TypeError, "no argument cgf; there are .*cfg.*batch_size.*grid"),
        ({"steps": 9}, ValueError, "steps: not supported for models of token ids"),
        ({"batch_size": 1.5}, TypeError, "batch_size.*whole"),
        ({"cfg": "a"}, TypeError, "cfg is 'a'.*number"),
        ({"strength": torch.ones(3, 3), "method": SJD(settle=0.05)}, ValueError, "strength.*1, 3, 3.*1, 16, 16"),
        ({"strength": torch.ones(16, 16)}, ValueError, "strength.*relaxed rule or settling.*neither"),
        ({"skippable": torch.ones(16, 16).bool()}, ValueError, "skippable.*VVS"),
        ({"top_k": 1.5}, TypeError, "top_k is 1.5.*whole"),
        ({"grid": 16}, TypeError, "grid is 16.*rows"),
        ({"grid": (16.0, 16.0)}, TypeError, "grid is .*whole"),
        ({"kept": KEPT[:, :3, :3], "tokens": IDS}, ValueError, "kept.*3"),
        ({"kept": KEPT[0], "tokens": IDS[0]}, ValueError, r"tokens.*\[16, 16\]"),
        ({"kept": KEPT}, ValueError, "tokens.*kept.*both"),
        ({"tokens": IDS}, ValueError, "tokens.*kept.*both"),
        ({"kept": KEPT, "tokens": IDS.float()}, ValueError, "tokens.*float32.*whole"),
        ({"kept": KEPT.float(), "tokens": IDS}, ValueError, "kept.*float32.*bool"),
        ({"kept": KEPT, "tokens": IDS + 99999}, ValueError, "99999.*0 to 1023"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(model, given, error, message):
    with pytest.raises(error, match=message):
        specar.sample(model, model.encode_prompt("star"), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kept": VECTORS_KEPT[:, :3, :3], "tokens": VECTORS}, "kept.*3"),
        ({"kept": VECTORS_KEPT, "tokens": VECTORS[..., :3]}, "tokens.*3"),
        ({"kept": VECTORS_KEPT}, "tokens.*kept.*both"),
    ],
)
def test_so_are_tokens_of_a_continuous_model(given, message):
    model = specar.load_model(specar.bundled("continuous"))
    with pytest.raises(ValueError, match=message):
        specar.sample(model, model.encode_prompt("star"), **given)


def test_an_image_is_inpainted_by_a_continuous_model():
    """As docs/api.md says: the kept half is the image's, as its VAE keeps it."""
    model, vae = (load(specar.bundled("continuous")) for load in (specar.load_model, specar.load_image_decoder))
    pixels = vae.decode(specar.sample(model, model.encode_prompt("heart, flat, on a red background"), seed=1).latent)
    latent = vae.encode_latent(pixels)
    tokens, kept = model.from_latent(latent).unflatten(1, latent.shape[2:]), torch.ones(1, *latent.shape[2:]) > 0
    kept[:, :, kept.shape[2] // 2 :] = False
    out = specar.sample(model, model.encode_prompt("star"), tokens=tokens, kept=kept, seed=2)
    assert torch.equal(out.tokens[kept], tokens[kept])
    torch.testing.assert_close(out.latent[:, :, kept[0]], latent[:, :, kept[0]])


@pytest.mark.parametrize("prompt", ["heart", "x", None, 5, {}, torch.zeros(1, 2, 3)], ids=str)
def test_so_is_a_prompt_that_was_not_encoded(model, prompt):
    with pytest.raises(TypeError, match="prompt is (.|\n)*encode_prompt"):
        specar.sample(model, prompt)


def test_so_is_a_prompt_that_is_no_text(model):
    with pytest.raises(TypeError, match="prompt is None.*text"):
        model.encode_prompt(None)


@pytest.mark.parametrize(
    ("name", "value"), [("strength", 0.5), ("skippable", "sky"), ("tokens", [[1]]), ("kept", True)]
)
def test_so_is_what_should_have_a_value_per_token(model, name, value):
    with pytest.raises(TypeError, match=f"{name} is .*tensor"):
        specar.sample(model, model.encode_prompt("heart"), **{name: value})


def test_so_is_a_model_that_is_no_drafter_and_a_path_that_is_no_model(model):
    with pytest.raises(TypeError, match=r"(?s)DraftTree's drafter is DiscreteModel.*load_drafter"):
        specar.sample(model, model.encode_prompt("heart"), specar.methods.DraftTree(model))
    eagle = specar.load_drafter(specar.bundled("default/eagle"), model)
    with pytest.raises(TypeError, match="ContinuousSpeculative's drafter is .*load_drafter"):
        specar.sample(model, model.encode_prompt("heart"), specar.methods.ContinuousSpeculative(eagle))
    with pytest.raises(TypeError, match="model is .*load_model"):
        specar.load_drafter(specar.bundled("default/eagle"), specar.bundled("default"))
    with pytest.raises(TypeError, match="model is .*load_model"):
        specar.sample(specar.bundled("default"), model.encode_prompt("heart"))


def test_a_dtype_is_torchs():
    with pytest.raises(TypeError, match="dtype is torch.int8.*storage"):
        specar.load_model(specar.bundled("default"), dtype=torch.int8)
    with pytest.raises(TypeError, match="dtype is 'bf16'.*torch.bfloat16"):
        specar.load_model(specar.bundled("default"), dtype="bf16")


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_is_one_that_is_there(model, device):
    for load in (specar.load_model, specar.load_image_decoder, partial(specar.load_drafter, model=model)):
        with pytest.raises(ValueError, match=f"device is '{device}'.*there: cpu"):
            load(specar.bundled("default"), device=device)


def test_a_name_that_there_is_not_is_told_with_those_that_there_are():
    with pytest.raises(AttributeError, match="no Sjd; there are .*SJD"):
        specar.methods.Sjd  # noqa: B018


def test_what_is_decoded_is_a_latent(model):
    vae = specar.load_image_decoder(specar.bundled("default"))
    for wrong in (torch.zeros(1, 16, 16), torch.zeros(1, 16, 16, 8)):
        with pytest.raises(ValueError, match=r"latent has the shape \[1, 16, 16.*\[images, 8, rows"):
            vae.decode(wrong)
    with pytest.raises(TypeError, match="latent is None.*tensor"):
        vae.decode(None)


def test_one_mask_may_be_meant_for_all_images(model):
    """Of a batch: tokens, and which of them are kept."""
    out = specar.sample(model, model.encode_prompt("star"), batch_size=2, tokens=IDS + 5, kept=KEPT)
    assert (out.tokens == 5).all() and len(out.tokens) == 2


def test_numbers_of_numpy_are_numbers(model):
    """As tables of pandas have them."""
    prompt = model.encode_prompt("star")
    out = specar.sample(model, prompt, seed=numpy.int64(3), batch_size=numpy.int32(2), top_k=numpy.int64(5))
    assert torch.equal(out.tokens, specar.sample(model, prompt, seed=3, batch_size=2, top_k=5).tokens)


def test_a_trace_tells_its_model_and_precision(tmp_path):
    model = specar.load_model(specar.bundled("default"), storage=torch.uint4)
    specar.save_trace(specar.sample(model, model.encode_prompt("star"), SJD(96)).trace, tmp_path / "a")
    made = {"model": "llamagen-t2i", "dtype": "fp32, int4 (storage)", "device": "cpu"}
    assert specar.load_trace(tmp_path / "a.json").settings.items() >= made.items()


def test_the_package_lists_its_names():
    assert {"sample", "load_model", "methods", "acceptance_map"} <= set(dir(specar))


@pytest.mark.parametrize("tree", [False, True])
def test_a_rule_of_ones_own_works_as_the_same_rule_of_the_pack(model, tree):
    drafter = specar.load_drafter(specar.bundled("default/eagle"), model)
    runs = []
    for rule in (Double(), specar.rules.UniformRSD(2.0)):
        drafts = specar.methods.DraftTree(drafter, specar.structures.Static("eagle_25"), rule)
        method = drafts if tree else SJD(rule=rule)
        runs.append(specar.sample(model, model.encode_prompt("heart"), method, seed=1))
    own, ours = (out.trace for out in runs)
    assert own.settings["rule"] == {"rule": "double"} and "acceptance: double;" in specar.run_report(own)
    assert torch.equal(runs[0].tokens, runs[1].tokens) and own.drift_bound == pytest.approx(ours.drift_bound, rel=1e-3)


@pytest.mark.parametrize(
    ("mass", "lossless"),
    [
        (lambda p, q: torch.clamp(p / q, max=1), False),
        (lambda p, q: 2 * p, False),
        (lambda p, q: torch.minimum(p, q) - 0.002, False),
        (lambda p, q: torch.minimum(2 * p, q), True),
        (lambda p, q: torch.minimum(1.5 * p, q), False),
        (lambda p, q: p.amax(-1), False),
    ],
)
def test_a_rule_of_ones_own_with_an_illegal_mass_is_told(model, mass, lossless):
    rule = type("Mine", (Double,), {"accepted_mass": lambda self, p, q, *_: mass(p, q), "lossless": lossless})()
    with pytest.raises(ValueError, match="accepted_mass of the rule Mine is illegal.*from 0 to q"):
        specar.sample(model, model.encode_prompt("heart"), SJD(rule=rule))


def test_a_rule_of_ones_own_says_what_it_is(model):
    rule = type("Bare", (specar.rules.AcceptanceRule,), {})()
    with pytest.raises(TypeError, match="Bare has no name"):
        specar.sample(model, model.encode_prompt("heart"), SJD(rule=rule))
