"""A widened continuous pair is the bundled one at another cost: the same predictions, acceptance and images."""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_drafter
from comfyui_specar.tools.benchmarks.widen_masked import SIZES, Shapes, shapes_for, widen


@pytest.fixture(scope="module")
def pairs():
    """Target and drafter, as bundled and with twice the width, more layers and a head that is wider and deeper."""
    model = api.load_model(api.bundled("continuous"))
    own = model, load_drafter(api.bundled("continuous/small"), model, device="cpu")
    wide = [
        widen(each, Shapes(2 * s.dim, s.layers + 1, 3 * s.head_width, s.head_depth + 1))
        for each in own
        for s in [Shapes.of(each)]
    ]
    return own, wide


def test_released_sizes_are_reached_in_whole_factors(pairs):
    own, small = map(Shapes.of, pairs[0])
    for name, size in SIZES.items():
        target, drafter = shapes_for(pairs[0], name)
        assert target.dim % own.dim == 0 == target.head_width % own.head_width
        assert all(0 <= got - asked < step for got, asked, step in zip(target, size, own, strict=True))
        assert drafter.dim * own.dim == small.dim * target.dim
    assert shapes_for(pairs[0], "mar-b")[0] == SIZES["mar-b"]


def test_every_condition_vector_and_denoised_token_is_the_same(pairs):
    """Sums over more numbers are rounded differently; the repeated vectors agree to 1e-4 of their size."""
    for narrow, wide in zip(*pairs, strict=True):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(2, *narrow.grid, narrow.channels, generator=generator)
        known = torch.rand(2, narrow.grid[0] * narrow.grid[1], generator=generator) < 0.5
        prompt = narrow.encode_prompt("heart, 3d, on a blue background")
        z, wide_z = (model.condition(prompt, tokens, known) for model in (narrow, wide))
        assert (wide_z - z.repeat(1, 1, 2)).abs().max() < 1e-4 * z.abs().max()
        noise = torch.randn(2, 5, narrow.channels, generator=generator)
        index = torch.tensor([3] * 5)
        found = [
            model.head.mean_log_variance(noise[0], index, vectors[0, :5])
            for model, vectors in ((narrow, z), (wide, wide_z))
        ]
        for got, expected in zip(found[1], found[0], strict=True):
            assert torch.allclose(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_speculation_generates_the_same_image_in_the_same_passes(pairs):
    """What rounding changes grows while a token is denoised, and over 64 tokens: 1e-2 of the largest number."""
    found = []
    for target, drafter in pairs:
        out = api.sample(
            target,
            target.encode_prompt("heart, 3d, on a blue background"),
            api.methods.ContinuousSpeculative(drafter, 8),
            seed=4,
            steps=5,
        )
        found.append((out.latent, out.trace.totals["target_passes"], out.trace.totals["draft_passes"]))
    assert found[0][1:] == found[1][1:]
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-2 * float(found[0][0].abs().max()))
