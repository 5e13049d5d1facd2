"""Our Lumina-mGPT, its 2.0, Anole and their image tokenizers beside transformers' Chameleon, on the same weights.

The language model and the tokenizer's encoder run live: ChameleonForConditionalGeneration through its inner model and
its head (its own forward sets all image logits to the least value there is), and ChameleonVQVAE. transformers knows
query and key norms of one row per head only, so Lumina-mGPT's one row is repeated there.

chameleon.json holds what https://github.com/Alpha-VLLM/Lumina-mGPT gave at commit 104abe4 on a CPU (torch 2.13):
  forced     MultiModalLogitsProcessor: the only id it leaves (-1: all image ids and no other) after the opening of an
             image and so many tokens, for grids of height x width cells of 32 pixels
  sizes      generate_crop_size_list((target / 32)^2, 32): number of (width, height), and a SHA-256 of their lines
  decode     VQModel.decode of the tiny tokenizer's two 3 x 4 grids of codes (weights: tests/support/tiny_chameleon.py)
  released   tensors, numbers, and a SHA-256 of all names and shapes of VQModel as vqgan.yaml configures it
  omni       prompt: FlexARItemProcessor.process_item() of "a red fox <|image|>", with the tiny tokenizer and an image
             of these codes, before an answer or the opening of the new image; text_top_k of create_logits_processor();
             cfg and image_top_k of README.md and demo_image2image.py; crops: width and height to which
             var_center_crop() brings an image for 768 pixels

lumina2.json holds what https://github.com/Alpha-VLLM/Lumina-mGPT-2.0 gave at commit f44a4d7 on a CPU in fp64 (torch
2.12), with the tiny weights and files of the same module: forced and sizes as above, and
  decode, latent, tokens  MOVQ: decode_code() of two 3 x 4 grids of codes; quant_conv(encoder()) of two images of 4 x 6
             pixels; the codes that encode() finds for them
  released   tensors, numbers, and a SHA-256 of all names and shapes of the 270M model
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
from comfyui_specar.model_loaders.detect import load_reader
from comfyui_specar.model_loaders.families import chameleon
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, weight_file
from comfyui_specar.samplers.layout import TokenLayout
from tokenizers import Tokenizer

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import of_ids
from ..support.reference import assert_same_answer, assert_same_image, assert_same_states
from ..support.tiny_chameleon import CHANNELS, CODE, WIDTHS, vocabulary, vqgan_weights, write
from ..support.tiny_folder import edited

HERE = Path(__file__).parent
OFFICIAL, OFFICIAL2 = (json.loads((HERE / f"{it}.json").read_text(encoding="utf-8")) for it in ("chameleon", "lumina2"))
PROMPT = "a red fox"
GRIDS = {"lumina": [(4, 4), (2, 6), (8, 2)], "lumina2": [(8, 8), (4, 12), (12, 4)], "anole": [(4, 4)]}
IDS2 = vocabulary(32, "lumina2")
CODE2 = IDS2["<MOVQGAN0>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """That of the second Lumina-mGPT is for images of the area of 64 x 64 pixels, so that there are several shapes."""
    found = {kind: write(tmp_path_factory.mktemp("model"), kind=kind, shards=2) for kind in GRIDS}
    edited(found["lumina2"], specar={"grid": [8, 8]})
    return found


@pytest.fixture(scope="module")
def models(folders):
    return {kind: api.load_model(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders):
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    found = {}
    for kind, folder in folders.items():
        tensors = dict(open_checkpoint(weight_file(folder)).tensors)
        with fp64():
            model = ChameleonForConditionalGeneration(ChameleonConfig.from_pretrained(folder)).eval()
            heads = model.config.num_attention_heads
            tensors = {
                name: tensor.repeat(heads, 1) if "_norm." in name and len(tensor) == 1 else tensor
                for name, tensor in tensors.items()
            }
            missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert all(name.startswith("model.vqmodel.") for name in missing) and (kind != "anole" or not missing)
        assert all(name.startswith("model.vqmodel.decoder.") for name in unexpected)
        found[kind] = model
    return found


def contexts(folder, kind, grid):
    """Ids of both branches' prompts, written down by hand."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if kind == "anole":
        return [tokenizer.encode(text).ids for text in (f"<s>{PROMPT}<reserved08706><racm3:break>", "<s><racm3:break>")]
    first, side, cell = ("<s>", 16, 2) if kind == "lumina" else ("<|endoftext|>", 8, 4)
    asked = f"Generate an image of {grid[1] * side}x{grid[0] * side} according to the following prompt:\n{PROMPT}"
    opening = "<racm3:break>" + "".join(f"<reserved{8800 + length // cell:05}>" for length in grid)
    return [tokenizer.encode(text).ids for text in (f"{first}{asked}<reserved08706>{opening}", opening)]


CASES = [(kind, grid) for kind, grids in GRIDS.items() for grid in grids]


@pytest.mark.parametrize(("kind", "grid"), CASES)
def test_hidden_states_and_logits_of_both_branches(folders, models, references, kind, grid):
    assert_same_states(models[kind], references[kind], PROMPT, contexts(folders[kind], kind, grid), grid)


WHOLE = [pytest.param("lumina", grid, marks=pytest.mark.whole) for grid in ((4, 4), (8, 2))]


@pytest.mark.parametrize(("kind", "grid"), [("lumina", (2, 6)), ("lumina2", (4, 12)), ("anole", (4, 4)), *WHOLE])
def test_greedy_guided_images(folders, models, references, kind, grid):
    cfg = models[kind].defaults.cfg
    assert_same_image(models[kind], references[kind], PROMPT, contexts(folders[kind], kind, grid), grid, cfg=cfg)


# A prompt with an image

SEEN = torch.tensor(OFFICIAL["omni"]["codes"])


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """The same Lumina-mGPT under the name of the one that reads images."""
    folder = write(tmp_path_factory.mktemp("model"), kind="lumina")
    return api.load_model(folder.rename(folder.parent / "Lumina-mGPT-tiny-Omni"))


def seen(grid):
    """Ids of both branches: the second one has neither text nor image."""
    opening = omni_ids("<racm3:break>", *(f"<reserved{8800 + side // 2:05}>" for side in grid))
    return [OFFICIAL["omni"]["prompt"] + opening, opening]


def omni_ids(*names):
    ids = vocabulary(32)
    return [ids[name] for name in names]


def test_states_and_image_after_an_image(omni, references):
    grid = (2, 6)
    assert_same_states(omni, references["lumina"], PROMPT, seen(grid), grid, [SEEN])
    assert_same_image(omni, references["lumina"], PROMPT, seen(grid), grid, cfg=3, images=[SEEN])
    assert omni.image_defaults.cfg == OFFICIAL["omni"]["cfg"]
    assert omni.image_defaults.top_k == min(OFFICIAL["omni"]["image_top_k"], 32)


# A question about an image


def test_official_answers(folders, models, references):
    reader = load_reader(folders["lumina"], models["lumina"])
    assert reader.end == vocabulary(32)["<reserved08706>"]
    assert reader.request(reader.prompt(SEEN[None], PROMPT), 4, 1.0).params.top_k == OFFICIAL["omni"]["text_top_k"]
    official = OFFICIAL["omni"]["prompt"]
    assert reader._write(PROMPT, SEEN) == official
    mark = Tokenizer.from_file(str(folders["lumina"] / "tokenizer.json")).encode("?").ids
    at = 1 + len(PROMPT)
    assert_same_answer(reader, references["lumina"], SEEN, f"{PROMPT}?", [*official[:at], *mark, *official[at:]])
    spoken = Tokenizer.from_file(str(folders["lumina"] / "tokenizer.json")).encode(PROMPT).ids
    assert reader.text(spoken) == PROMPT


def test_official_crops():
    grids = chameleon.size_table(48)
    for size, crop in OFFICIAL["omni"]["crops"].items():
        width, height = map(int, size.split()[0].split("x"))
        assert list(chameleon.crop_to_grid(torch.zeros(height, width, 3), 16, grids).shape[1::-1]) == crop


@torch.inference_mode()
def test_official_logits(models):
    model, (prompt, codes) = models["lumina2"], (OFFICIAL2["context"][:7], OFFICIAL2["context"][7:])
    tokens = torch.tensor([codes]) - CODE2

    def compute():
        state = model.start(of_ids(model, prompt), None, 1, model.layout(), slack=0, guided=False)
        out = model.step(state, tokens, torch.arange(12)[None])
        return torch.cat((state.prefill.logits, out.logits[:, :-1]), dim=1)

    assert_as_exact(compute, torch.tensor(OFFICIAL2["logits"]).view(1, 12, 34))


def test_official_prompt_and_image(folders, models):
    model, (written, null) = models["lumina2"], contexts(folders["lumina2"], "lumina2", (4, 12))
    wide = model.unpack_prompt(model.encode_prompt(PROMPT), 1, "positive", (4, 12)).features[0, :, 0].long().tolist()
    assert wide == OFFICIAL2["prompt"] + OFFICIAL2["image"][:3] == written
    assert model.prefix.null(torch.zeros(1, 9, 1), (4, 12))[0, :, 0].tolist() == OFFICIAL2["image"][:3] == null
    codes = torch.arange(48).view(1, 4, 12) % 32
    forced = model.layout(4, 12).keeping(codes, torch.ones_like(codes, dtype=torch.bool)).forced[0]
    ids = [id - CODE2 + 155000 if id >= CODE2 else id for id in torch.tensor(model.word_ids)[forced].tolist()]
    assert ids == OFFICIAL2["image"][3:]


@pytest.mark.parametrize(("official", "cells"), [(o, cells) for o in (OFFICIAL, OFFICIAL2) for cells in o["forced"]])
def test_forced_tokens(official, cells):
    first = official is OFFICIAL
    rows, cols = ((2 if first else 4) * int(side) for side in cells.split())
    layout = TokenLayout.with_row_ends(rows, cols, *(((8803,), (8196,)) if first else ((151670,), (151666,))))
    assert layout.forced[0].tolist() == official["forced"][cells]


@pytest.mark.parametrize(("target", "patch"), [*((target, 16) for target in OFFICIAL["sizes"]), ("768", 8)])
def test_legal_sizes(target, patch):
    grids = chameleon.size_table(int(target) // patch, patch)
    lines = sorted(f"{cols * patch} {rows * patch}" for rows, cols in grids)
    wanted = (OFFICIAL if patch == 16 else OFFICIAL2)["sizes"][target]
    assert [len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()] == wanted


# Image tokenizers


def test_decoded_pixels(folders):
    codes = torch.tensor([[(m * i + b) % 32 for i in range(12)] for m, b in ((7, 2), (11, 5))]).view(2, 3, 4)
    for path, wanted in (
        (folders["anole"], torch.tensor(OFFICIAL["decode"])),
        (folders["lumina"] / "chameleon_vqgan.safetensors", torch.tensor(OFFICIAL["decode"])),
        (folders["lumina2"] / "movqgan_270M.ckpt", torch.tensor(OFFICIAL2["decode"]).view(2, 3, 6, 8)),
    ):
        decoder = api.load_image_decoder(path)
        assert_as_exact(lambda it=decoder: it.module.decode(it.dequantize(codes)), wanted)


@torch.inference_mode()
def test_encoded_images(folders):
    from transformers import ChameleonVQVAE, ChameleonVQVAEConfig

    decoder = api.load_image_decoder(folders["anole"])
    planes = torch.rand((2, 3, 16, 24), generator=torch.Generator().manual_seed(3)) * 2 - 1
    with fp64():
        reference = ChameleonVQVAE(
            ChameleonVQVAEConfig(
                resolution=16,
                channel_multiplier=list(WIDTHS),
                base_channels=CHANNELS,
                latent_channels=CHANNELS,
                embed_dim=CODE,
                num_embeddings=32,
                num_res_blocks=1,
            )
        ).eval()
        missing, unexpected = reference.load_state_dict(vqgan_weights(), strict=False)
        latent = reference.quant_conv(reference.encoder(planes))
        tokens = reference.encode(planes).image_tokens.view(2, 4, 6)
    assert not missing and all(name.startswith("decoder.") for name in unexpected)
    assert_as_exact(lambda: decoder.module.encode_latent(planes), latent)
    found = decided(lambda: decoder.encode(planes.movedim(1, -1) / 2 + 0.5))
    assert torch.equal(found, tokens) and len(tokens.unique()) > 5
    # Raw codes have different lengths, so the nearest one is not the one of the most similar direction.
    assert not torch.equal(torch.einsum("bchw,vc->bhwv", latent.float(), decoder.codebook).argmax(-1), tokens)


@torch.inference_mode()
def test_images_encoded_by_movqgan(folders):
    decoder = api.load_image_decoder(folders["lumina2"] / "movqgan_270M.ckpt")
    planes = torch.rand((2, 3, 4, 6), generator=torch.Generator().manual_seed(3)) * 2 - 1
    assert_as_exact(lambda: decoder.module.encode_latent(planes), torch.tensor(OFFICIAL2["latent"]).view(2, 4, 2, 3))
    found = decided(lambda: decoder.encode(planes.movedim(1, -1) / 2 + 0.5))
    assert found.flatten().tolist() == OFFICIAL2["tokens"]
