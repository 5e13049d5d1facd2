"""Continue Picture, and the mask of the VVS Sampler: what is kept, what may be skipped, and at which size."""

import pytest
import torch
from comfyui_specar.models.latents import quantize
from comfyui_specar.nodes import regions
from comfyui_specar.samplers.trace import Source

from .conftest import FACTOR, GRID

SIZE = GRID * FACTOR


@pytest.fixture(scope="module")
def image(tiny):
    """[1, 40, 64, 3]: wider than the model generates, with a margin above and below."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(1, 40, 64, 3, generator=generator)


@pytest.fixture
def keep(run_node, image):
    """keep((model, clip, vae), **inputs) -> the latent of Continue Picture."""

    def keep(loaded, image=image, **inputs):
        return run_node("ContinuePicture", model=loaded[0], vae=loaded[2], image=image, **inputs).result[0]

    return keep


@pytest.mark.parametrize(
    "side, kept",
    [
        ("top", [[1] * 4] * 3 + [[0] * 4]),
        ("bottom", [[0] * 4] + [[1] * 4] * 3),
        ("left", [[1, 1, 1, 0]] * 4),
        ("right", [[0, 1, 1, 1]] * 4),
    ],
)
def test_whole_rows_or_columns_of_a_side_stay(keep, tiny, side, kept):
    latent = keep(tiny, keep=0.7, side=side)
    assert latent["samples"].shape == (1, 8, GRID, GRID)
    assert (1 - latent["noise_mask"]).tolist() == [[kept]]


def test_all_and_nothing_may_stay(keep, tiny):
    assert keep(tiny, keep=0.0)["noise_mask"].all()
    assert not keep(tiny, keep=1.0)["noise_mask"].any()


@pytest.mark.parametrize("method", ["NextToken", "SJD", "DraftTree"])
def test_samplers_continue_below_the_top(keep, tiny, sample, image, method):
    latent = keep(tiny, image=image.repeat(2, 1, 1, 1))
    whole = quantize(tiny[0].model, latent["samples"])
    drawn, trace = sample(method, latent_image=latent)
    assert torch.equal(drawn["ar_tokens"][:, : GRID // 2], whole[:, : GRID // 2])
    assert trace.summary()["prefix_tokens"] == 2 * GRID * GRID // 2
    assert (trace.grid("source")[:, : GRID // 2] == Source.FORCED).all()
    assert trace.totals["target_passes"] <= GRID * GRID // 2
    repeated = {**latent, "samples": latent["samples"][:1].repeat(3, 1, 1, 1)}  # what Repeat Latent Batch makes
    others = sample(method, latent_image=repeated)[0]["ar_tokens"]
    assert torch.equal(others[0], drawn["ar_tokens"][0]) and not torch.equal(others[0], others[1])


def test_a_continuous_model_goes_on_from_any_side(keep, continuous, draw_vectors):
    for side in regions.SIDES:
        latent = keep(continuous, side=side)
        drawn, _ = draw_vectors("NextToken", latent_image=latent)
        stays = latent["noise_mask"][0, 0] == 0
        assert torch.allclose(drawn["samples"][..., stays], latent["samples"][..., stays].float(), atol=1e-5)
        assert not torch.allclose(drawn["samples"][..., ~stays], latent["samples"][..., ~stays].float(), atol=1e-2)


@pytest.mark.parametrize(
    "size, place, rows, cols",
    [
        ((32, 64), (0.0, 0.5), (0, 32), (16, 48)),
        ((64, 32), (0.0, 0.5), (0, 32), (0, 32)),
        ((64, 32), (1.0, 0.5), (32, 64), (0, 32)),
        ((32, 32), (0.5, 0.5), (0, 32), (0, 32)),
        ((32, 48), (0.5, 1.0), (0, 32), (16, 48)),
    ],
)
def test_an_image_that_fills_the_size_is_only_cut(size, place, rows, cols):
    image = torch.rand(1, *size, 3)
    assert torch.equal(regions.crop_to_fit(image, 32, 32, place), image[:, slice(*rows), slice(*cols)])


def test_an_image_of_another_size_is_scaled_and_stays_in_range():
    image = (torch.arange(100)[None, :, None, None] > 49).float().expand(2, 100, 300, 3)
    out = regions.crop_to_fit(image, 32, 32, (0.0, 0.5))
    assert out.shape == (2, 32, 32, 3) and float(out.min()) >= 0 and float(out.max()) <= 1
    assert not out[:, :14].round().any() and out[:, 18:].round().all()
    assert regions.crop_to_fit(torch.rand(1, 7, 5, 3), 32, 48, (0.5, 0.5)).shape == (1, 32, 48, 3)


def test_a_strip_is_cut_before_it_is_scaled(monkeypatch):
    sizes, scale = [], regions.F.interpolate
    monkeypatch.setattr(regions.F, "interpolate", lambda x, size, **more: sizes.append(size) or scale(x, size, **more))
    ramp = torch.linspace(0, 1, 800)[None, None, :, None].expand(1, 1, -1, 3)
    for place, around in (((0.0, 0.5), 0.5), ((0.5, 1.0), 1.0), ((0.5, 0.0), 0.0)):
        out = regions.crop_to_fit(ramp, 64, 64, place)
        assert out.shape == (1, 64, 64, 3) and (out - around).abs().max() < 2 / 800
    assert max(max(size) for size in sizes) <= 12 * 64


def test_the_nearest_size_has_the_images_proportions(tiny):
    class Many:
        grids, pixels_per_token = ((4, 4), (8, 8), (4, 8), (8, 4)), 8

    found = [regions.nearest_grid(Many, *size) for size in ((100, 100), (20, 26), (30, 64), (900, 300), (64, 64))]
    assert found == [(8, 8), (4, 4), (4, 8), (8, 4), (8, 8)]
    assert regions.nearest_grid(tiny[0].model, 7, 900) == (GRID, GRID)


def test_a_decoder_of_another_model_is_named(keep, tiny):
    class Other:
        def encode(self, pixels):
            return torch.zeros(1, 4, 9, 9)

        def decode(self, latent):
            raise AssertionError("nothing is to be decoded")

    with pytest.raises(ValueError, match="VAE of Load AR Checkpoint"):
        keep((tiny[0], None, Other()))
    with pytest.raises(ValueError, match="side.*'front'"):
        keep(tiny, side="front")


# Where verification may be skipped


@pytest.mark.once
def test_vvs_skips_only_where_its_mask_says(sample):
    where = torch.zeros(1, SIZE, SIZE)
    where[:, SIZE // 2 :] = 1
    inputs = {"batch": 6, "interval": 2, "structure": "chain"}
    _, trace = sample("VVS", where=where, **inputs)
    skipped = trace.grid("source") == Source.SKIPPED
    assert not skipped[:, : GRID // 2].any()
    _, everywhere = sample("VVS", **inputs)
    assert (everywhere.grid("source") == Source.SKIPPED)[:, : GRID // 2].any()
    nowhere, none = sample("VVS", where=where * 0, **inputs), sample("VVS", where=where * 0 + 1, **inputs)
    assert not (nowhere[1].grid("source") == Source.SKIPPED).any()
    assert torch.equal(none[1].grid("source"), everywhere.grid("source"))
