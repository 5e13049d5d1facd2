"""Our LlamaGen against the official code, on the same random weights, in fp32.

llamagen.json holds what https://github.com/FoundationVision/LlamaGen gave at commit ce98ec4 on a CPU (torch 2.13). Its
modules were filled, in evaluation mode, with the values ``fill`` in tests/support/tiny.py derives from the names of
the parameters: Transformer(ModelArgs(n_layer=2, n_head=4, dim=64, block_size=16, vocab_size=32, num_classes=10,
caption_dim=24, cls_token_num=1 or 120)) and the tokenizer VQModel(ModelArgs(codebook_size=32, encoder_ch_mult=[1, 1],
decoder_ch_mult=[1, 1])).
  *_logits_*   one uncached pass over the prefix and 15 tokens 3, 8, 13, ... (mod 32); predictions of 16 positions. The
               caption: 7 features, left-padded to 120 slots and masked; "null": the learned null caption, same mask.
  *_greedy_*   generate(..., top_k=1): 16 tokens for classes 3 and 8, for the caption, and for one that fills all slots
  vq_*         decode_code of two 3 x 4 grids of codes; quant_conv(encoder(image)); the codes encode() picks
  released     tensors, numbers, and a SHA-256 of all names and shapes of the official classes of every released size
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.models.networks.vq import VQConfig, VQModel
from comfyui_specar.samplers.methods.jacobi import SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support.closeness import assert_as_exact, decided
from ..support.models import teacher_forced
from ..support.tiny import CLASSES, SLOTS, VOCAB, caption_features, fill, llamagen, vq_weights

OFFICIAL = json.loads((Path(__file__).parent / "llamagen.json").read_text(encoding="utf-8"))
TOKENS = torch.tensor([[(5 * i + 3) % VOCAB for i in range(16)]])  # the last one is not seen by any prediction


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {text: llamagen(tmp_path_factory.mktemp("model"), text) for text in (True, False)}


@pytest.fixture(scope="module")
def tokenizer():
    config = VQConfig(codebook_size=VOCAB, ch_mult=(1, 1))
    with torch.device("meta"):
        model = VQModel(config)
    model.load_state_dict(vq_weights(config), assign=True)
    return model.eval().requires_grad_(False)


def close(compute, name):
    assert_as_exact(compute, torch.tensor(OFFICIAL[name]))


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("c2i_logits_class_3", torch.full((1, 1, 1), 3.0)),
        ("c2i_logits_null", torch.full((1, 1, 1), float(CLASSES))),
        ("t2i_logits_caption", caption_features(7)),
    ],
)
def test_logits(models, name, features):
    """Of a caption the official code feeds 120 slots and masks 113; we feed 7."""
    model = models[name.startswith("t2i")]
    close(lambda: teacher_forced(model, model.encode_features(features), TOKENS), name)


def test_null_caption_logits_without_the_padding(models):
    model = models[True]
    close(lambda: model(model.prefix.unconditional(torch.zeros(1, 7, 1), model.grid), TOKENS), "t2i_logits_null")


def greedy(model, features, method, **settings):
    prompt = model.encode_features(features)
    return decided(lambda: api.sample(model, prompt, method, **settings).tokens).flatten(1)


METHODS = [NextToken(), Jacobi(window=6), *(SJD(window=6, reuse=r) for r in ("coupled", "gumbel", "resample"))]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("cfg", [4.0, *(pytest.param(cfg, marks=pytest.mark.whole) for cfg in (1.0, 7.5))])
def test_greedy_guided_tokens(models, method, cfg):
    """Token by token the official image, from next-token sampling and from every Jacobi variant alike."""
    text, classes = models[True], models[False]
    caption, both = caption_features(7), torch.tensor([3.0, 8.0]).view(2, 1, 1)
    tokens = greedy(text, caption, method, cfg=cfg, temperature=0)
    assert tokens.tolist() == OFFICIAL[f"t2i_greedy_cfg_{cfg}"]
    tokens = greedy(classes, both, method, cfg=cfg, top_k=1, batch_size=2)
    assert tokens.tolist() == OFFICIAL[f"c2i_greedy_cfg_{cfg}"]


def test_a_caption_that_fills_every_slot(models):
    tokens = greedy(models[True], caption_features(SLOTS), SJD(window=4), cfg=7.5, top_k=1)
    assert tokens.tolist() == OFFICIAL["t2i_greedy_full_caption"]


def test_decoded_pixels(tokenizer):
    codes = torch.tensor([[(m * i + b) % VOCAB for i in range(12)] for m, b in ((7, 2), (11, 5))]).view(2, 3, 4)
    close(lambda: tokenizer.decode(tokenizer.dequantize(codes)), "vq_decode")


def test_encoded_image(tokenizer):
    image = fill("picture embedding", (2, 3, 6, 8)) / 2
    close(lambda: tokenizer.encode_latent(image), "vq_latent")
    assert decided(lambda: tokenizer.encode(image)).tolist() == OFFICIAL["vq_encode"]
