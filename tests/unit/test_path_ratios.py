"""Ratios of denoising paths (table 6 of "Continuous speculative decoding") of Gaussian chains, in closed form."""

import math

import pytest
import torch
from comfyui_specar.models.diffusion_head import Schedule
from comfyui_specar.tools.benchmarks.path_ratios import (
    ROWS,
    Tokens,
    joined,
    log_ratios,
    measure,
    path,
    recorded,
    summary,
)

from ..support import tiny_masked
from ..support.closeness import fp64
from ..support.tiny import fill

COUNT = 40_000
SLOPES, WIDTHS = (0.8, 0.6, 0.7), (0.35, 0.6, 0.9)  # of the steps, the last one first


def chain(shift, widths=WIDTHS):
    """x <- slope x + shift + width noise."""

    def step(x, index):
        return SLOPES[index] * x + shift, torch.full_like(x, math.log(widths[index]))

    return step


def noises(channels=1):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, COUNT, channels, generator=g) for shape in ((), (3,), (4,))]


def assert_mean(values, wanted):
    error = float(values.std()) / COUNT**0.5
    assert abs(float(values.mean()) - wanted) < 4 * error + 1e-6, (float(values.mean()), wanted, error)


def normal(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def lag():
    """How much a shift of every step moves the mean of the last one."""
    moved = 0.0
    for slope in reversed(SLOPES):
        moved = slope * moved + 1
    return moved


@pytest.mark.parametrize("shift", [0.1, 0.3])
def test_the_single_path_ratio_is_log_normal_around_the_divergence(shift):
    """Every step's log ratio is normal with mean -(shift/width)^2/2 and variance (shift/width)^2, so that E[ratio] = 1
    and E[min(1, ratio)] = 2 Phi(-s/2)."""
    single, *_ = log_ratios(chain(shift), chain(0.0), *noises())
    square = sum((shift / width) ** 2 for width in WIDTHS)
    assert_mean(single, -square / 2)
    assert_mean((single + square / 2).square(), square)
    assert_mean(single.exp(), 1.0)
    assert_mean(single.clamp(max=0).exp(), 2 * normal(-math.sqrt(square) / 2))


@pytest.mark.parametrize("kappa", [1.0, 42.0])
def test_the_aligned_ratio_is_sigma_and_the_last_step(kappa):
    """Eq. 9: of the steps with shared noise only their widths remain."""
    widths = (0.35, 0.5, 1.2)
    *_, aligned = log_ratios(chain(0.3), chain(0.0, widths), *noises(), kappa)
    sigma = sum(math.log(q / p) for p, q in zip(WIDTHS[1:], widths[1:], strict=True))
    gap = SLOPES[0] * SLOPES[1] * (widths[2] - WIDTHS[2]), SLOPES[0] * (widths[1] - WIDTHS[1])
    square = sum(t**2 for t in gap) + (0.3 * lag()) ** 2
    assert_mean(aligned, sigma - square / (2 * (kappa * WIDTHS[0]) ** 2))


def test_without_alignment_the_last_step_is_off_by_the_noise_of_both_paths():
    _, apart, _ = log_ratios(chain(0.3), chain(0.0), *noises())
    spread = SLOPES[0] ** 2 * (WIDTHS[1] ** 2 + SLOPES[1] ** 2 * (WIDTHS[2] ** 2 + SLOPES[2] ** 2))
    assert_mean(apart, -((0.3 * lag()) ** 2 + 2 * spread) / (2 * WIDTHS[0] ** 2))


def test_equal_models_have_ratio_one_but_for_paths_apart():
    single, apart, aligned = log_ratios(chain(0.2), chain(0.2), *noises(2))
    assert not single.any() and not aligned.any() and apart.std() > 1


def test_the_summary_does_not_underflow():
    value, logarithm, rate = summary(torch.tensor([-2000.0, -3000.0], dtype=torch.float64))
    assert value == pytest.approx((-2000 - math.log(2)) / math.log(10)) and rate == 0
    assert logarithm == pytest.approx(-2500 / math.log(10))
    assert summary(torch.tensor([1.0, 0.0]).log().double())[2] == 0.5


# Models


@pytest.mark.parametrize("guided", [True, False])
@fp64()
def test_the_steps_of_a_head_are_those_of_its_denoising(guided):
    head = tiny_masked.tiny(1).head
    z, other = (fill(f"{name} embedding", (5, head.net.cond_embed.in_features)) for name in ("z", "other"))
    channels = head.net.input_proj.in_features
    noise = fill("noise embedding", (7, 5, channels))
    given = Tokens(z, other if guided else None, torch.linspace(1, 3, 5), 0.9, noise[0], noise[1:], Schedule.cosine(6))
    with torch.inference_mode():
        wanted = head.denoise(*vars(given).values())
        points = path(given.step(head), noise[0], noise[1:])
        mean, log_std = given.step(head)(points[-2], 0)
    torch.testing.assert_close(mean, wanted.mean)
    torch.testing.assert_close(log_std, wanted.log_std)


@torch.inference_mode()
def test_a_pair_of_models_is_measured_without_a_trace_left():
    model, drafter = tiny_masked.tiny(1), tiny_masked.tiny(2)
    prompt = model.encode_features(torch.tensor([[[3.0]]]))
    same = measure(model, tiny_masked.tiny(1), prompt, 2, 0.26, steps=3)
    found = measure(model, drafter, prompt, 2, 0.26, steps=3)
    assert [row[0] for row in found] == [*ROWS, *ROWS] and found[0][1] == 1 < found[3][1]
    for rows, best in ((same, 1.0), (found, 0.99)):
        assert (rows[0][4] > 0.999) == (rows[2][4] > 0.999) == (best == 1.0)
        assert all(0 <= row[4] <= 1 for row in rows)
    assert "denoise" not in vars(model.head)


def test_calls_are_joined_image_by_image():
    def call(start):
        return Tokens(start + torch.arange(2.0)[:, None], None, start + torch.arange(2.0), 1.0, *two(start), None)

    def two(start):
        return start + torch.arange(2.0)[:, None], start + torch.arange(6.0).view(3, 2, 1)

    both = joined([call(0.0), call(10.0)])
    assert both.z[:, 0].tolist() == both.cfg.tolist() == both.noise0[:, 0].tolist() == [0, 10, 1, 11]
    assert both.noise_t[1, :, 0].tolist() == [2, 12, 3, 13] and both.z_uncond is None


def test_a_recording_ends_after_an_error():
    head = tiny_masked.tiny(1).head
    with pytest.raises(KeyError), recorded(head):
        raise KeyError
    assert "denoise" not in vars(head)
