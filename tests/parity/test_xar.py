"""Our xAR against the official code, on the same random weights, in fp32.

xar.safetensors holds what https://github.com/OliverRensu/xAR gave at commit 121e9c9 on a CPU (torch 2.13, timm 0.9.12).
Its xAR(encoder_embed_dim=32, encoder_depth=2, encoder_num_heads=4, decoder_* alike) was filled, in evaluation mode,
with the values ``xar_weight`` in tests/support/tiny_xar.py derives from the names of the parameters; classes 3 and 8.
  velocity_s_1.0   sample_inference(previous cell ``clean``, cell s ``noisy``; times 0 and 1; update_cache, mask), every
                   fourth token; the calls for s = 0 .. 3 follow one another, so that the cache holds the clean cells
  velocity_s_0.37  the next call, on the noisy cell alone at time 0.37
  sample_*         sample_tokens(6, cfg) with ``noise`` in place of torch.randn and randn_like; every third channel
  flow_*           the same with the official euler_sampler in place of euler_maruyama_sampler
  metadata         tensors, numbers, and a SHA-256 of all names and shapes of the released sizes (buffers left out)
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from comfyui_specar.models.networks.xar import XAR, XARConfig
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.methods import continuous_next_token
from safetensors.torch import load_file

from ..support.closeness import assert_as_exact
from ..support.tiny import fill
from ..support.tiny_xar import tiny_xar

FILE = Path(__file__).parent / "xar.safetensors"
OFFICIAL = load_file(FILE)
STEPS = 6
CELLS, CELL = XARConfig().cells, XARConfig().cell
LABELS = torch.tensor([3.0, 8.0]).view(2, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_xar(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def whole_steps(monkeypatch):
    """Times become whole steps by cutting off what fp32 made of 1000 t: in fp64 they are to be the same ones."""
    in_fp32 = XAR.times

    def times(net, times, device):
        if torch.get_default_dtype() == torch.float32:
            return in_fp32(net, times, device)
        return net.time_embed(torch.from_numpy(np.float32(times) * np.float32(1000)).long(), net.dtype)

    monkeypatch.setattr(XAR, "times", times)


def cells(name):
    return fill(f"{name} embedding", (2, CELLS * CELL, 16)).unflatten(1, (CELLS, CELL))


@pytest.mark.parametrize("cell", range(CELLS))
@pytest.mark.parametrize("time", [1.0, 0.37])
def test_velocity_of_a_cell_after_clean_cells(model, cell, time):
    """The official code reads one clean cell more per stage, together with the first noise; we read all at once."""
    net, clean, noisy = model.backbone, cells("clean")[:, :cell], cells("noisy")[:, cell : cell + 1]

    def compute():
        classes = net.class_emb(LABELS[:, 0, 0].long())
        past = net.read(clean, classes) if cell else None
        condition = (classes + net.times([time], "cpu"))[:, None]
        return net(noisy, condition, net.places(torch.full((2, 1), cell)), past)[0][:, 0, ::4]

    assert_as_exact(compute, OFFICIAL[f"velocity_{cell}_{time}"])


def test_epsilons_of_the_norms(model):
    """Those of the official code. No comparison shows them: angles of up to 1000 leave larger errors in fp32."""
    assert {module.eps for module in model.backbone.modules() if hasattr(module, "eps")} == {1e-6}


@pytest.mark.parametrize(
    ("name", "kind", "cfg"), [("sample_3.0", "ddpm", 3.0), ("sample_1.0", "ddpm", 1.0), ("flow_3.0", "ddim", 3.0)]
)
def test_guided_image(model, monkeypatch, name, kind, cfg):
    """A whole image through our own sampler, whose noise is replaced by the injected one."""
    injected = fill("noise embedding", (STEPS + 1, 2, CELLS * CELL, 16))
    rank = model.order.argsort()

    def noises(stream, positions, channels, steps, *purpose):
        place = rank[positions][None, ..., None].expand(STEPS + 1, -1, -1, channels)
        drawn = injected.gather(2, place)
        return drawn[0], drawn[1:]

    monkeypatch.setattr(continuous_next_token, "noises", noises)
    params = ContinuousParams(cfg=cfg, steps=STEPS, kind=kind)
    request = ContinuousRequest(model, model.encode_features(LABELS), model.grid, params, batch=2)

    def compute():
        out = continuous_next_token.ContinuousNextToken().sample(request)
        assert out.trace.totals["target_passes"] == CELLS
        return (model.to_latent(out.tokens, model.grid) * model.scale)[:, ::3]

    assert_as_exact(compute, OFFICIAL[name])
