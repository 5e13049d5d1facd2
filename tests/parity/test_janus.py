"""Our Janus-Pro beside transformers' JanusForConditionalGeneration and the official code, on the same random weights,
in fp32.

transformers runs live: its language model through its image head, its own closed generation loop, and the decoder of
its image tokenizer. (It looks codes up without normalising them, which the official encoder does.)

janus.json holds what https://github.com/deepseek-ai/Janus gave at commit 1daa72f on a CPU (torch 2.13), its modules
filled with the weights of tests/support/tiny_janus.py:
  prompts, ids    the conversation template "deepseek" around three prompts; ids of the first
  logits          of positions 0, 7 and 15 while generating it greedily with guidance 5: [3, conditional and not, 32]
  greedy_cfg_5    the 16 tokens generated
  decode, encode  decode_code of these tokens; the codes that encode() picks for an image
  released        tensors, numbers, and a SHA-256 of all names and shapes of a MultiModalityCausalLM of 1B and of 7B,
                  the vision tower left out
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from tokenizers import Tokenizer

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import teacher_forced
from ..support.stepwise import stepwise
from ..support.tiny import fill
from ..support.tiny_janus import BEGIN, CODES, IMAGE, PAD, SIDE, weights, write

OFFICIAL = json.loads((Path(__file__).parent / "janus.json").read_text(encoding="utf-8"))
PROMPT = "a red fox"


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
        missing, unexpected = model.load_state_dict(weights(), strict=False)
    assert not unexpected and all(name.startswith("model.vision_model.") for name in missing)
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


def test_greedy_guided_images(model, reference):
    """Token by token transformers' own image, and the official one."""
    config = reference.generation_config
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
