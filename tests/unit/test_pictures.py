"""Scaling images: strips are cut first, so that what is thrown away is never enlarged."""

import pytest
import torch
from comfyui_specar.models import pictures
from comfyui_specar.models.pictures import cut_strip, scale_to_cover

from ..support.tiny import fill


@pytest.mark.parametrize(("down", "across"), [(0.0, 0.5), (0.5, 0.5), (1.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_strip_keeps_what_is_shown_of_it(down, across, wide):
    strip = torch.arange(1001).view(1, 1, 1001, 1) if wide else torch.arange(1001).view(1, 1001, 1, 1)
    kept = cut_strip(strip, 512, 512, (down, across))
    at = across if wide else down
    assert kept.numel() == 13, "8 of the shown pixel, 4 beside it, and one so that the middle is in the middle"
    assert kept.flatten()[int(12 * at)] == 1000 * at


@pytest.mark.parametrize("size", [(1, 10**6), (10**6, 1), (3, 20000)])
@pytest.mark.parametrize("shown", [(512, 512), (512, 2048), (2048, 512), (1024, 1024)])
def test_what_becomes_of_any_strip_is_bounded(size, shown):
    kept = cut_strip(torch.zeros(*size, 3), *shown)
    scale = max(shown[0] / kept.shape[0], shown[1] / kept.shape[1])
    assert kept.shape[0] * kept.shape[1] * scale**2 < 2**25


@pytest.mark.parametrize("size", [(4, 32), (32, 4), (30, 40), (9, 76)])
def test_other_images_are_left_as_they_are(size):
    image = fill("image embedding", (*size, 3)).sigmoid()
    assert cut_strip(image, 64, 64) is image


def test_the_middle_of_a_strip_is_that_of_the_whole(monkeypatch):
    ramp = torch.linspace(0, 1, 400).square()[None, :, None].expand(4, -1, 3)
    found = scale_to_cover(ramp, 64, 64)
    monkeypatch.setattr(pictures, "LONG", 1000)
    whole = scale_to_cover(ramp, 64, 64)
    assert found.shape == (64, 64, 3) and (found - whole).abs().max() <= 1.01 / 255


def test_levels_and_halves_are_those_of_the_authors_code():
    levels = (fill("image embedding", (64, 64, 3)).sigmoid() * 255).byte()
    image = levels.float() / 255
    for between in (-0.4, 0.0, 0.4):
        assert torch.equal(scale_to_cover(image + between / 255, 64, 64), image), (
            "the nearest level, not the next lower one"
        )
    halves = levels.float().unflatten(0, (32, 2)).unflatten(2, (32, 2)).mean((1, 3))
    assert (scale_to_cover(image, 32, 32) * 255 - halves).abs().max() <= 1.01, "averages from twice the size on"
