"""Our Lumina-mGPT 2.0 and MoVQGAN beside transformers' Chameleon and the official code, on the same random weights.

The language model runs live: ChameleonForConditionalGeneration through its inner model and its head. transformers knows
query and key norms of one row per head only, so the model's one row is repeated there.

lumina2.json holds what https://github.com/Alpha-VLLM/Lumina-mGPT-2.0 gave at commit f44a4d7 on a CPU in fp64 (torch
2.12), with the tiny weights and files of tests/support/tiny_chameleon.py:
  decode, latent, tokens  MOVQ: decode_code() of two 3 x 4 grids of codes; quant_conv(encoder()) of two images of 4 x 6
             pixels; the codes that encode() finds for them
  released   tensors, numbers, and a SHA-256 of all names and shapes of the 270M model
  sizes      generate_crop_size_list((768 / 32)^2, 32): number of (width, height), and a SHA-256 of their lines
  forced     MultiModalLogitsProcessor: the only id it leaves (-1: all image ids and no other) after the opening of an
             image and so many tokens, for grids of height x width cells of 32 pixels
  prompt     FlexARItemProcessor.process_item() of a prompt for 96 x 32 pixels, without the opening of the image
  image      process_image() of an image of this size, whose codes count from 0 to 31
  context, logits  ids, a prompt of 7 and 12 codes, and what the official ChameleonForConditionalGeneration, whose norms
             have the one row themselves, predicts for each code: image codes, then end of row and end of image
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import movq
from comfyui_specar.model_loaders.families import chameleon
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, open_checkpoint, weight_file
from comfyui_specar.samplers.layout import TokenLayout

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.reference import assert_same_image, assert_same_states, digest, on_meta
from ..support.tiny_chameleon import movq_shapes, vocabulary, write

OFFICIAL = json.loads((Path(__file__).parent / "lumina2.json").read_text(encoding="utf-8"))
PROMPT = "a red fox"
IDS = vocabulary(32, "lumina2")
CODE, OPENING, ROW_END, END = (IDS[name] for name in ("<MOVQGAN0>", "<racm3:break>", "<reserved08799>", "<eoss>"))
GRIDS = [(8, 8), (4, 12), (12, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For images of the area of 64 x 64 pixels, so that there are several shapes."""
    made = write(tmp_path_factory.mktemp("model"), kind="lumina2", shards=2)
    settings = json.loads((made / "config.json").read_text(encoding="utf-8")) | {"specar": {"grid": [8, 8]}}
    (made / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture(scope="module")
def decoder(folder):
    return api.load_image_decoder(folder / "movqgan_270M.ckpt")


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    tensors = open_checkpoint(weight_file(folder)).tensors
    with fp64():
        made = ChameleonForConditionalGeneration(ChameleonConfig.from_pretrained(folder)).eval()
        heads = made.config.num_attention_heads
        tensors = {name: tensor.repeat(heads, 1) if "_norm." in name else tensor for name, tensor in tensors.items()}
        missing, unexpected = made.load_state_dict(tensors, strict=False)
    assert not unexpected and all(name.startswith("model.vqmodel.") for name in missing)
    return made


def contexts(grid):
    """Ids of both branches' prompts: the official ones, in which only the size is another."""
    text = OFFICIAL["prompt"]
    size = bytes_of(f"{grid[1] * 8}x{grid[0] * 8}")
    start, before = 1 + len("Generate an image of "), len("96x32")
    opening = [OPENING, *(IDS[f"<reserved{8800 + side // 4:05}>"] for side in grid)]
    return [*text[:start], *size, *text[start + before :], *opening], opening


def bytes_of(text):
    """Ids of a tiny tokenizer's printable letters, which count from the exclamation mark."""
    return [ord(letter) - 33 for letter in text]


def test_official_prompt_and_opening(model):
    wide = model.read(model.encode_prompt(PROMPT), 1, "positive", (4, 12)).features[0, :, 0].long().tolist()
    assert wide == OFFICIAL["prompt"] + OFFICIAL["image"][:3] == contexts((4, 12))[0]
    null = model.prefix.null(torch.zeros(1, 9, 1), (4, 12))[0, :, 0].tolist()
    assert null == OFFICIAL["image"][:3] == contexts((4, 12))[1]


def test_official_layout_of_an_image(model):
    codes = torch.arange(48).view(1, 4, 12) % 32
    forced = model.layout(4, 12).keeping(codes, torch.ones_like(codes, dtype=torch.bool)).forced[0]
    ids = [id - CODE + 155000 if id >= CODE else id for id in torch.tensor(model.word_ids)[forced].tolist()]
    assert ids == OFFICIAL["image"][3:]


@pytest.mark.parametrize("cells", OFFICIAL["forced"])
def test_forced_tokens(cells):
    rows, cols = (4 * int(side) for side in cells.split())
    layout = TokenLayout.ruled(rows, cols, (151670,), (151666,))
    assert layout.forced[0].tolist() == OFFICIAL["forced"][cells]


def test_legal_sizes():
    lines = sorted(f"{cols * 8} {rows * 8}" for rows, cols in chameleon.size_table(96, 8))
    assert [len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()] == OFFICIAL["sizes"]["768"]


@pytest.mark.parametrize("grid", GRIDS)
def test_hidden_states_and_logits_of_both_branches(model, reference, grid):
    assert_same_states(model, reference, PROMPT, contexts(grid), grid)


@torch.inference_mode()
def test_official_logits(model):
    prompt, codes = OFFICIAL["context"][:7], torch.tensor([OFFICIAL["context"][7:]]) - CODE

    def compute():
        state = model.start(model.encode_ids(prompt), None, 1, model.layout(), slack=0, guided=False)
        out = model.step(state, codes, torch.arange(12)[None])
        return torch.cat((state.prefill.logits, out.logits[:, :-1]), dim=1)

    assert_as_exact(compute, torch.tensor(OFFICIAL["logits"]).view(1, 12, 34))


def test_greedy_guided_images(model, reference):
    assert_same_image(model, reference, PROMPT, contexts((4, 12)), (4, 12), cfg=4)  # the model's own guidance


@pytest.mark.usefixtures("nothing_is_read")
def test_the_released_model_has_the_names_and_shapes_of_transformers(tmp_path):
    """But for the rows of its norms, and with a leftover of Chameleon's tokenizer, which is not read."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    with torch.device("meta"):
        reference = ChameleonForConditionalGeneration(ChameleonConfig(vocab_size=171385, vocabulary_map={}))
    tensors = {
        name: tensor[:1] if "_norm." in name and tensor.ndim == 2 else tensor
        for name, tensor in reference.state_dict().items()
    }
    numbers = sum(tensor.numel() for name, tensor in tensors.items() if ".vqmodel." not in name)
    assert numbers == pytest.approx(7.88e9, rel=1e-3)
    settings = {
        "num_attention_heads": 32,
        "max_position_embeddings": 10240,
        "mask_image_logits": False,
        "vocabulary_map": {"IMGIMGAZ": 4},
    }  # of an earlier model
    for name in ("Lumina-mGPT-2.0", "Lumina-mGPT-2.0-Omni"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        checkpoint = Checkpoint(tensors, {}, tmp_path / name / "model.safetensors.index.json")
        made = chameleon.load(checkpoint, torch.bfloat16, None, ())
        assert (made.family, made.grid, made.pixels_per_token, made.longest) == ("lumina-mgpt-2", (96, 96), 8, 10240)
        assert made.word_ids == (*range(155000, 171384), 151670, 151666) and made.layout().length == 9313
        assert (made.defaults.cfg, made.defaults.top_k) == (4.0, 4096)
        assert made.backbone.config.head_norms == 1 and made.backbone.output.weight.shape == (16386, 4096)
        assert made.prefix.null(torch.zeros(1, 9, 1), (96, 96))[0, :, 0].tolist() == [151665, 151695, 151695]


# MoVQGAN


def test_decoded_pixels(decoder):
    codes = torch.tensor([[(m * i + b) % 32 for i in range(12)] for m, b in ((7, 2), (11, 5))]).view(2, 3, 4)
    wanted = torch.tensor(OFFICIAL["decode"]).view(2, 3, 6, 8)
    assert_as_exact(lambda: decoder.module.decode(decoder.dequantize(codes)), wanted)


@torch.inference_mode()
def test_encoded_images(decoder):
    planes = torch.rand((2, 3, 4, 6), generator=torch.Generator().manual_seed(3)) * 2 - 1
    assert_as_exact(lambda: decoder.module.encode_latent(planes), torch.tensor(OFFICIAL["latent"]).view(2, 4, 2, 3))
    found = decided(lambda: decoder.encode(planes.movedim(1, -1) / 2 + 0.5))
    assert found.flatten().tolist() == OFFICIAL["tokens"]


@pytest.mark.usefixtures("every_tensor_has_its_place")
def test_the_released_tokenizer_has_the_official_names_and_shapes():
    shapes = movq_shapes(16384, (1, 2, 2, 4), base=256, blocks=2)
    assert digest(shapes) == [OFFICIAL["released"][entry] for entry in ("tensors", "numbers", "sha256")]
    decoder = movq.load(Checkpoint(on_meta(shapes), {}, Path("movqgan_270M.ckpt")), torch.float32)
    assert (decoder.factor, decoder.channels, decoder.module.config.codebook_size) == (8, 4, 16384)
