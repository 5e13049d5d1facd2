"""Core's own nodes with this pack's CLIP and VAE."""

import logging

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.nodes.comfy_runtime.vae import ARVae, tiles

import nodes as core


@pytest.mark.parametrize(
    ("prompt", "notices"),
    [("a red aple", ["The model ignores these words: aple (apple?)."]), ("a red apple", []), (" ", [])],
)
def test_clip_text_encode_tells_the_page_which_words_a_model_ignores(prompt, notices, page, tiny):
    server = page()
    (conditioning,) = core.CLIPTextEncode().encode(tiny[1], prompt)
    assert conditioning[0][1] == {"ar": {"family": "llamagen-t2i", "text": prompt.strip()}}
    assert server.events == [("specar.notices", {"node": "7", "notices": notices}, "a page")]


def test_a_prompt_of_unknown_words_alone_is_an_empty_one(page, tiny, sample):
    server = page()
    (unknown,) = core.CLIPTextEncode().encode(tiny[1], "a quark")
    [(_, data, _)] = server.events
    [notice] = data["notices"]
    assert notice.startswith("The model knows none of these words: quark. Try: apple, red")
    (empty,) = core.CLIPTextEncode().encode(tiny[1], "")
    for name in ("positive", "negative"):
        (tokens, trace), (expected, _) = (sample("NextToken", cfg=2, **{name: prompt}) for prompt in (unknown, empty))
        assert torch.equal(tokens["ar_tokens"], expected["ar_tokens"])
        assert any("quark" in notice for notice in trace.notices)


def test_other_uses_of_the_clip_are_explained(tiny):
    with pytest.raises(AttributeError, match="AR image model"):
        core.CLIPSetLastLayer().set_last_layer(tiny[1], -1)


@pytest.mark.parametrize("kind", ["ids", "vectors"])
def test_decode_and_encode(kind, sample, tiny, continuous):
    vae, latent = tiny[2], sample("NextToken", batch=2)[0]
    if kind == "vectors":
        vae, latent = continuous[2], {"samples": torch.randn(2, 6, 4, 4)}
    (pixels,) = core.VAEDecode().decode(vae, latent)
    assert pixels.shape == (2, 32, 32, 3) and pixels.dtype == torch.float32
    assert pixels.min() >= 0 and pixels.max() <= 1
    (tiled,) = core.VAEDecodeTiled().decode(vae, latent, 512)
    torch.testing.assert_close(pixels, tiled, atol=1e-4, rtol=0)
    (encoded,) = core.VAEEncode().encode(vae, pixels)
    assert encoded["samples"].shape == latent["samples"].shape and encoded["samples"].dtype == torch.float32
    (tiled,) = core.VAEEncodeTiled().encode(vae, pixels, 512, 64)
    rounding = 1e-4 if kind == "vectors" else 0
    torch.testing.assert_close(encoded["samples"], tiled["samples"], atol=rounding, rtol=rounding)
    if kind == "ids":
        assert torch.equal(encoded["samples"], tiny[0].model.dequantize(tiny[0].decoder.decoder.encode(pixels)))


def test_encode_for_inpaint_and_set_latent_noise_mask(sample, tiny):
    pixels, mask = torch.rand(1, 32, 32, 3), torch.zeros(1, 32, 32)
    mask[:, :, 16:] = 1  # the right half
    (plain,) = core.VAEEncode().encode(tiny[2], pixels)
    (masked,) = core.SetLatentNoiseMask().set_mask(plain, mask)
    (inpaint,) = core.VAEEncodeForInpaint().encode(tiny[2], pixels, mask, 0)
    for latent in (masked, inpaint):
        out, trace = sample("SJD", latent_image=latent)
        assert torch.equal(out["samples"][..., :2], latent["samples"][..., :2])
        assert trace.totals["tokens"] == 8


def test_batch_nodes(sample):
    latent, _ = sample("NextToken", batch=2)
    (second,) = core.LatentFromBatch().frombatch(latent, 1, 1)
    kept = {**second, "noise_mask": torch.zeros(1, 1, 4, 4)}
    assert torch.equal(sample("NextToken", latent_image=kept)[0]["ar_tokens"], latent["ar_tokens"][1:])


def test_encode_and_samplers_name_a_size_that_does_not_fit(tiny, sample):
    with pytest.raises(ValueError, match="multiples of 8.*Upscale Image.*before VAE Encode"):
        core.VAEEncode().encode(tiny[2], torch.rand(1, 30, 32, 3))
    (encoded,) = core.VAEEncode().encode(tiny[2], torch.rand(1, 64, 64, 3))
    with pytest.raises(ValueError, match="64 x 64 pixels.*only 32 x 32 pixels.*Upscale Image.*before VAE Encode"):
        sample("NextToken", latent_image={**encoded, "noise_mask": torch.ones(1, 64, 64)})


def test_an_empty_latent_of_core_is_read_in_pixels(tiny, sample):
    """Where it says how large its cells are, as in newer versions; else the error names the node to use."""
    latent = {"samples": torch.zeros(1, 4, 8, 8), "downscale_ratio_spacial": 4}  # 32 x 32 pixels, 4 x 4 tokens
    out, _ = sample("NextToken", latent_image=latent)
    assert out["ar_tokens"].shape == (1, 4, 4) and "downscale_ratio_spacial" not in out
    with pytest.raises(ValueError, match="^This model.*64 x 64 pixels.*only 32 x 32 pixels.*Empty AR Latent"):
        sample("NextToken", latent_image={"samples": latent["samples"]})
    with pytest.raises(ValueError, match="128 x 128 pixels.*only 32 x 32 pixels"):
        sample("NextToken", latent_image=latent | {"downscale_ratio_spacial": 16})


def test_decode_refuses_another_model_s_latent(tiny, continuous):
    for vae, samples, message in (
        (tiny[2], torch.zeros(1, 6, 4, 4), "6 channels.*reads 8"),
        (tiny[2], torch.full((1, 1, 4, 4), 99.0), "token 99.*64 codes"),
        (tiny[2], torch.zeros(1, 8, 1, 4, 4), r"shape \[1, 8, 1, 4, 4\].*another kind"),
        (continuous[2], torch.zeros(1, 1, 4, 4), "1 channels.*reads 6"),
    ):
        with pytest.raises(ValueError, match=message):
            core.VAEDecode().decode(vae, {"samples": samples})


# Tiles


def test_tiles_decode_what_lies_inside_them(tiny):
    """Small tiles give another image (each is decoded alone), of the same size; one large tile gives the same."""
    latent = {"samples": torch.nn.functional.normalize(torch.randn(2, 8, 12, 10), dim=1)}
    (pixels,) = core.VAEDecode().decode(tiny[2], latent)
    (whole,) = core.VAEDecodeTiled().decode(tiny[2], latent, 512)
    (tiled,) = core.VAEDecodeTiled().decode(tiny[2], latent, 64, 32)
    torch.testing.assert_close(pixels, whole, atol=1e-4, rtol=0)
    assert tiled.shape == pixels.shape == (2, 96, 80, 3) and 0.001 < (tiled - pixels).abs().mean() < 0.3


def test_tiles_encode_to_tokens_of_the_codebook(tiny):
    pixels = torch.rand(2, 96, 80, 3)
    (tiled,) = core.VAEEncodeTiled().encode(tiny[2], pixels, 64, 32)
    assert tiled["samples"].shape == (2, 8, 12, 10)
    vectors = tiled["samples"].movedim(1, -1).reshape(-1, 8)
    assert (vectors[:, None] == tiny[0].model.codebook).all(-1).any(-1).all()
    decoder = tiny[0].decoder.decoder
    corner = decoder.encode_latent(pixels[:, :64, :64])
    assert torch.equal(tiled["samples"][..., :5, :5], corner[..., :5, :5])
    with pytest.raises(ValueError, match="multiples of 8"):
        core.VAEEncodeTiled().encode(tiny[2], pixels[:, :90], 64, 32)


@pytest.mark.parametrize(("length", "tile", "overlap"), [(12, 8, 4), (12, 8, 0), (9, 8, 7), (5, 8, 4), (100, 7, 3)])
def test_tiles_share_out_every_token_once(length, tile, overlap):
    shared = tiles(length, tile, overlap)
    assert [i for _, _, part in shared for i in range(part.start, part.stop)] == list(range(length))
    assert all(start <= part.start and part.stop <= end <= length for start, end, part in shared)


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_without_memory_for_the_whole_image_tiles_are_used(tiny, task, monkeypatch, caplog):
    vae = ARVae(tiny[0].decoder)
    work = "decode" if task == "decode" else "encode_latent"
    plain = getattr(type(tiny[0].decoder.decoder), work)

    def short(self, x):
        if (x.shape[-1] * 8 if task == "decode" else x.shape[2]) > 256:
            raise mm.OOM_EXCEPTION("CUDA out of memory")
        return plain(self, x)

    monkeypatch.setattr(type(tiny[0].decoder.decoder), work, short)
    given = torch.randn(1, 8, 4, 40) if task == "decode" else torch.rand(1, 32, 320, 3)
    with caplog.at_level(logging.WARNING):
        out = getattr(vae, task)(given)
    assert out.shape == ((1, 32, 320, 3) if task == "decode" else (1, 8, 4, 40))
    assert "tiles of 256 pixels" in caplog.text


def test_only_as_many_images_at_once_as_fit(tiny, monkeypatch):
    counts, kind = [], type(tiny[0].decoder.decoder)
    decode = kind.decode
    monkeypatch.setattr(kind, "decode", lambda self, latent: counts.append(len(latent)) or decode(self, latent))
    one = tiny[0].decoder.bytes_for(32 * 32)
    monkeypatch.setattr(mm, "get_free_memory", lambda *_, **__: 2 * one + 1)
    assert tiny[2].decode(torch.randn(5, 8, 4, 4)).shape == (5, 32, 32, 3)
    assert counts == [2, 2, 1]


def test_a_zeroed_negative_is_none(sample, positive):
    (zeroed,) = core.ConditioningZeroOut().zero_out(positive)
    plain, _ = sample("NextToken", cfg=3.0)
    latent, _ = sample("NextToken", cfg=3.0, negative=zeroed)
    assert torch.equal(latent["ar_tokens"], plain["ar_tokens"])
