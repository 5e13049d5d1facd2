"""AR Sampler: its choices are methods of the other nodes, with the same images."""

import pytest
import torch

from .conftest import GRID, MASKED

BY_HAND = {  # option -> the sampler that makes the same images, its widgets, and the budget of its rule
    "fast, same quality": ("SJD", {"window": 0}, None),
    "fast, same image as slow": ("SJD", {"window": 0, "refinement": "same seed, same image (Gumbel, exact)"}, None),
    "slow": ("NextToken", {}, None),
    "fastest, may drift": ("SJD", {"window": 0}, 0.1),
}
OLDER = {
    "fast, exact": "fast, same quality",
    "same image as next token": "fast, same image as slow",
    "next token": "slow",
}


@pytest.fixture
def simple(sample):
    """simple(**inputs) -> (latent, trace) of AR Sampler."""
    return lambda **inputs: sample("", **{"batch": 2} | inputs)


@pytest.mark.parametrize("option", BY_HAND)
def test_each_choice_is_a_method_of_another_node(option, simple, sample, rule):
    name, widgets, budget = BY_HAND[option]
    if budget is not None:
        widgets = widgets | {"rule": rule("TVMetered", epsilon=budget)}
    latent, trace = simple(method=option)
    same, by_hand = sample(name, batch=2, **widgets)
    assert torch.equal(latent["ar_tokens"], same["ar_tokens"])
    assert trace.settings == by_hand.settings | {"chosen": option}


@pytest.mark.parametrize("older", OLDER)
def test_an_older_workflow_runs_as_before(older, simple, nodes):
    latent, trace = simple(method=older)
    assert torch.equal(latent["ar_tokens"], simple(method=OLDER[older])[0]["ar_tokens"])
    assert trace.settings["chosen"] == OLDER[older]
    assert nodes["SpecARSampler"].validate_inputs(method=older) is True


def test_only_what_is_ahead_is_offered(nodes):
    [method] = [each for each in nodes["SpecARSampler"].GET_SCHEMA().inputs if each.id == "method"]
    assert method.options == list(OLDER.values())
    assert nodes["SpecARSampler"].validate_inputs(method="fastest, may drift") is True
    assert "'slow'" in nodes["SpecARSampler"].validate_inputs(method="slower")


def test_a_negative_prompt_counts(simple, tiny):
    against = tiny[1].encode_from_tokens_scheduled("apple")
    assert not torch.equal(simple()[0]["ar_tokens"], simple(negative=against)[0]["ar_tokens"])


def test_a_continuous_model_generates_token_by_token_and_is_sent_to_its_drafter_for_more(
    simple, continuous, draw_vectors
):
    inputs = {
        "model": continuous[0],
        "positive": continuous[1].encode_from_tokens_scheduled("red apple"),
        "latent_image": {"samples": torch.zeros(1, MASKED.channels, GRID, GRID)},
    }
    latent, _ = simple(method="slow", **inputs)
    assert torch.equal(latent["samples"], draw_vectors("NextToken")[0]["samples"])
    for option in BY_HAND.keys() - {"slow"}:
        with pytest.raises(ValueError, match="continuous.*Continuous Speculative Sampler.*Load AR Drafter"):
            simple(method=option, **inputs)
