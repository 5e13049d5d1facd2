"""Our Emu3.5 and its image tokenizer beside transformers' Qwen3 and the official code, on the same random weights.

The language model runs live: Qwen3ForCausalLM, whose layers are the official ones.

emu35.json holds what https://github.com/baaivision/Emu3.5 gave at commit 8fcf1da on a CPU in fp64 (torch 2.12,
transformers 5.20), with the tiny weights and files of tests/support/tiny_emu35.py:
  hidden, logits  Emu3ForCausalLM, whose norms compute in fp32: for the ids of 40 words, the logits of all codes and of
             the end of a row
  decode, latent, tokens  IBQ: decode_code() of two 2 x 3 grids of codes; quant_conv(encoder()) of two images of 8 x 12
             pixels; the codes that encode() finds for them
  released   tensors, numbers, and a SHA-256 of all names and shapes: of Emu3ForCausalLM of the released sizes, and of
             IBQ (256 channels times 1, 1, 2, 2, 4, four blocks, attention at a sixteenth of the size, 131072 codes of
             256 numbers)
  forced     UnbatchedClassifierFreeGuidanceLogitsForVisualTokenProcessor: the only id it leaves (-1: all image ids and
             no other) after the opening of an image and so many tokens, for grids of height x width tokens
  prompts    build_unc_and_template("t2i", False): both prompts, the question of the first empty
  sizes      of example_config_t2i.py, and its image_top_k and classifier_free_guidance
  x2i        of example_config_x2i.py: build_unc_and_template("x2i", True); format_image_string() of the codes 3 1 4,
             1 5 9; smart_resize() of images of width x height pixels, in tokens [rows, cols]; its image_top_k and
             classifier_free_guidance
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import emu35
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, weight_file
from comfyui_specar.samplers.layout import TokenLayout

from ..support import tiny_emu35 as tiny
from ..support.closeness import assert_as_exact, decided, fp64
from ..support.reference import assert_same_image, assert_same_states

OFFICIAL = json.loads((Path(__file__).parent / "emu35.json").read_text(encoding="utf-8"))
PROMPT = "a red fox"
IDS = tiny.vocabulary()
CODE = IDS["<|visual token 000000|>"]
GRIDS = [(3, 5), *(pytest.param(grid, marks=pytest.mark.whole) for grid in ((4, 4), (8, 2)))]


@pytest.fixture(scope="module", params=GRIDS, ids=str)
def folder(tmp_path_factory, request):
    return tiny.write(tmp_path_factory.mktemp("model"), shards=2, grid=request.param)


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    tensors = open_checkpoint(weight_file(folder)).tensors
    with fp64():
        made = Qwen3ForCausalLM(Qwen3Config(**settings, attention_bias=False, rope_parameters=rope)).eval()
        made.load_state_dict(tensors)
    return made


def contexts(grid, prompts=OFFICIAL["prompts"], images=""):
    """Ids of both branches' prompts, from the official ones."""
    return [
        ids_of(
            f"{text.format(question=PROMPT).replace('<|IMAGE|>', images)}"
            f"<|image start|>{grid[0]}*{grid[1]}<|image token|>"
        )
        for text in reversed(prompts)
    ]


def ids_of(text):
    """Ids of a tiny tokenizer: its printable letters count from the exclamation mark, and a space is 220."""
    found = []
    while text:
        special = next((name for name in IDS if text.startswith(name)), None)
        found.append(IDS[special] if special else 220 if text[0] == " " else ord(text[0]) - 33)
        text = text[len(special or text[0]) :]
    return found


IMAGES = [torch.tensor([[3, 1, 4], [1, 5, 9]])] * 2
READ = OFFICIAL["x2i"]["prompts"], 2 * OFFICIAL["x2i"]["image"]
KINDS = pytest.mark.parametrize(("images", "prompts"), [((), ()), (IMAGES, READ)], ids=["text", "images"])


def test_official_prompts(model):
    features = model.unpack_prompt(model.encode_prompt(PROMPT), 1, "positive", model.grid).features
    null = model.prefix.null(torch.zeros(1, 9, 1), model.grid)
    assert [each[0, :, 0].long().tolist() for each in (features, null)] == contexts(model.grid)
    both = model.unpack_prompts(model.encode_prompt(PROMPT, IMAGES), None, 1, model.grid)
    assert [each.features[0, :, 0].long().tolist() for each in both] == contexts(model.grid, *READ)


@KINDS
def test_hidden_states_and_logits_of_both_branches(model, reference, images, prompts):
    assert_same_states(model, reference, PROMPT, contexts(model.grid, *prompts), model.grid, images)


@KINDS
def test_greedy_guided_images(model, reference, images, prompts):
    assert_same_image(model, reference, PROMPT, contexts(model.grid, *prompts), model.grid, cfg=5, images=images)


def test_official_sizes_of_images():
    for pixels, grid in OFFICIAL["x2i"]["sizes"].items():
        width, height = map(int, pixels.split("x"))
        assert emu35.scaled_grid(height, width, 16) == tuple(grid) and tuple(grid) in emu35.GRIDS
    with pytest.raises(ValueError, match="4096 x 1000.*4:1"):
        emu35.scaled_grid(1000, 4096, 16)


@torch.inference_mode()
def test_official_layers(tmp_path):
    model = api.load_model(tiny.write(tmp_path, decoder=False))
    ids = torch.tensor([i * 37 % CODE for i in range(40)], dtype=torch.float32)[None, :, None]

    def compute():
        backbone = model.backbone
        hidden = backbone(model.prefix(ids), model.positions.prompt(40, backbone.config.head_dim, "cpu"))
        return hidden, backbone.logits(hidden)

    assert_as_exact(compute, [torch.tensor(OFFICIAL[name]) for name in ("hidden", "logits")])


@pytest.mark.parametrize("grid", OFFICIAL["forced"])
def test_forced_tokens(grid):
    """All but the last one, which stands where our layout has the end of a row, and which nothing follows."""
    layout = TokenLayout.with_row_ends(*map(int, grid.split()), (151846,), ())
    assert layout.forced[0].tolist()[:-1] == OFFICIAL["forced"][grid][:-1]
    assert OFFICIAL["forced"][grid][-1] == 151853


def test_official_sizes_and_parameters(model):
    official = {tuple(map(int, size.split("*"))) for size in OFFICIAL["sizes"].values()}
    assert official | {(32, 32)} == set(emu35.SIZES) and emu35.SIZES[0] == (55, 73)
    for params, official in ((model.defaults, OFFICIAL), (model.image_defaults, OFFICIAL["x2i"])):
        assert (params.cfg, params.top_k) == (official["cfg"], tiny.CODES) and official["top_k"] == 5120


# IBQ


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return api.load_image_decoder(tiny.write_decoder(tmp_path_factory.mktemp("decoder")))


def test_decoded_pixels(decoder):
    codes = torch.tensor([[(m * i + b) % 32 for i in range(6)] for m, b in ((7, 2), (11, 5))]).view(2, 2, 3)
    wanted = torch.tensor(OFFICIAL["decode"]).view(2, 3, 8, 12)
    assert_as_exact(lambda: decoder.module.decode(decoder.dequantize(codes)), wanted)


@torch.inference_mode()
def test_encoded_images(decoder):
    """By dot products: the nearest codes are others."""
    planes = torch.rand((2, 3, 8, 12), generator=torch.Generator().manual_seed(3)) * 2 - 1
    wanted = torch.tensor(OFFICIAL["latent"]).view(2, 16, 2, 3)
    assert_as_exact(lambda: decoder.module.encode_latent(planes), wanted)
    found = decided(lambda: decoder.encode(planes.movedim(1, -1) / 2 + 0.5))
    assert found.flatten().tolist() == OFFICIAL["tokens"]
    distances = torch.cdist(wanted.movedim(1, -1).flatten(0, -2), decoder.codebook)
    assert (distances.argmin(-1) != found.flatten()).any()
