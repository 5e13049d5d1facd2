"""Entropy Temperature, between a model and its samplers."""

import pytest
import torch
from comfyui_specar.reports.run_report import describe

SAME_SEED = "same seed, same image (Gumbel, exact)"


@pytest.fixture(scope="module")
def heated(tiny, run_node):
    """heated(model, **widgets) -> the node's model."""
    return lambda model=tiny[0], **widgets: run_node("EntropyTemperature", model=model, **widgets).result[0]


def test_samplers_heat_by_entropy_and_say_so(sample, heated):
    plain, trace = sample("NextToken")
    changed, heated_trace = sample("NextToken", model=heated())
    assert not torch.equal(changed["ar_tokens"], plain["ar_tokens"])
    assert heated_trace.settings["entropy"] == (2.5, 3.0, 0.6) and trace.settings["entropy"] is None
    assert "entropy temperature 2.5, 3, 0.6" in describe(heated_trace)
    assert "entropy temperature" not in describe(trace)


def test_the_temperature_of_the_sampler_is_multiplied(sample, heated):
    """By 2, wherever the entropy has no say."""
    doubled, _ = sample("NextToken", model=heated(strength=0.0, floor=2.0), temperature=0.5)
    plain, _ = sample("NextToken", temperature=1.0)
    assert torch.equal(doubled["ar_tokens"], plain["ar_tokens"])


def test_the_model_itself_stays_as_it_was_and_the_last_node_counts(sample, tiny, heated):
    before, _ = sample("NextToken")
    model = heated(heated(floor=5.0), strength=0.0, floor=1.0)
    assert not tiny[0].sampling and model.source == tiny[0].source
    assert torch.equal(sample("NextToken", model=model)[0]["ar_tokens"], before["ar_tokens"])


def test_the_same_seed_gives_the_image_of_next_token(sample, heated):
    plain, _ = sample("NextToken", model=heated(), batch=2)
    same, _ = sample("SJD", model=heated(), batch=2, refinement=SAME_SEED)
    assert torch.equal(plain["ar_tokens"], same["ar_tokens"])


def test_continuous_models_are_refused_in_words(continuous, heated):
    with pytest.raises(ValueError, match="continuous model.*vectors.*Connect it to the sampler directly"):
        heated(continuous[0])
