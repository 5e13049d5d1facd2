"""Janus-Pro reading images, beside transformers' JanusForConditionalGeneration and the official code, on the same
random weights, in fp32.

transformers runs live: tower and aligner, the text head, and its own greedy generation.

janus_reading.json holds what https://github.com/deepseek-ai/Janus gave at commit 1daa72f on a CPU (torch 2.12, fp64),
its modules filled with the weights of tests/support/tiny_janus.py, for two images of picture() of different shapes:
  question, ids        a question, and its conversation by VLChatProcessor
  pixels               [2, 3, ::16, ::12] of what VLMImageProcessor makes of the images
  features, embeddings [2, ::5, ::8] of CLIPVisionTower's output and of the aligner's
  logits               [2, ::3] of the first token of the answer
  greedy, texts        the first 24 tokens of the answers, and these decoded
  released             tensors, numbers, and a SHA-256 of all names and shapes of tower and aligner of 1B and 7B
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_reader
from comfyui_specar.models.image_reader import square
from comfyui_specar.models.networks.vq import VQConfig
from comfyui_specar.samplers.ending import generate_until
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.reference import digest
from ..support.tiny_janus import picture, released, shapes, weights, write

OFFICIAL = json.loads((Path(__file__).parent / "janus_reading.json").read_text(encoding="utf-8"))
NEVER = -2  # the id of no token
IMAGES = picture(40, 90), picture(100, 30)


@pytest.fixture(scope="module", params=[False, True], ids=["transformers", "DeepSeek"])
def reader(request, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("model"), original=request.param)
    model = api.load_model(folder)
    yield load_reader(folder, model)  # the model lives as long


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    from transformers import JanusConfig, JanusForConditionalGeneration

    with fp64():
        config = JanusConfig.from_pretrained(write(tmp_path_factory.mktemp("reference")))
        model = JanusForConditionalGeneration(config).eval()
        model.load_state_dict(weights())
    return model


@pytest.fixture(scope="module")
def pixels():
    return torch.stack([square(image, 64) for image in IMAGES])


def test_images_are_as_the_official_processor_makes_them(reader, pixels):
    assert reader.side == 64
    official = torch.tensor(OFFICIAL["pixels"])
    off = (pixels[:, :, ::16, ::12] - official).abs().max()
    assert off <= 0.5e-6 + torch.finfo(torch.float32).eps, "recorded with six decimals"
    assert (pixels[0, :, 0] == 2 * torch.tensor(127.0) / 255 - 1).all(), "above the wide one"


@torch.inference_mode()
def test_features_embeddings_and_logits(reader, reference, pixels):
    reading, speaker, ids = reader.reading, reader.speaker, torch.tensor(OFFICIAL["ids"]).expand(2, -1)
    with fp64():
        # In fp32, for transformers computes a part of its tower in it.
        seen = reference.model.get_image_features(pixels, return_dict=True)
        logits = reference(input_ids=ids, pixel_values=pixels).logits[:, -1]
    assert_as_exact(lambda: reading.tower(pixels), seen.last_hidden_state.float())
    assert_as_exact(lambda: reading(pixels), seen.pooler_output.float())
    for compute, wanted in (
        (lambda: reading.tower(pixels)[:, ::5, ::8], "features"),
        (lambda: reading(pixels)[:, ::5, ::8], "embeddings"),
    ):
        assert_as_exact(compute, torch.tensor(OFFICIAL[wanted]))

    def first():
        request = reader.request(reader.prompt(pixels, OFFICIAL["question"]), 4)
        return speaker.start(request.conditioning, None, 2, request.layout, 1, False).prefill.logits[:, 0]

    assert_as_exact(first, logits.float())
    assert_as_exact(lambda: first()[:, ::3], torch.tensor(OFFICIAL["logits"]))


def test_greedy_answers(reader, reference, pixels):
    """Those of transformers' own loop and of the official code, by every exact method, and their texts."""
    ids = torch.tensor(OFFICIAL["ids"]).expand(2, -1)
    with fp64():
        drawn = reference.generate(
            ids,
            pixel_values=pixels,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
    assert drawn[:, ids.shape[1] :].tolist() == OFFICIAL["greedy"]
    for method in (NextToken(), SJD(window=4)):

        def answers(by=method):
            request = reader.request(reader.prompt(pixels, OFFICIAL["question"]), 24)
            return torch.tensor(generate_until(by, request, NEVER))

        assert decided(answers).tolist() == OFFICIAL["greedy"]
    assert [reader.text(row) for row in OFFICIAL["greedy"]] == [text.strip() for text in OFFICIAL["texts"]]


@pytest.mark.parametrize(("size", "dim", "layers", "ffn"), [("1B", 2048, 24, 5632), ("7B", 4096, 30, 11008)])
def test_the_released_files_fit(size, dim, layers, ffn):
    """Every tensor of tower and aligner of DeepSeek's files has the shape that we expect."""
    sizes = {"vision": 1024, "tower": 24, "patches": 576, "codes": 16384, "words": 102400}
    named = released(shapes(dim, layers, ffn, vq=VQConfig(), **sizes))
    known = {name: list(shape) for name, shape in named.items() if name.startswith(("vision_model.", "aligner."))}
    wanted = OFFICIAL["released"][size]
    assert digest(known) == [wanted[entry] for entry in ("tensors", "numbers", "sha256")]
