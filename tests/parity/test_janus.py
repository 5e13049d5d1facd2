"""Our Janus-Pro, also where it reads images, beside transformers' JanusForConditionalGeneration and the official code,
on the same random weights, in fp32.

transformers runs live: its language model through its image head, its own closed generation loop, and the decoder of
its image tokenizer (it looks codes up without normalising them, which the official encoder does); tower and aligner,
the text head, and its own greedy generation.

janus.json and janus_reading.json hold what https://github.com/deepseek-ai/Janus gave at commit 1daa72f on a CPU (torch
2.13; reading torch 2.12, fp64), its modules filled with the weights of tests/support/tiny_janus.py:
  prompts, ids    the conversation template "deepseek" around three prompts; ids of the first
  logits          of positions 0, 7 and 15 while generating it greedily with guidance 5: [3, conditional and not, 32]
  greedy_cfg_5    the 16 tokens generated
  decode, encode  decode_code of these tokens; the codes that encode() picks for an image
  released        tensors, numbers, and a SHA-256 of all names and shapes of a MultiModalityCausalLM of 1B and of 7B,
                  the vision tower left out; of reading: of tower and aligner
and for two images of picture() of different shapes:
  question, ids        a question, and its conversation by VLChatProcessor
  pixels               [2, 3, ::16, ::12] of what VLMImageProcessor makes of the images
  features, embeddings [2, ::5, ::8] of CLIPVisionTower's output and of the aligner's
  logits               [2, ::3] of the first token of the answer
  greedy, texts        the first 24 tokens of the answers, and these decoded
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_image_decoder, load_reader
from comfyui_specar.models.image_reader import square
from comfyui_specar.models.networks.vq import VQConfig
from comfyui_specar.samplers.ending import generate_until
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from tokenizers import Tokenizer

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import teacher_forced
from ..support.reference import digest
from ..support.stepwise import stepwise
from ..support.tiny import fill
from ..support.tiny_janus import BEGIN, CODES, IMAGE, PAD, SIDE, picture, released, shapes, weights, write

HERE = Path(__file__).parent
OFFICIAL, READING = (json.loads((HERE / f"{it}.json").read_text(encoding="utf-8")) for it in ("janus", "janus_reading"))
PROMPT = "a red fox"
NEVER = -2  # the id of no token
IMAGES = picture(40, 90), picture(100, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"), shards=2)


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import JanusConfig, JanusForConditionalGeneration

    with fp64():
        model = JanusForConditionalGeneration(JanusConfig.from_pretrained(folder)).eval()
        model.load_state_dict(weights())
    return model


@pytest.mark.parametrize("text", OFFICIAL["prompts"])
def test_prompts(folder, model, text):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))  # it puts its first token in itself
    wanted = tokenizer.encode(OFFICIAL["prompts"][text]).ids
    assert model.encode_prompt(text)[0][0].flatten().tolist() == wanted
    assert text != PROMPT or wanted == OFFICIAL["ids"]


@torch.inference_mode()
def test_hidden_states_and_logits_of_both_branches(model, reference):
    ids = OFFICIAL["ids"]
    image = torch.arange(SIDE * SIDE).view(1, SIDE, SIDE) * 5 % CODES
    tokens = image.flatten(1)
    words = torch.tensor([ids, [BEGIN, *[PAD] * (len(ids) - 2), IMAGE]])
    with fp64():
        x = torch.cat(
            (
                reference.get_input_embeddings()(words),
                reference.prepare_embeddings_for_image_generation(tokens[:, :-1]).expand(2, -1, -1),
            ),
            dim=1,
        )
        hidden = reference.model.language_model(inputs_embeds=x).last_hidden_state[:, len(ids) - 1 :]
        logits = reference.model.generation_head(hidden)
    conditioning = model.encode_prompt(PROMPT)
    # In fp32, for ours has looked all codes up when it was loaded.
    assert_as_exact(lambda: teacher_forced(model, conditioning, image), logits[:1].float())
    assert_as_exact(lambda: stepwise(model, conditioning, tokens, model.layout()), [hidden.float(), logits.float()])


def test_logits_of_the_official_code(model):
    tokens, prompt = torch.tensor([OFFICIAL["greedy_cfg_5"]]), model.encode_prompt(PROMPT)

    def compute():
        state = model.start(prompt, None, 1, model.layout(), slack=0, guided=True)
        after = model.step(state, tokens[:, :-1], torch.arange(tokens.shape[1] - 1)[None]).logits
        return torch.cat((state.prefill.logits, after), dim=1)[:, [0, 7, 15]].transpose(0, 1)

    assert_as_exact(compute, torch.tensor(OFFICIAL["logits"]))


def test_greedy_guided_images(model, reference, monkeypatch):
    """Token by token transformers' own image, and the official one."""
    config = copy.deepcopy(reference.generation_config)
    monkeypatch.setattr(reference, "generation_config", config)
    config.pad_token_id, config.bos_token_id, config.generation_kwargs = PAD, BEGIN, {"boi_token_id": IMAGE}
    ids = torch.tensor([OFFICIAL["ids"]])
    with fp64():
        drawn = reference.generate(
            ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False, guidance_scale=5
        )
    assert drawn[0].tolist() == OFFICIAL["greedy_cfg_5"]
    for method in (NextToken(), SJD(window=5)):
        tokens = decided(lambda by=method: api.sample(model, model.encode_prompt(PROMPT), by, temperature=0).tokens)
        assert model.defaults.cfg == 5 and torch.equal(tokens.flatten(1), drawn)


@torch.inference_mode()
def test_decoded_and_encoded_images(folder, reference):
    decoder = load_image_decoder(folder)
    tokens = torch.tensor([OFFICIAL["greedy_cfg_5"]])
    with fp64():
        pixels = reference.decode_image_tokens(tokens).permute(0, 3, 1, 2)
    for wanted in (torch.tensor(OFFICIAL["decode"]), pixels.float()):  # the file's codes are normalised, in fp32
        assert_as_exact(lambda: decoder.module.decode(decoder.dequantize(tokens.view(1, SIDE, SIDE))), wanted)
    image = fill("picture embedding", (1, 3, 2 * SIDE, 2 * SIDE)) / 2
    assert decided(lambda: decoder.module.encode(image)).flatten().tolist() == OFFICIAL["encode"]


# Reading images


@pytest.fixture(scope="module", params=[False, True], ids=["transformers", "DeepSeek"])
def reader(request, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("model"), original=request.param)
    model = api.load_model(folder)
    yield load_reader(folder, model)  # the model lives as long


@pytest.fixture(scope="module")
def pixels():
    return torch.stack([square(image, 64) for image in IMAGES])


def test_images_are_as_the_official_processor_makes_them(reader, pixels):
    assert reader.side == 64
    official = torch.tensor(READING["pixels"])
    off = (pixels[:, :, ::16, ::12] - official).abs().max()
    assert off <= 0.5e-6 + torch.finfo(torch.float32).eps, "recorded with six decimals"
    assert (pixels[0, :, 0] == 2 * torch.tensor(127.0) / 255 - 1).all(), "above the wide one"


@torch.inference_mode()
def test_features_embeddings_and_logits(reader, reference, pixels):
    reading, speaker, ids = reader.reading, reader.speaker, torch.tensor(READING["ids"]).expand(2, -1)
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
        assert_as_exact(compute, torch.tensor(READING[wanted]))

    def first():
        request = reader.request(reader.prompt(pixels, READING["question"]), 4)
        return speaker.start(request.conditioning, None, 2, request.layout, 1, False).prefill.logits[:, 0]

    assert_as_exact(first, logits.float())
    assert_as_exact(lambda: first()[:, ::3], torch.tensor(READING["logits"]))


def test_greedy_answers(reader, reference, pixels):
    """Those of transformers' own loop and of the official code, by every exact method, and their texts."""
    ids = torch.tensor(READING["ids"]).expand(2, -1)
    with fp64():
        drawn = reference.generate(
            ids,
            pixel_values=pixels,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
    assert drawn[:, ids.shape[1] :].tolist() == READING["greedy"]
    for method in (NextToken(), SJD(window=4)):

        def answers(by=method):
            request = reader.request(reader.prompt(pixels, READING["question"]), 24)
            return torch.tensor(generate_until(by, request, NEVER))

        assert decided(answers).tolist() == READING["greedy"]
    assert [reader.text(row) for row in READING["greedy"]] == [text.strip() for text in READING["texts"]]


@pytest.mark.parametrize(("size", "dim", "layers", "ffn"), [("1B", 2048, 24, 5632), ("7B", 4096, 30, 11008)])
def test_the_released_files_fit(size, dim, layers, ffn):
    """Every tensor of tower and aligner of DeepSeek's files has the shape that we expect."""
    sizes = {"vision": 1024, "tower": 24, "patches": 576, "codes": 16384, "words": 102400}
    named = released(shapes(dim, layers, ffn, vq=VQConfig(), **sizes))
    known = {name: list(shape) for name, shape in named.items() if name.startswith(("vision_model.", "aligner."))}
    wanted = READING["released"][size]
    assert digest(known) == [wanted[entry] for entry in ("tensors", "numbers", "sha256")]
