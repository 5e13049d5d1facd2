"""Our MAR against the official code, on the same random weights, in fp32.

mar.json holds what https://github.com/LTH14/mar gave at commit fe470ac on a CPU (torch 2.13, timm 0.9.12). Its modules
were filled, in evaluation mode, with the values ``mar_fill`` in tests/support/tiny_mar.py derives from the names of
the parameters: MAR(img_size=64, encoder_embed_dim=32, encoder_depth=2, encoder_num_heads=4, decoder_embed_dim=32,
decoder_depth=1, decoder_num_heads=4, norm_layer=LayerNorm with eps 1e-6, class_num=10, buffer_size=4, diffloss_d=2,
diffloss_w=24). ``numbers`` below gives the tokens and noises. n known tokens are the last n of ``order``.
  encoder_n, z_n   forward_mae_encoder and forward_mae_decoder with n known tokens, for classes 3 and 8 (n = 7: class 3
                   and the unconditional vector)
  net, net_cfg     the denoising network at timesteps 0, 1, 250, 500, 749, 999, and forward_with_cfg with scale 2.5
  mean_T, log_variance_T   p_mean_variance of T respaced steps at indices INDICES[T]
  timesteps, respacing_sha256, tables_T   the kept steps (all of T = 2 .. 1000: one line each, hashed), and tables at
                   indices 0, 1, T // 2, T - 1
  loop_T_k_cfg_temperature, ddim_T_k_cfg   p_sample_loop and ddim_sample_loop (eta 0) over the last k of T steps (None:
                   all of them; a random network then ends at values of 1e5, because nothing cancels the first noise)
  sample_*, counts_*   sample_tokens with SAMPLES' settings, and how many tokens each pass drew
  released         tensors, numbers, and a SHA-256 of all names and shapes of the official models
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.families import mar
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.models.networks.diffusion_head import NoiseSchedule
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.methods import continuous_next_token
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken, mask_schedule

from ..support.closeness import assert_as_exact
from ..support.tiny import fill
from ..support.tiny_mar import last_steps, write_mar

OFFICIAL = json.loads((Path(__file__).parent / "mar.json").read_text(encoding="utf-8"))
ORDER = torch.tensor(OFFICIAL["order"])  # the official code unmasks it from its end
INDICES = {100: [0, 1, 13, 50, 88, 99], 5: [0, 1, 2, 3, 4, 0]}
TIMESTEPS = torch.tensor([0, 1, 250, 500, 749, 999])


def numbers(name, *shape):
    return fill(f"{name} embedding", shape)


TOKENS = numbers("tokens", 2, 16, 16)
NOISY, Z, Z_UNCOND = numbers("noisy", 6, 16), numbers("z", 6, 32), numbers("z of no prompt", 6, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_mar(tmp_path_factory.mktemp("model") / "model.safetensors")
    return mar.load(open_checkpoint(path), torch.float32, None, ())


def close(compute, *names, apart=0):
    assert_as_exact(compute, [torch.tensor(OFFICIAL[name]) for name in names], apart)


def schedule(steps, last=None, kind="ddpm"):
    """All of ``steps`` denoising steps, or the ``last`` of them."""
    whole = NoiseSchedule.cosine(steps, kind)
    return whole if last is None else last_steps(whole, last)


# Backbone


@pytest.mark.parametrize("more", [0, 3, 16], ids=lambda n: f"padded by {n}")
@pytest.mark.parametrize("count", [0, 1, 7, 15])
def test_hidden_states_and_condition_vectors(model, count, more):
    """Also when there are slots for more known tokens than there are, as in batches of unequal progress."""
    backbone, positions = model.backbone, model.backbone.positions(4, 4)
    known = torch.zeros(2, 16, dtype=torch.bool).scatter(1, ORDER[:, 16 - count :], True)

    def compute():
        prompt = backbone.prompt(torch.tensor([3.0, 8.0]).view(2, 1, 1))
        if count == 7:
            prompt = torch.cat((prompt[:1], backbone.unconditional(1)))
        encoded = backbone.encode(prompt, TOKENS, known, min(count + more, 16), positions)
        return encoded.hidden[:, : 4 + count], backbone.decode(encoded, positions)

    close(compute, f"encoder_{count}", f"z_{count}")


# Head


def test_denoising_network(model):
    def compute():
        head = model.head
        outputs = [head.net(NOISY, head.net.time_embed(TIMESTEPS, torch.float32), head.embed(z)) for z in (Z, Z_UNCOND)]
        noise, unguided = (output[:, :16] for output in outputs)
        return outputs[0], torch.cat((unguided + 2.5 * (noise - unguided), outputs[0][:, 16:]), dim=1)

    close(compute, "net", "net_cfg", apart=1)


@pytest.mark.parametrize("steps", INDICES)
def test_mean_and_log_variance(model, steps):
    """Row by row: the first step multiplies numbers and their errors by 316."""
    given = NOISY, torch.tensor(INDICES[steps]), Z, NoiseSchedule.cosine(steps)
    close(lambda: model.head.mean_log_variance(*given), f"mean_{steps}", f"log_variance_{steps}", apart=1)


def test_respacing():
    lines = [" ".join(map(str, NoiseSchedule.cosine(n).timesteps.tolist())) for n in range(2, 1001)]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == OFFICIAL["respacing_sha256"]
    for steps, wanted in OFFICIAL["timesteps"].items():
        assert NoiseSchedule.cosine(int(steps)).timesteps.tolist() == wanted


@pytest.mark.parametrize("steps", [5, 100, 1000])
def test_tables(steps):
    """To fp32 precision in every entry, the tiny ones at both ends included."""
    ours, wanted = NoiseSchedule.cosine(steps), OFFICIAL[f"tables_{steps}"]
    for name, found in {
        "sqrt_alphas_cumprod": ours.signal,
        "sqrt_one_minus_alphas_cumprod": ours.noise,
        "betas": ours.log_beta.exp(),
        "alphas_cumprod_prev": ours.signal_next.square(),
        "posterior_log_variance_clipped": ours.log_posterior,
        "posterior_mean_coef1": ours.from_clean,
        "posterior_mean_coef2": ours.from_noisy,
    }.items():
        expected = torch.tensor(wanted[name])
        assert torch.allclose(found[[0, 1, steps // 2, steps - 1]], expected, rtol=1e-6, atol=0), name
    assert torch.allclose(ours.signal_next.square() + ours.noise_next.square(), torch.ones(steps), atol=1e-6)


LOOPS = [name for name in OFFICIAL if name.startswith(("loop_", "ddim_"))]


@pytest.mark.parametrize("name", LOOPS)
def test_denoising_loops(model, name):
    kind, steps, last, cfg, *temperature = name.split("_")
    steps = schedule(int(steps), None if last == "None" else int(last), "ddim" if kind == "ddim" else "ddpm")
    guided = cfg != "None"
    run = (
        Z,
        Z_UNCOND if guided else None,
        float(cfg) if guided else 1.0,
        float(*temperature or [1.0]),
        numbers("first noise", 6, 16),
        numbers("later noise", steps.steps, 6, 16),
        steps,
    )
    close(lambda: model.head.denoise(*run).mean, name, apart=1)


# Whole images

SAMPLES = {  # iterations, guidance, its schedule, temperature, denoising steps, the last of them
    "single_linear": (16, 2.9, "linear", 1.0, 25, 12),
    "cosine_constant": (6, 4.0, "constant", 0.95, 25, 12),
    "cosine_linear": (6, 3.0, "linear", 1.0, 25, 12),
    "unguided": (9, 1.0, "linear", 0.95, 25, 12),
    "all_at_once": (1, 2.0, "linear", 1.0, 25, 12),
    "whole_range": (16, 2.9, "linear", 1.0, 100, None),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] * (name == "whole_range")) for name in SAMPLES]
)
def test_whole_images(model, monkeypatch, name):
    """The baseline sampler, given the official order and noises, generates the official images of classes 3 and 8."""
    iterations, cfg, guidance, temperature, steps, last = SAMPLES[name]
    steps = schedule(steps, last)
    noise0 = numbers("first noise of the picture", 2, 16, 16)
    noise_t = numbers("later noise of the picture", steps.steps, 2, 16, 16)

    def noises(stream, positions, channels, count):
        index = positions[..., None].expand(-1, -1, channels)
        return noise0.gather(1, index), noise_t.gather(2, index.expand(count, -1, -1, -1))

    monkeypatch.setattr(continuous_next_token, "noises", noises)
    monkeypatch.setattr(model, "schedule", lambda params: steps)
    monkeypatch.setattr(model, "order", ORDER.flip(1))
    classes = model.encode_features(torch.tensor([3.0, 8.0]).view(2, 1, 1))
    request = ContinuousRequest(model, classes, (4, 4), ContinuousParams(cfg, guidance, temperature), batch=2)

    def compute():
        return model.to_latent(ContinuousNextToken(iterations).sample(request).tokens, (4, 4)) * model.scale

    close(compute, f"sample_{name}")
    assert mask_schedule(iterations, 16) == OFFICIAL[f"counts_{name}"]
