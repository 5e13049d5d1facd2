"""MAR's transformer and its diffusion head, by their properties; tests/parity compares them with the official code."""

import math
from dataclasses import replace

import pytest
import torch
from comfyui_specar.models.networks import mar
from comfyui_specar.models.networks.diffusion_head import DiffusionHead, NoiseSchedule

from ..support.tiny import fill
from ..support.tiny_mar import DEPTH, MAR, WIDTH, last_steps, mar_weights


def numbers(name, *shape):
    return fill(f"{name} embedding", shape)


def transformer(**changes):
    config = replace(MAR, **changes)
    weights = mar_weights(config)
    model = mar.MAR(config)
    model.load_state_dict({name: tensor for name, tensor in weights.items() if not name.startswith("diffloss.")})
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return transformer()


@pytest.fixture(scope="module")
def head():
    head = DiffusionHead(MAR.channels, MAR.dim, WIDTH, DEPTH)
    weights = mar_weights()
    names = [name for name in weights if name.startswith("diffloss.")]
    head.load_state_dict({name.removeprefix("diffloss."): weights[name] for name in names})
    return head.eval().requires_grad_(False)


def classes(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


# Transformer


def test_a_caption_fills_as_many_slots_as_it_has_words():
    model = transformer(captions=True)
    words = numbers("words", 1, 6, MAR.conditions)
    for count in (1, 3, 4, 6):
        prompt, used = model.prompt(words[:, :count]), min(count, MAR.slots)
        assert torch.equal(prompt[:, :used], model.caption_proj(words[:, :used]))
        assert torch.equal(prompt[:, used:], model.unconditional(1)[:, used:])


def test_positions_of_other_grids(model):
    """Slots keep theirs. How those of the image are resized: tests/parity/test_harmon.py."""
    own, wide = model.positions(4, 4), model.positions(4, 8)
    assert own.encoder is model.encoder_pos_embed_learned and own.head is model.diffusion_pos_embed_learned
    for table, resized, slots in zip(own, wide, (4, 4, 0), strict=True):
        assert resized.shape == (1, slots + 32, MAR.dim)
        assert torch.equal(resized[:, :slots], table[:, :slots])
    known = torch.zeros(1, 32, dtype=torch.bool)
    known[0, 7] = True
    z = model(model.prompt(classes(3)), numbers("wide tokens", 1, 32, 16), known, 1, wide)
    assert z.shape == (1, 32, MAR.dim) and z.isfinite().all()


# Head


@pytest.mark.parametrize("steps", [0, 1, 1001])
def test_illegal_numbers_of_steps(steps):
    with pytest.raises(ValueError, match=rf"2 to 1000 steps.* {steps}\b"):
        NoiseSchedule.cosine(steps)


def test_tables_are_built_on_the_cpu_while_models_are_built_elsewhere():
    with torch.device("meta"):
        assert NoiseSchedule.cosine(5).signal.device.type == "cpu"


Z, OTHER = numbers("z", 6, 32), numbers("z of no prompt", 6, 32)
NOISE0 = numbers("first noise", 6, 16)


def run(head, cfg=1.0, temperature=1.0, kind="ddpm", uncond=None, noise="later noise"):
    schedule = last_steps(NoiseSchedule.cosine(25, kind), 8)
    return head.denoise(Z, uncond, cfg, temperature, NOISE0, numbers(noise, 8, 6, 16), schedule)


def test_noise_is_used_where_it_should_be(head):
    end, other = run(head), run(head, noise="quite other noise")
    assert (end.mean - other.mean).abs().max() > 0.1
    cold = [run(head, temperature=0.0, noise=name) for name in ("later noise", "quite other noise")]
    assert torch.equal(cold[0].mean, cold[1].mean) and (cold[0].log_std == -math.inf).all()
    ddim = [run(head, kind="ddim", noise=name).mean for name in ("later noise", "quite other noise")]
    assert torch.equal(*ddim) and not torch.allclose(ddim[0], cold[0].mean, atol=1e-2)
    schedule, noise = last_steps(NoiseSchedule.cosine(25), 8), numbers("later noise", 8, 6, 16)
    noise[-1] = 1e3  # the last step adds none
    assert torch.equal(head.denoise(Z, None, 1.0, 1.0, NOISE0, noise, schedule).mean, end.mean)
    with pytest.raises(ValueError, match="8 .*100 steps"):
        head.denoise(Z, None, 1.0, 1.0, NOISE0, noise)


def test_temperature_scales_the_width_but_not_the_path_of_widths(head):
    schedule = last_steps(NoiseSchedule.cosine(25), 2)  # one step with noise, then the last
    x, noise = NOISE0, torch.zeros(2, 6, 16)  # no noise: both temperatures take the same way
    warm, cool = (head.denoise(Z, None, 1.0, t, x, noise, schedule) for t in (1.0, 0.5))
    assert torch.equal(warm.mean, cool.mean) and torch.equal(warm.path, cool.path)
    assert torch.allclose(warm.log_std - cool.log_std, torch.tensor(math.log(2.0)))
    mean, log_variance = head.mean_log_variance(x, 1, Z, schedule)
    assert torch.allclose(warm.path, 0.5 * log_variance.sum(-1), atol=1e-5)
    end, log_variance = head.mean_log_variance(mean, 0, Z, schedule)
    assert torch.allclose(warm.mean, end, atol=1e-5) and torch.allclose(warm.log_std, 0.5 * log_variance, atol=1e-5)


def test_every_row_has_its_own_guidance(head):
    """What guidance does: test_continuous_masked.py."""
    scales = torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
    rows = run(head, scales, uncond=OTHER)
    for i, scale in enumerate(scales.tolist()):
        whole = run(head, scale, uncond=OTHER)
        assert torch.allclose(rows.mean[i], whole.mean[i], atol=1e-4) and torch.allclose(rows.path[i], whole.path[i])


def test_the_variance_is_that_of_the_prompt(head):
    """Of the first step, where both branches read the same noise: guided or not, the widths are the same."""
    schedule = last_steps(NoiseSchedule.cosine(25), 1)
    nothing = torch.zeros(1, 6, 16)
    plain = head.denoise(Z, None, 1.0, 1.0, NOISE0, nothing, schedule)
    guided = head.denoise(Z, OTHER, 4.0, 1.0, NOISE0, nothing, schedule)
    assert torch.allclose(plain.log_std, guided.log_std, atol=1e-5)
    assert (plain.mean - guided.mean).abs().max() > 1e-3
