"""AR LoRA: another model from the same files, which samplers and drafters use like any other."""

import pytest
import torch


@pytest.fixture
def with_lora(run_node, tiny, lora):
    """with_lora(strength, model) -> AR_MODEL of AR LoRA."""

    def with_lora(strength: float, model=tiny[0]):
        return run_node("LoadLora", model=model, lora_name=lora, strength=strength).result[0]

    return with_lora


def test_samplers_draw_with_the_lora_and_leave_the_model_alone(with_lora, sample, tiny):
    plain, _ = sample("NextToken")
    model = with_lora(1.0)
    changed, _ = sample("NextToken", model=model)
    assert model.name == "tiny + style" and not torch.equal(changed["samples"], plain["samples"])
    assert torch.equal(sample("NextToken")[0]["samples"], plain["samples"])
    same, _ = sample("SJD", model=model, refinement="same seed, same image (Gumbel, exact)")
    assert torch.equal(same["samples"], changed["samples"])


def test_strengths_add_up_and_none_is_the_model_itself(with_lora, tiny):
    assert with_lora(0.0) is tiny[0]
    whole = with_lora(1.0)
    once, twice = with_lora(0.75), with_lora(-0.25, whole)
    weights = (model.model.state_dict().values() for model in (once, twice, whole))
    for one, two, between in zip(*weights, strict=True):  # two additions, each rounded, are one
        assert ((one - two).abs() <= torch.finfo(one.dtype).eps * (one.abs() + between.abs())).all()
    assert once.source != twice.source and once.source == with_lora(0.75).source


def test_a_drafter_is_loaded_for_the_model_with_the_lora(with_lora, sample, load_drafter, drafters):
    model = with_lora(1.0)
    drafter = load_drafter(model, "eagle")
    sample("DraftTree", model=model, drafter=drafter)
    sample("DraftTree", model=with_lora(1.0), drafter=drafter)  # ComfyUI dropped the model, and loaded it again
    with pytest.raises(ValueError, match="was loaded for tiny"):
        sample("DraftTree", drafter=drafter)


def test_parameters_chosen_before_are_kept(with_lora, run_node, tiny):
    (cooled,) = run_node("EntropyTemperature", model=tiny[0], floor=0.5).result
    assert with_lora(1.0, cooled).sampling == cooled.sampling
