"""Our Emu3 and its image tokenizer beside transformers' and the official ones, on the same random weights, in fp32.

Emu3ForConditionalGeneration of transformers runs live. emu3.json holds what https://github.com/baaivision/Emu3 gave at
commit f6ea9aa on a CPU (torch 2.13, tiktoken 0.14), with the tiny weights and files of tests/support/tiny_emu3.py under
the original names:
  pixels, latent, tokens  Emu3VisionVQModel: decode() of two 2 x 3 grids of codes; quant_conv(encoder()) of an image of
             4 x 6 pixels (four times the same frame); encode() of it, with six codes close to that latent
  released_vq  a SHA-256 of all names and shapes of Emu3VisionVQModel(Emu3VisionVQConfig())
  prompts    Emu3Processor.__call__(mode="G") with Emu3Tokenizer, whose special tokens follow the tiny file's ranks
  asked      the same in mode="U" with the chat_template of Emu3-Stage1, about an image of the codes 3 1 4, 1 5 9
  decoded    ids, and what Emu3Tokenizer decodes of them without special tokens
  read       smart_resize() of Emu3VisionVQImageProcessor for images of width x height pixels, in tokens [rows, cols]
  layout_2x3   what Emu3PrefixConstrainedLogitsHelper leaves behind the image token (0: the codes)
  grids_*    calculate_generate_size for 720 x 720 and 512 x 512 pixels, and all ratios a:b up to 32 and an aspect of 4
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_reader
from comfyui_specar.model_loaders.families import emu3
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, weight_file
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from tokenizers import Tokenizer

from ..support import tiny_emu3 as tiny
from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import of_ids
from ..support.reference import assert_same_answer, assert_same_states
from ..support.tiny import fill

OFFICIAL = json.loads((Path(__file__).parent / "emu3.json").read_text(encoding="utf-8"))
PROMPT = "a red cup"
GRIDS = [(3, 5), *(pytest.param(grid, marks=pytest.mark.whole) for grid in ((4, 4), (8, 2)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"), shards=2)


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture(scope="module")
def decoder(folder):
    return api.load_image_decoder(folder)


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    tensors = open_checkpoint(weight_file(folder)).tensors
    with fp64():
        made = Emu3ForConditionalGeneration(Emu3Config.from_pretrained(folder)).eval()
        made.load_state_dict(tensors)
    return made


def contexts(folder, grid):
    """Ids of both branches' prompts, written down by hand."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    negative = (
        "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
        "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
    )
    size = f"<|image start|>{grid[0]}*{grid[1]}<|image token|>"
    return [
        tokenizer.encode(f"<|extra_203|>{text}{size}", add_special_tokens=False).ids
        for text in (f"{PROMPT} masterpiece, film grained, best quality.", negative)
    ]


@pytest.mark.parametrize("grid", GRIDS)
def test_hidden_states_and_logits_of_both_branches(folder, model, reference, grid):
    assert_same_states(model, reference, PROMPT, contexts(folder, grid), grid)


@pytest.mark.parametrize("grid", GRIDS)
@torch.inference_mode()
def test_greedy_guided_images(folder, model, decoder, reference, grid):
    """transformers' own generate, with its guidance and the rule for allowed tokens that its documentation gives."""
    rows, cols = grid
    ids = tiny.vocabulary()
    codes = [id for name, id in ids.items() if name.startswith("<|visual token")]
    positive, negative = contexts(folder, grid)

    def allowed(_batch, sequence):
        place = len(sequence) - len(positive) + 1
        endings = ["<|extra_201|>", "<|image end|>", "<|extra_204|>"]
        if place > (cols + 1) * rows:
            return [ids[endings[place - (cols + 1) * rows - 1]]]
        return [ids["<|extra_200|>"]] if place % (cols + 1) == 0 else codes

    with fp64():
        drawn = reference.generate(
            torch.tensor([positive]),
            attention_mask=torch.ones(1, len(positive), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=rows * (cols + 1) + 3,
            guidance_scale=3.0,
            negative_prompt_ids=torch.tensor([negative]),
            negative_prompt_attention_mask=torch.ones(1, len(negative), dtype=torch.int64),
            prefix_allowed_tokens_fn=allowed,
            pad_token_id=0,
            eos_token_id=ids["<|extra_204|>"],
        )[:, len(positive) :]
        pixels = reference.decode_image_tokens(image_tokens=drawn, height=rows, width=cols)
    layout, prompt = model.layout(*grid), model.encode_prompt(PROMPT)
    for method in (NextToken(), SJD(window=5)):
        tokens = decided(lambda by=method: api.sample(model, prompt, by, cfg=3, temperature=0, layout=layout).tokens)
        sequence = layout.keeping(tokens, torch.ones_like(tokens, dtype=torch.bool)).forced
        assert torch.equal(torch.tensor(model.word_ids)[sequence], drawn)
    assert len(tokens.unique()) > 3
    assert_as_exact(lambda: decoder.decode(decoder.dequantize(tokens)), (pixels.movedim(1, -1) / 2 + 0.5).clamp(0, 1))


@torch.inference_mode()
def test_images_are_encoded_as_transformers_does(decoder, reference):
    pixels = fill("two pictures embedding", (2, 3, 6, 10)).tanh()
    vq = reference.model.vqmodel
    with fp64():
        encoded = vq.encode(pixels, torch.tensor([[6, 10]] * 2))
        latent = vq.quant_conv(encoded.last_hidden_state.transpose(1, 2))[:, :, 0]
    assert_as_exact(lambda: decoder.module.encode_latent(pixels), latent)
    found = decided(lambda: decoder.encode(pixels.movedim(1, -1) / 2 + 0.5))
    assert torch.equal(found, torch.stack(list(encoded.image_tokens)))


def test_folders_of_older_versions_of_transformers(tmp_path, folder, reference):
    """transformers renames them on loading; so do we."""
    from transformers import Emu3ForConditionalGeneration

    old = tiny.write(tmp_path, layout=tiny.OLD)
    renamed = Emu3ForConditionalGeneration.from_pretrained(old).state_dict()
    assert all(torch.equal(tensor, renamed[name]) for name, tensor in reference.state_dict().items())
    found, wanted = api.load_model(old), api.load_model(folder)
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())
    assert torch.equal(found.codebook, wanted.codebook)


@torch.inference_mode()
def test_original_folders(tmp_path):
    """The ids of the released vocabulary, and the plain names of a language model."""
    from transformers import Emu3TextConfig
    from transformers.models.emu3.modeling_emu3 import Emu3TextModel

    path = tiny.write_original(tmp_path / "Emu3-Stage1")
    tensors = open_checkpoint(weight_file(path)).tensors
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model = api.load_model(path)
    layout = model.layout()
    assert (layout.rows, layout.cols, model.vocab) == (90, 90, 32768)  # by image_area, which goes before the name
    prompt = [151849, 64, 2518, 10525, 151852, 24, 15, 9, 24, 15, 151851]
    tokens = torch.arange(40)[None] * 7919 % 32768
    with fp64():
        text = Emu3TextModel(Emu3TextConfig(**{key: settings[key] for key in tiny.text_config(0)})).eval()
        text.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items() if "model." in name}
        )
        hidden = text(input_ids=torch.tensor([prompt + (tokens[0] + 151854).tolist()])).last_hidden_state
        wanted = (hidden @ tensors["lm_head.weight"].T)[:, len(prompt) - 1 :]

    def compute():
        state = model.start(of_ids(model, prompt), None, 1, layout, slack=0, guided=False)
        out = model.step(state, tokens, torch.arange(40)[None])
        return torch.cat((state.prefill.logits, out.logits), dim=1)

    specials = [151846, 151847, 151853, 151850]
    assert_as_exact(compute, torch.cat((wanted[..., 151854:], wanted[..., specials]), dim=-1))


def test_original_layout_of_the_sequence(model):
    """Which tokens are forced where, by the official rule."""
    layout = model.layout(2, 6)
    rows, cols, official = 2, 3, OFFICIAL["layout_2x3"]
    specials = [0, 151846, 151847, 151853, 151850]  # the order in which ours follow the codes
    small = type(layout).with_row_ends(rows, cols, [model.vocab], range(model.vocab + 1, model.vocab_total))
    assert small.stride - cols == layout.stride - layout.cols == 1
    assert [specials[max(0, id - model.vocab + 1)] for id in small.forced[0].tolist()] == official
    assert model.word_ids[model.vocab :] == tuple(
        tiny.vocabulary()[name] for name in ("<|extra_200|>", "<|extra_201|>", "<|image end|>", "<|extra_204|>")
    )


def original_tokenizer(folder):
    return emu3.open_tokenizer(tiny.write_ranks(folder) / "model.safetensors", [])


def original_words(ranks):
    return emu3.Words(ranks.id("<|visual token 000000|>"), 32768, **{r: ranks.id(n) for r, n in emu3._NAMES.items()})


def test_original_prompts(tmp_path):
    """Words around a prompt, and their ids by the original tokenizer's files."""
    ranks = original_tokenizer(tmp_path)
    words = original_words(ranks)
    for case in OFFICIAL["prompts"]:
        text = case["text"] + ("" if case["negative"] else emu3.QUALITY)
        assert emu3.prompt_ids(words, ranks, text, case["grid"]) == case["ids"]
    assert case["negative"] and OFFICIAL["prompts"][2]["text"] == emu3.NEGATIVE


# Questions about images

IMAGE = torch.tensor([[3, 1, 4], [1, 5, 9]])


def test_original_questions_and_answers(tmp_path):
    """The ids of conversations, and the text of an answer's, by the original tokenizer's files."""
    ranks = original_tokenizer(tmp_path)
    for case in OFFICIAL["asked"]:
        assert emu3.question_ids(original_words(ranks), ranks, case["text"], IMAGE) == case["ids"]
    ids, text = OFFICIAL["decoded"]
    assert ranks.text(ids) == text


def test_answers(folder, model, reference):
    rows = "".join(f"{''.join(f'<|visual token {code:06d}|>' for code in row)}<|extra_200|>" for row in IMAGE.tolist())
    image = f"<|image start|>2*3<|image token|>{rows}<|extra_201|><|image end|>"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = tokenizer.encode(f"<|extra_203|>{image}{PROMPT}", add_special_tokens=False).ids
    assert_same_answer(load_reader(folder, model), reference, IMAGE, PROMPT, words)


def test_official_sizes_of_images_that_are_read():
    for pixels, grid in OFFICIAL["read"].items():
        width, height = map(int, pixels.split("x"))
        assert emu3.read_grid(height, width, 8) == tuple(grid)
    for width, height in ((1000, 199), (7, 30)):
        with pytest.raises(ValueError, match=f"{width} x {height}.*5:1"):
            emu3.read_grid(height, width, 8)


@pytest.mark.parametrize(("side", "name"), [(90, "grids_720"), (64, "grids_512")])
def test_sizes(side, name):
    """Every size of the official rule is offered, and every size offered comes from a ratio."""
    found = emu3.size_table(side)
    assert {tuple(grid) for grid in OFFICIAL[name]} <= set(found)
    assert len(found) == len(set(found)) and (side, side) in found
    for rows, cols in found:
        least = max((cols - 0.5) / side, side / (rows + 0.5), 0.5)
        most = min((cols + 0.5) / side, side / (rows - 0.5), 2.0)
        middle = (least + most) / 2
        a, b = Fraction(middle**2).limit_denominator(10**9).as_integer_ratio()
        scale = (side**2 / (a * b)) ** 0.5
        assert (round(b * scale), round(a * scale)) == (rows, cols)


# The original image tokenizer


@torch.inference_mode()
def test_the_original_image_tokenizer(tmp_path):
    decoder = api.load_image_decoder(tiny.write_decoder(tmp_path))
    codes = torch.tensor([[[(5 * i + 3 * r + 7 * b) % 32 for i in range(3)] for r in range(2)] for b in range(2)])
    assert_as_exact(lambda: decoder.module.decode(decoder.dequantize(codes)), torch.tensor(OFFICIAL["pixels"]))
    image = fill("picture embedding", (1, 3, 4, 6)).tanh()
    wanted = torch.tensor(OFFICIAL["latent"]).view(1, 4, 2, 3)
    assert_as_exact(lambda: decoder.module.encode_latent(image), wanted)
    decoder.codebook[:6] = wanted[0].flatten(1).T + 0.004 * fill("code embedding", (6, 4))
    assert decided(lambda: decoder.module.encode(image)).flatten().tolist() == OFFICIAL["tokens"]
