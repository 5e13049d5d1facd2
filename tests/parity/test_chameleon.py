"""Our Lumina-mGPT, Anole and their image tokenizer beside transformers' Chameleon, on the same random weights, in fp32.

The language model and the tokenizer's encoder run live: ChameleonForConditionalGeneration through its inner model and
its head (its own forward sets all image logits to the least value there is), and ChameleonVQVAE. transformers knows
query and key norms of one row per head only, so Lumina-mGPT's one row is repeated there.

chameleon.json holds what https://github.com/Alpha-VLLM/Lumina-mGPT gave at commit 104abe4 on a CPU (torch 2.13):
  forced     MultiModalLogitsProcessor: the only id it leaves (-1: all image ids and no other) after the opening of an
             image and so many tokens, for grids of height x width cells of 32 pixels
  sizes      generate_crop_size_list((target / 32)^2, 32): number of (width, height), and a SHA-256 of their lines
  decode     VQModel.decode of the tiny tokenizer's two 3 x 4 grids of codes (weights: tests/support/tiny_chameleon.py)
  released   tensors, numbers, and a SHA-256 of all names and shapes of VQModel as vqgan.yaml configures it
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import vq
from comfyui_specar.model_loaders.families import chameleon
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, open_checkpoint, weight_file
from comfyui_specar.samplers.layout import TokenLayout
from tokenizers import Tokenizer

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.reference import assert_same_image, assert_same_states, digest, on_meta
from ..support.tiny_chameleon import (
    CHANNELS,
    CODE,
    KINDS,
    WIDTHS,
    config,
    shapes,
    vocabulary,
    vqgan_shapes,
    vqgan_weights,
    write,
    write_vqgan,
)

OFFICIAL = json.loads((Path(__file__).parent / "chameleon.json").read_text(encoding="utf-8"))
PROMPT = "a red fox"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write(tmp_path_factory.mktemp("model"), kind=kind, shards=2) for kind in KINDS}


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
        assert all(name.startswith("model.vqmodel.") for name in missing) and (kind == "lumina" or not missing)
        assert all(name.startswith("model.vqmodel.decoder.") for name in unexpected)
        found[kind] = model
    return found


def contexts(folder, kind, grid):
    """Ids of both branches' prompts, written down by hand."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, rows, cols = vocabulary(32), *grid
    asked = f"Generate an image of {cols * 16}x{rows * 16} according to the following prompt:\n{PROMPT}"
    sizes = [ids[f"<reserved{8800 + side // 2:05}>"] for side in grid] if kind == "lumina" else []
    text = tokenizer.encode(asked if kind == "lumina" else PROMPT).ids
    opening = [ids["<racm3:break>"], *sizes]
    return [ids["<s>"], *text, ids["<reserved08706>"], *opening], [*([] if sizes else [ids["<s>"]]), *opening]


GRIDS = {"lumina": [(4, 4), (2, 6), (8, 2)], "anole": [(4, 4)]}
CASES = [(kind, grid) for kind in KINDS for grid in GRIDS[kind]]


@pytest.mark.parametrize(("kind", "grid"), CASES)
def test_hidden_states_and_logits_of_both_branches(folders, models, references, kind, grid):
    assert_same_states(models[kind], references[kind], PROMPT, contexts(folders[kind], kind, grid), grid)


@pytest.mark.parametrize(("kind", "grid"), CASES)
def test_greedy_guided_images(folders, models, references, kind, grid):
    assert_same_image(models[kind], references[kind], PROMPT, contexts(folders[kind], kind, grid), grid, cfg=3)


def test_the_released_model_has_the_names_and_shapes_of_transformers():
    """ChameleonConfig's defaults are those of 7B. Anole's folder holds the tokenizer's decoder besides."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    with torch.device("meta"):
        reference = ChameleonForConditionalGeneration(ChameleonConfig(vocabulary_map={"<image>": 8711}))
    sizes = config("anole", width=4096, layers=32, heads=32) | {"intermediate_size": 11008, "vocab_size": 65536}
    wanted = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    vqgan = vqgan_shapes(8192, (1, 1, 2, 2, 4), base=128, latent=256, code=256, blocks=2)
    inside = {f"model.vqmodel.{name}": shape for name, shape in vqgan.items() if not name.startswith("decoder.")}
    assert shapes("anole", sizes) | inside == wanted


@pytest.mark.parametrize("cells", OFFICIAL["forced"])
def test_forced_tokens(cells):
    rows, cols = (2 * int(side) for side in cells.split())
    layout = TokenLayout.ruled(rows, cols, (8803,), (8196,))
    assert layout.forced[0].tolist() == OFFICIAL["forced"][cells]


@pytest.mark.parametrize("target", OFFICIAL["sizes"])
def test_legal_sizes(target):
    lines = sorted(f"{cols * 16} {rows * 16}" for rows, cols in chameleon.size_table(int(target) // 16))
    assert [len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()] == OFFICIAL["sizes"][target]


def test_decoded_pixels(folders, tmp_path):
    codes = torch.tensor([[(m * i + b) % 32 for i in range(12)] for m, b in ((7, 2), (11, 5))]).view(2, 3, 4)
    beside, training = folders["lumina"] / "chameleon_vqgan.safetensors", write_vqgan(tmp_path / "vqgan.ckpt")
    for decoder in map(api.load_image_decoder, (folders["anole"], beside, training)):
        assert_as_exact(lambda it=decoder: it.module.decode(it.dequantize(codes)), torch.tensor(OFFICIAL["decode"]))


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


@pytest.mark.usefixtures("nothing_is_read")
def test_the_released_tokenizer_has_the_official_names_and_shapes():
    vqgan = vqgan_shapes(8192, (1, 1, 2, 2, 4), base=128, latent=256, code=256, blocks=2)
    assert digest(vqgan) == [OFFICIAL["released"][entry] for entry in ("tensors", "numbers", "sha256")]
    for prefix in ("", "model.vqmodel.", "vqmodel."):
        file = {prefix + name: tensor for name, tensor in on_meta(vqgan).items()}
        decoder = vq.load(Checkpoint(file, {}, Path("vqgan.ckpt")), torch.float32)
        assert (decoder.factor, decoder.channels, len(decoder.codebook)) == (16, 256, 8192)
