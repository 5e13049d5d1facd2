"""Continuous speculative decoding as its authors published it, against our mode "published" and, as far as it is the
same, our ``path="official"`` in mode "block", at a tolerance of 42 widths, given the same numbers.

cspd.json holds what https://github.com/MarkXCloud/CSpD gave at commit d91f721 on a CPU (torch 2.13). ``distributions``
below gives 12 pairs of Gaussians of 16 dimensions each: as a released model ends ("released": width 0.0063, means 0.25
apart in every dimension), overlapping ones of that width ("close"), and wide ones that overlap ("wide").
  log_accept_*      log of DistributionProcessor.judge_accept at the draft's mean ("wide": at a sample), in fp64;
                    *_unwidened: with inner temperature 1, at the target's mean ("wide": at the same sample)
  residual_*        subtracted_distribution_unormalize, the probability that a proposal is taken
  image_*, accepted_*   SpecDecodeRunner(ratio=0).run, for classes 3 and 8, of the target of mar.json and a drafter
                    with 0.2 % of other weights mixed in: one token per step, blocks and settings as in IMAGES, the
                    last 12 of 25 denoising steps. Its acceptance numbers were all 0.5, its residual's proposals all
                    the target's mean: the same choices as ours. Some drafts are accepted, some are not.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.families import mar
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from comfyui_specar.models.networks.diffusion_head import NoiseSchedule
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.continuous_distributions import Normal
from comfyui_specar.samplers.methods.continuous import ContinuousRun, ContinuousSpeculative, log_ratio, sample_residual
from comfyui_specar.samplers.rng import Purpose, Stream

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.tiny import fill
from ..support.tiny_mar import MAR, last_steps, mar_fill, mar_shapes

OFFICIAL = json.loads((Path(__file__).parent / "cspd.json").read_text(encoding="utf-8"))
KINDS = {"released": (0.0063, 0.25, 0.5), "close": (0.0063, 0.004, 0.1), "wide": (1.0, 0.5, 0.1)}
KAPPA, INVERTED = 42.0, -1.0


def numbers(name, *shape):
    return fill(f"{name} embedding", shape)


def distributions(kind):
    """Target and draft distribution, a sample of the draft's, proposals for the residual."""
    width, distance, sums = KINDS[kind]
    mean = numbers(f"{kind} draft mean", 12, 16)
    widths = {who: math.log(width) + 0.05 * numbers(f"{kind} {who} width", 12, 16) for who in ("draft", "target")}
    paths = {who: (-3 + sums * numbers(f"{kind} {who} sums", 12, 16)).sum(-1) for who in ("draft", "target")}
    q = Normal(mean, widths["draft"], paths["draft"])
    p = Normal(mean + distance * numbers(f"{kind} distance", 12, 16), widths["target"], paths["target"])
    x = mean + q.log_std.exp() * numbers("wide x", 12, 16) if kind == "wide" else mean
    return p, q, x, numbers(f"{kind} proposals", 12, 16)


DIGITS = 1e-9  # recorded fp64 numbers have 10 digits


def close(compute, name):
    """Numbers that were recorded in fp64."""
    wanted = torch.tensor(OFFICIAL[name], dtype=torch.float64)
    with fp64():
        torch.testing.assert_close(compute(), wanted, rtol=DIGITS, atol=0)
    assert_as_exact(compute, wanted.float())


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance(kind):
    def compute():
        p, q, x, _ = distributions(kind)
        return log_ratio(x, p, q, KAPPA, INVERTED)

    close(compute, f"log_accept_{kind}")


@pytest.mark.parametrize("kind", ["close", "wide"])
def test_acceptance_without_widening(kind):
    def compute():
        p, q, x, _ = distributions(kind)
        return log_ratio(x if kind == "wide" else p.mean, p, q, 1.0, INVERTED)

    close(compute, f"log_accept_{kind}_unwidened")


@pytest.mark.parametrize("kind", KINDS)
def test_residual(kind):
    """A proposal is taken just below the official probability, and not just above."""
    wanted = torch.tensor(OFFICIAL[f"residual_{kind}"], dtype=torch.float64)

    def taken(shift):
        p, q, _, normal = distributions(kind)
        accept = (wanted + shift).clamp(min=0).to(torch.get_default_dtype())
        return sample_residual(p, q, normal[None], torch.zeros(1, 12), accept[None], INVERTED)[1] > 0

    # In fp32 these probabilities have errors of 1e-5: widths of 0.0063 magnify those of the means.
    for just, found in ((DIGITS, fp64()(taken)), (1e-3, lambda shift: decided(lambda: taken(shift)))):
        assert torch.equal(found(-just), wanted > 0) and not found(just).any()
    p, q, _, normal = distributions(kind)
    y, _ = sample_residual(p, q, normal[None], torch.zeros(1, 12), torch.zeros(1, 12), INVERTED)
    torch.testing.assert_close(y, p.sample(normal, torch.zeros(12)))
    assert kind == "released" or (wanted.min() < 0.2 and wanted.max() > 0.9)  # all of it was tried


def tiny(mix):
    """The target of mar.json (mix 0), or a drafter that has a share ``mix`` of other weights."""
    weights = {
        name: (1 - mix) * mar_fill(name, shape) + mix * mar_fill(f"draft {name}", shape)
        for name, shape in mar_shapes().items()
    }
    return mar.load(Checkpoint(weights, {"heads": MAR.heads}, Path("tiny")), torch.float32, None, ())


IMAGES = {"guided": (4.0, 1.0, 4), "unguided": (1.0, 0.95, 3)}  # guidance, temperature, draft length


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("mode", ["block", "published"])
def test_whole_images(monkeypatch, mode, name):
    cfg, temperature, length = IMAGES[name]
    steps = last_steps(NoiseSchedule.cosine(25), 12)
    noise0 = numbers("first noise of the picture", 2, 16, 16)
    noise_t = numbers("later noise of the picture", 12, 2, 16, 16)

    def noise(run, positions, purpose=Purpose.NOISE):
        index = positions[..., None].expand(-1, -1, 16)
        return noise0.gather(1, index), noise_t.gather(2, index.expand(12, -1, -1, -1))

    monkeypatch.setattr(ContinuousRun, "noise", noise)
    monkeypatch.setattr(Stream, "uniform", lambda stream, positions, *_, **__: torch.full(positions.shape, 0.5))
    monkeypatch.setattr(  # proposals of the residual
        Stream, "normal", lambda stream, positions, count, *_, **__: torch.zeros(*positions.shape, count)
    )
    target, drafter = tiny(0.0), tiny(0.002)
    target.order = torch.tensor(OFFICIAL["order"]).flip(1)
    target.schedule = drafter.schedule = lambda params: steps
    classes = target.encode_features(torch.tensor([3.0, 8.0]).view(2, 1, 1))
    method = ContinuousSpeculative(
        drafter, length, 1 / 16, mode, path="official", tolerance=KAPPA * steps.last_width * temperature
    )
    params = ContinuousParams(cfg, "constant", temperature)
    request = ContinuousRequest(target, classes, (4, 4), params, batch=2)

    def compute():
        out = method.sample(request)
        assert 0 < int(out.trace.rounds["accepted"].sum()) == OFFICIAL[f"accepted_{name}"] < 30
        return target.to_latent(out.tokens, (4, 4)) * target.scale

    assert_as_exact(compute, torch.tensor(OFFICIAL[f"picture_{name}"]))
