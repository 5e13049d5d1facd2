"""Our Harmon against the official code, on the same random weights, in fp32.

harmon.json holds what https://github.com/wusize/Harmon gave at commit 4eb6087 on a CPU (torch 2.12, transformers
4.45.2, timm 0.9.12). Its class Harmon was run as it is, in evaluation mode; its BUILDER was replaced by one that passes
ready modules through, its VAE by one whose decode returns the latent. The modules were
  MAR(img_size=64, encoder_embed_dim=32, encoder_depth=2, encoder_num_heads=4, decoder_* the same, buffer_size=4,
      norm_layer=LayerNorm(eps=1e-6), class_num=10, diffloss_d=2, diffloss_w=32, num_sampling_steps="5")
  Qwen2ForCausalLM(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
      num_key_value_heads=2, rope_theta=1e6)
filled with the values that ``harmon_fill`` in tests/support/tiny_harmon.py derives from the names of the parameters.
  positions_*  the three position tables for a grid of 3 x 5, every fifth number
  z_*          forward_mae_encoder and forward_mae_decoder after a prompt of 9 tokens and one of 4 (padded to 9), with
               0, 1 or 9 tokens known; every fourth number
  sample_*     sample(): a guided batch of two with orders of their own; a smaller grid with linear guidance and
               temperature 0.9; one without guidance. ``draw`` has their orders and noises
  released     tensors, numbers, and a SHA-256 of all names and shapes of the official models of both released sizes
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.samplers.continuous_contract import ContinuousParams

from ..support.closeness import assert_as_exact
from ..support.tiny_harmon import STEPS, VOCAB, fill, write_harmon

OFFICIAL = json.loads((Path(__file__).parent / "harmon.json").read_text(encoding="utf-8"))
PROMPT = [(7 * i + 3) % VOCAB for i in range(9)]
NULL = [(11 * i + 5) % VOCAB for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_harmon(tmp_path_factory.mktemp("model") / "harmon.safetensors"))


def prompt(model, ids):
    return model.encode_features(torch.tensor(ids, dtype=torch.float32)[None, :, None])


def close(compute, name):
    assert_as_exact(compute, torch.tensor(OFFICIAL[name]))


@pytest.mark.parametrize("table", ["encoder", "decoder", "head"])
def test_positions_of_another_grid(model, table):
    close(lambda: getattr(model.backbone.positions(3, 5), table)[0, :, ::5], f"positions_{table}")


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_condition_vectors_of_both_guidance_branches(model, grid, count, padding):
    """``padding``: places for tokens that other rows of the batch may know and this one does not."""
    length = math.prod(grid)
    known = torch.zeros(1, 1, length, dtype=torch.bool)
    known[0, 0, np.random.RandomState(count).permutation(length)[:count]] = True
    prompts, tokens = (prompt(model, PROMPT), prompt(model, NULL)), fill("tokens embedding", (1, length, 16))

    def compute():
        state = model.start(*prompts, 1, grid, guided=True)
        return model.condition_vectors(state, tokens, known, count + padding)[:, 0, 0, :, ::4]

    close(compute, f"z_{grid[0]}x{grid[1]}_{count}")


def noises(images, length):
    """The noise each token starts from (small, as ``harmon_fill`` explains) and that of its steps."""
    return (
        fill("first noise embedding", (images, length, 16)) * 1e-4,
        fill("step noise embedding", (STEPS, images, length, 16)),
    )


def official_counts(length, iterations):
    """How many tokens are unknown after each pass."""
    unknown = length
    for i in range(iterations - 1):
        unknown = max(1, min(unknown - 1, math.floor(length * math.cos(math.pi / 2 * (i + 1) / iterations))))
        yield unknown
    yield 0


def draw(model, grid, images, iterations, params, schedule):
    length = math.prod(grid)
    order = torch.stack([torch.from_numpy(np.random.RandomState(100 + i).permutation(length)) for i in range(images)])
    first, steps = noises(images, length)
    state = model.start(prompt(model, PROMPT), prompt(model, NULL), images, grid, params.cfg > 1)
    tokens, known = torch.zeros(images, length, 16), torch.zeros(images, length, dtype=torch.bool)
    for unknown in official_counts(length, iterations):
        before = int(known[0].sum())
        query = order[:, unknown : length - before]  # its first ones stay unknown longest
        index = query[..., None].expand(-1, -1, 16)
        scale = model.guidance(params, torch.tensor(before), torch.tensor(length - unknown), length)
        distribution = model.predict(
            state,
            tokens,
            known[:, None],
            query[:, None],
            before,
            scale.expand(images, 1, query.shape[1]),
            params.temperature,
            first.gather(1, index)[:, None],
            steps.gather(2, index.expand(len(steps), -1, -1, -1))[:, :, None],
            schedule,
        )
        tokens.scatter_(1, index, distribution.mean[:, 0])
        known.scatter_(1, query, True)
    return model.to_latent(tokens, grid)


@pytest.mark.parametrize(
    ("name", "grid", "images", "iterations", "params"),
    [
        ("sample_4x4", (4, 4), 2, 5, {"cfg": 3.0, "cfg_schedule": "constant"}),
        ("sample_3x5", (3, 5), 1, 4, {"cfg": 2.0, "cfg_schedule": "linear", "temperature": 0.9}),
        ("sample_unguided", (4, 4), 1, 4, {"cfg": 1.0, "cfg_schedule": "constant"}),
    ],
)
def test_whole_images(model, name, grid, images, iterations, params):
    params = ContinuousParams(steps=STEPS, **params)
    schedule = model.schedule(params)
    close(lambda: draw(model, grid, images, iterations, params, schedule), name)
