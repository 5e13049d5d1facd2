"""LATENTs to tokens and back, and masks of any size averaged over tokens: which of them are meant at the edges."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from comfyui_specar.nodes import latents
from comfyui_specar.samplers.contract import Request


def codes() -> SimpleNamespace:
    """A model whose ids are coordinates of its code vectors."""
    codebook = torch.arange(6.0).reshape(-1, 2)

    def dequantize(tokens):
        return codebook[tokens].movedim(-1, 1)

    about = {"continuous": False, "vocab": 3, "latent_channels": 2, "id_latents": False}
    return SimpleNamespace(codebook=codebook, dequantize=dequantize, **about)


def half_covered(value: float) -> torch.Tensor:
    """A mask [1, 4, 8] of two tokens: of the first one exactly half is ``value``, of the second all but one pixel."""
    mask = torch.zeros(1, 4, 8)
    mask[:, :2, :4] = value
    mask[:, :, 4:] = value
    mask[:, 0, 4] = 0
    return mask


def test_a_token_is_kept_if_less_than_half_of_it_is_masked():
    mask = half_covered(1.0)
    assert latents.keep_mask(mask, 1, 1, 2).tolist() == [[[False, False]]], "half is generated again"
    mask[0, 0, 0] = 0
    assert latents.keep_mask(mask, 1, 1, 2).tolist() == [[[True, False]]]
    assert latents.keep_mask(1 - mask, 3, 1, 2).tolist() == [[[False, True]]] * 3


@pytest.mark.parametrize("grey, skipped", [(0.5, True), (0.4921875, False), (0.5078125, True), (1.0, True)])
def test_verification_may_be_skipped_where_no_part_is_below_a_half(grey, skipped):
    mask = torch.ones(1, 4, 8)
    mask[0, 3, 3] = grey
    assert latents.skippable(mask, 1, 1, 2).tolist() == [[[skipped, True]]]
    assert latents.skippable(None, 1, 1, 2) is None, "everywhere"


def test_the_strength_of_a_rule_is_the_mean_over_the_token_between_0_and_1():
    mask = half_covered(1.0)
    assert latents.strength(mask, 1, 1, 2).tolist() == [[[0.5, 15 / 16]]]
    assert latents.strength(mask * 4 - 1, 1, 1, 2).tolist() == [[[1.0, 1.0]]]
    assert latents.strength(-mask, 1, 1, 2).tolist() == [[[0.0, 0.0]]]
    assert latents.strength(None, 1, 1, 2) is None


def test_masks_come_with_or_without_channel_one_or_as_many_as_images():
    for mask in (torch.rand(3, 5, 7), torch.rand(3, 1, 5, 7), torch.rand(1, 5, 7), torch.rand(5, 7)):
        plane = latents.planes(mask.double(), 3, "mask")
        assert plane.dtype == torch.float32 and torch.equal(plane.flatten(), mask.flatten())
        assert plane.shape[1:] == (1, 5, 7) and len(plane) in (1, 3)
    with pytest.raises(ValueError, match="noise mask.* 2 masks.* 3"):
        latents.keep_mask(torch.rand(2, 5, 7), 3, 5, 7)


def test_the_size_of_an_empty_latent_is_that_of_the_pixels_it_asks_for():
    model = SimpleNamespace(pixels_per_token=16, grids=((3, 5),), any_grid=False)
    empty, image = torch.zeros(1, 2, 4, 6), torch.zeros(1, 2, 4, 6).index_fill(3, torch.tensor([5]), 0.5)
    assert latents.grid_of({"samples": empty}, model) == (4, 6)
    assert latents.grid_of({"samples": image, latents.CELL: 8}, model) == (4, 6)
    for cell, grid in ((8, (2, 3)), (16, (4, 6)), (32, (8, 12))):
        assert latents.grid_of({"samples": empty, latents.CELL: cell}, model) == grid
    for rows, cols in ((3, 4), (4, 3)):
        with pytest.raises(ValueError, match=f"does not generate {cols * 8} x {rows * 8}"):
            latents.grid_of({"samples": torch.zeros(1, 2, rows, cols), latents.CELL: 8}, model)


def test_tokens_of_a_latent_are_its_own_as_long_as_they_fit_its_samples(monkeypatch):
    model, tokens = codes(), torch.tensor([[[0, 1], [2, 1]]])
    nearest = torch.full((1, 2, 2), 7)  # as distinct from those remembered
    monkeypatch.setattr(latents, "quantize", lambda model, samples: nearest)
    samples = model.dequantize(tokens)
    assert latents.tokens_of({"samples": samples, "ar_tokens": tokens}, model) is tokens
    for changed in (samples.flip(-1), samples + 0.25):
        assert (latents.tokens_of({"samples": changed, "ar_tokens": tokens}, model) == 7).all()
    from_the_end = torch.where(tokens == 2, -1, tokens)  # the same code vectors, but no ids
    for other in (None, tokens.int(), tokens[:, :1], tokens + 1, tokens - 1, tokens.tolist(), from_the_end):
        assert (latents.tokens_of({"samples": samples, "ar_tokens": other}, model) == 7).all()


def test_without_a_codebook_samples_are_ids():
    model = SimpleNamespace(continuous=False, codebook=None, vocab=4, latent_channels=1)
    samples = torch.tensor([[[[-3.0, 0.05, 0.95], [2.95, 3.0, 9.0]]]])
    assert latents.tokens_of({"samples": samples}, model).tolist() == [[[0, 0, 1], [3, 3, 3]]]


def test_the_output_keeps_what_was_kept_to_the_bit_and_what_else_the_latent_says():
    given = {"samples": torch.full((2, 2, 1, 2), 0.1), "noise_mask": "mask", "batch_index": [4, 5], latents.CELL: 8}
    tokens, drawn = torch.tensor([[[1, 2]], [[0, 1]]]), torch.rand(2, 2, 1, 2)
    discrete, others = Mock(spec=Request), {"noise_mask": "mask", "batch_index": [4, 5]}
    for latent, samples in ((drawn, drawn), (None, tokens[:, None].float())):
        found = latents.with_output(given, SimpleNamespace(tokens=tokens, latent=latent), discrete)
        assert torch.equal(found.pop("samples"), samples) and found.pop("ar_tokens") is tokens and found == others
    partly = drawn.clone()
    partly[0, :, 0, 0] = 0.1
    for kept, wanted in ((None, drawn), (torch.tensor([[True, False], [False, False]]), partly)):
        asked = SimpleNamespace(continuous=True, kept=kept, grid=(1, 2))
        found = latents.with_output(given, SimpleNamespace(tokens=None, latent=drawn), asked)
        assert torch.equal(found.pop("samples"), wanted) and found == others


def test_an_image_that_is_not_masked_is_not_used():
    image, mask = codes().dequantize(torch.tensor([[[0, 1], [2, 1]]])), torch.ones(1, 2, 2)
    empty = torch.zeros_like(image)
    for latent, notices in (
        ({"samples": image}, 1),
        ({"samples": image, "noise_mask": None}, 1),
        ({"samples": empty}, 0),
        ({"samples": image, "noise_mask": mask}, 0),
        ({"samples": empty, "noise_mask": mask}, 0),
        ({"samples": image + 0.5, "noise_mask": mask}, 1),  # no vectors of the codebook
    ):
        assert len(latents.describe_unused(latent, codes())) == notices


@pytest.mark.parametrize(
    "samples, said",
    [(torch.ones(2, 4, 4), "shape"), (torch.ones(1, 3, 4, 4), "2 channels"), (torch.zeros(1, 2, 4, 4), "no image")],
)
def test_what_is_no_image_of_the_model_is_refused(samples, said):
    with pytest.raises(ValueError, match=said):
        latents.image_samples({"samples": samples}, codes())
    assert latents.image_samples({"samples": torch.eye(2).expand(1, 2, 2, 2)}, codes()).shape == (1, 2, 2, 2)


def test_images_are_numbered_one_after_the_other():
    samples = torch.zeros(3, 2, 1, 1)
    assert latents.first_image({"samples": samples}) == 0
    assert latents.first_image({"samples": samples, "batch_index": [4, 5, 6]}) == 4
    for index, said in (
        ([4, 6, 5], "consecutive"),
        ([4, 5], "but holds 3"),
        ([4, 5, "6"], "but holds 3"),
        ([0, 0, 0], "consecutive"),
    ):
        with pytest.raises(ValueError, match=said):
            latents.first_image({"samples": samples, "batch_index": index})
