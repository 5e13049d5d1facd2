"""Every released file fits: names, shapes and sizes, built on the meta device so that no memory is needed."""

from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.decoders import vq
from comfyui_specar.model_loaders.families import llamagen
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint

from ..support.tiny import llamagen_shapes, millions

RELEASED = {  # name -> (dim, layers, heads, hidden, millions of parameters with a class prefix)
    "B": (768, 12, 12, 2048, 110.9),
    "L": (1024, 24, 16, 2816, 342.9),
    "XL": (1280, 36, 20, 3584, 774.7),
    "XXL": (1536, 48, 24, 4096, 1411),
    "3B": (3200, 24, 32, 8704, 3097),
}


def load_meta(monkeypatch, name, text, dim, layers, ffn):
    shapes = llamagen_shapes(text, dim, layers, ffn, vocab=16384, classes=1000, caption=2048, slots=120)
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))  # nothing to look at on the meta device
    assert llamagen.recognise(tensors)
    return llamagen.load(Checkpoint(tensors, {}, Path(name)), torch.float32, None, ())


@pytest.mark.parametrize("size", RELEASED)
def test_released_class_models_fit(monkeypatch, size):
    dim, layers, heads, ffn, count = RELEASED[size]
    model = load_meta(monkeypatch, f"c2i_{size}_384.pt", False, dim, layers, ffn)
    config = model.backbone.config
    assert (config.dim, config.layers, config.heads, config.ffn_dim, config.vocab) == (dim, layers, heads, ffn, 16384)
    assert model.grid == (24, 24) and model.prefix.classes == 1000
    assert abs(millions(model) - count) < 0.06 if count < 1000 else abs(millions(model) - count) < 0.6


@pytest.mark.parametrize(("name", "side"), [("t2i_XL_stage1_256.pt", 16), ("t2i_XL_stage2_512.pt", 32)])
def test_released_text_models_fit(monkeypatch, name, side):
    model = load_meta(monkeypatch, name, True, 1280, 36, 3584)
    assert model.grid == (side, side) and model.backbone.config.heads == 20 and model.prefix.slots == 120
    assert abs(millions(model) - 777.9) < 0.06  # the null caption included


def released_vq_shapes(factor):
    """Names and shapes of vq_ds16_*.pt and vq_ds8_*.pt."""
    widths = [128 * m for m in {16: (1, 1, 2, 2, 4), 8: (1, 2, 2, 4)}[factor]]
    shapes = {"quantize.embedding.weight": (16384, 8)}

    def conv(name, out, channels, size):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, channels, size, size), (out,)

    def norm(name, channels):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (channels,)

    def res(name, channels, out):
        norm(f"{name}.norm1", channels)
        conv(f"{name}.conv1", out, channels, 3)
        norm(f"{name}.norm2", out)
        conv(f"{name}.conv2", out, out, 3)
        if channels != out:
            conv(f"{name}.nin_shortcut", out, channels, 1)

    def attention(name):
        norm(f"{name}.norm", 512)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", 512, 512, 1)

    def half(name, blocks, levels, resample, first):
        channels = first
        for i, width in enumerate(levels):
            for j in range(blocks):
                res(f"{name}.conv_blocks.{i}.res.{j}", channels, width)
                channels = width
                if i == (len(levels) - 1 if name == "encoder" else 0):
                    attention(f"{name}.conv_blocks.{i}.attn.{j}")
            if i < len(levels) - 1:
                conv(f"{name}.conv_blocks.{i}.{resample}.conv", width, width, 3)
        res(f"{name}.mid.0", 512, 512)
        attention(f"{name}.mid.1")
        res(f"{name}.mid.2", 512, 512)
        norm(f"{name}.norm_out", levels[-1])

    conv("quant_conv", 8, 256, 1)
    conv("post_quant_conv", 256, 8, 1)
    conv("encoder.conv_in", 128, 3, 3)
    half("encoder", 2, widths, "downsample", 128)
    conv("encoder.conv_out", 256, 512, 3)
    conv("decoder.conv_in", 512, 256, 3)
    half("decoder", 3, widths[::-1], "upsample", 512)
    conv("decoder.conv_out", 3, 128, 3)
    return shapes


@pytest.mark.parametrize(("factor", "count"), [(16, 71.95), (8, 70.2)])
def test_released_tokenizers_fit(monkeypatch, factor, count):
    tensors = {name: torch.empty(shape, device="meta") for name, shape in released_vq_shapes(factor).items()}
    tensors["quantize.codebook_used"] = torch.empty(65536, device="meta")
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))
    decoder = vq.load(Checkpoint(tensors, {}, Path(f"vq_ds{factor}_c2i.pt")), torch.float32)
    usage = 65536 / 1e6  # the file's statistics, part of the published number
    assert decoder.factor == factor and abs(millions(decoder.module) + usage - count) < 0.06
    if factor == 16:
        assert abs(millions(decoder.module.decoder) - 42.45) < 0.06
