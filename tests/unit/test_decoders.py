"""Image decoders: what each is asked alike, which files hold it, how an image becomes codes, and what is refused.
Numbers against the official ones: tests/parity."""

import math
import re
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import KINDS, cosmos, kl_vae, vq
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError
from comfyui_specar.models.image_decoder import ImageDecoder
from comfyui_specar.models.networks.cosmos import Cosmos, CosmosConfig
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel
from comfyui_specar.models.networks.vq import VQConfig, VQModel, nearest_codes
from comfyui_specar.tools.training.contact_sheet import border_colour
from safetensors.torch import load_file, save_file

from ..support import tiny_chameleon, tiny_emu3, tiny_emu35, tiny_mar
from ..support.bad_files import refused
from ..support.closeness import fp64
from ..support.tiny import fill, vq_weights, write_llamagen
from ..support.tiny_decoders import WRITE, saved
from ..support.tiny_simplear import COSMOS, DECODER, cosmos_weights, write_cosmos


def pickled(folder, contents):
    torch.save(contents, folder / "vq.ckpt")
    return folder / "vq.ckpt"


def kl_weights(folder):
    tiny_mar.write_kl_vae(folder)
    return load_file(folder / "kl16.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Kind -> its file, which tests must not change."""
    return {kind: write(tmp_path_factory.mktemp("decoder")) for kind, (write, *_) in WRITE.items()}


@pytest.fixture(scope="module", params=WRITE)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def file(kind, files) -> Path:
    return files[kind]


@pytest.fixture(scope="module")
def decoder(file):
    return load_image_decoder(file)


def images(decoder):
    return fill("two pictures embedding", (2, 2 * decoder.factor, 3 * decoder.factor, 3)).sigmoid()


# What all do


@torch.inference_mode()
def test_images_become_latents_and_images_again(kind, decoder):
    assert (decoder.factor, decoder.channels, decoder.margin) == (*WRITE[kind][1:], 0)
    pixels = images(decoder)
    latent = decoder.encode_latent(pixels)
    assert latent.shape == (2, decoder.channels, 2, 3) and latent.dtype == torch.float32
    back = decoder.decode(latent)
    assert back.shape == pixels.shape and back.dtype == torch.float32 and 0 <= back.min() < back.max() <= 1
    torch.testing.assert_close(back, (decoder.module.decode(latent).movedim(1, -1) / 2 + 0.5).clamp(0, 1))
    if isinstance(decoder, ImageDecoder):
        tokens = decoder.encode(pixels)
        assert tokens.dtype == torch.int64 and 0 <= tokens.min() <= tokens.max() < decoder.codes == 32
        assert torch.equal(decoder.dequantize(tokens), latent)
        assert torch.equal(decoder.codebook[tokens].movedim(-1, 1), latent)
    assert decoder.decode(latent[:1, :, :1, :2]).shape == (1, decoder.factor, 2 * decoder.factor, 3)


@fp64()
@torch.inference_mode()
def test_images_of_a_batch_do_not_mix(decoder):
    latent = fill("latents embedding", (2, decoder.channels, 2, 3))
    torch.testing.assert_close(decoder.decode(latent)[1:], decoder.decode(latent[1:]))


def test_sides_that_are_no_whole_tokens(decoder):
    with pytest.raises(ValueError, match=rf"multiples of {decoder.factor}.*Upscale Image"):
        decoder.encode_latent(torch.rand(1, 2 * decoder.factor, 3 * decoder.factor + 1, 3))


def test_half_precision(file, decoder):
    coarse = load_image_decoder(file, dtype=torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    latent = decoder.encode_latent(images(decoder))
    assert (coarse.decode(latent) - decoder.decode(latent)).abs().mean() < 0.02


def test_spoilt_files_are_refused(file, tmp_path):
    """Every third of the tensors that each part of a decoder begins and ends with."""
    tensors, path = load_file(file), tmp_path / file.name
    ends = re.compile(r"conv_in|block_1\.|mid\.0\.|norm_out|conv_out|quant_conv")
    names = list(filter(ends.search, tensors))
    for name in names[::3]:
        saved(path, {other: tensor for other, tensor in tensors.items() if other != name})
        refused(path, path.name, loader=load_image_decoder)
    name = next(name for name in names if name.startswith("decoder.") and name.endswith("weight"))
    spoilt = tensors[name].clone()
    spoilt.view(-1)[-1] = torch.nan
    refused(saved(path, tensors | {name: spoilt}), path.name, "NaN or infinite", loader=load_image_decoder)
    surplus = saved(path, tensors | {"decoder.surplus.weight": torch.zeros(1)})
    refused(surplus, "1 unknown", "decoder.surplus", loader=load_image_decoder)
    for part in ("encoder.", "decoder."):
        saved(path, {name: tensor for name, tensor in tensors.items() if not name.startswith(part)})
        refused(path, path.name, loader=load_image_decoder)


def test_a_decoder_is_known_for_what_it_is(file):
    assert len([kind for kind in KINDS if kind.recognise(load_file(file))]) == 1
    refused(file, file.name, "image decoder", "Load AR Image Decoder", loader=load_model)


# Their files


def one_beside_the_other(folder):
    """decoder.jit, and the encoder as safetensors."""
    write_cosmos(folder, ("encoder",))
    return write_cosmos(folder, ("decoder",), ".jit")


TRAINED = {"ema": {}, "discriminator": {}, "steps": 1}
FORMS = {  # kind -> other files of the same decoder
    "LlamaGen's VQGAN": [
        lambda folder: pickled(folder, vq_weights() | {"quantize.codebook_used": torch.zeros(65536)}),
        lambda folder: pickled(folder, {"model": vq_weights()} | TRAINED),
    ],
    "Chameleon's VQGAN": [lambda folder: tiny_chameleon.write_vqgan(folder / "vqgan.ckpt")],
    "Emu3's MoVQ": [
        *(lambda f, layout=it: tiny_emu3.write(f, shards=3, layout=layout) for it in (tiny_emu3.NEW, tiny_emu3.OLD)),
        lambda folder: saved(folder / "movq.safetensors", tiny_emu3.vq_weights()),  # in transformers' names
    ],
    "Cosmos": [
        write_cosmos,
        lambda folder: write_cosmos(folder, suffix=".jit"),
        lambda folder: write_cosmos(folder, ("autoencoder",), ".jit"),
        one_beside_the_other,
    ],
    "KL": [lambda folder: pickled(folder, {"model": kl_weights(folder) | {"loss.logvar": torch.zeros(())}})],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("kind", "write"), [(kind, form) for kind, forms in FORMS.items() for form in forms])
def test_every_form_of_the_files_is_the_same_decoder(files, tmp_path, kind, write):
    wanted, found = (load_image_decoder(path).module.state_dict() for path in (files[kind], write(tmp_path)))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "config", [KLConfig(), KLConfig(8, (1, 1, 2), 64, 2, False, True), KLConfig(16, (1, 1, 2, 4, 4), 32, 1)]
)
def test_sizes_are_read_from_names_and_shapes(config):
    with torch.device("meta"):
        assert kl_vae.config_of(KLModel(config).state_dict()) == config


@pytest.mark.parametrize(
    ("family", "model", "names"),
    [
        ("llamagen-t2i", "t2i_XL_stage1_256.pt", ["vq_ds16_t2i.pt"]),
        ("llamagen-c2i", "c2i_B_256.pt", ["vq_ds16_c2i.safetensors", "vq_ds16_c2i.pt"]),
        ("simplear", "model.safetensors", [f"{DECODER}/decoder.jit", "cosmos_dv8x16x16_decoder.safetensors"]),
        ("lumina-mgpt-2", "model.safetensors", ["movqgan_270M.ckpt"]),
    ],
)
def test_decoders_are_found_under_their_released_names(tmp_path, family, model, names):
    """Beside a model before elsewhere; the decoder of another family is none."""
    home, elsewhere = tmp_path / "model", tmp_path / "vae"
    for file in (home / model, *(elsewhere / name for name in (*names, "vq_ds16_other.pt", "kl16.ckpt"))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert find_image_decoder(home / model, family) is None
    for name in names:
        assert find_image_decoder(home / model, family, [elsewhere]) == elsewhere / name
        beside = home / name
        beside.parent.mkdir(exist_ok=True)
        (elsewhere / name).rename(beside)
        assert find_image_decoder(home / model, family, [elsewhere]) == beside
        beside.unlink()
    assert find_image_decoder(home / model, family, [elsewhere]) is None


def test_a_margin_repeats_the_border_and_is_cut_off(tmp_path):
    def with_margin(margin):
        return saved(tmp_path / "vq.safetensors", vq_weights(), metadata={"specar": f'{{"margin": {margin}}}'})

    decoder = load_image_decoder(with_margin(1))
    latent = decoder.dequantize(torch.arange(12).view(1, 3, 4))
    wider = torch.nn.functional.pad(latent, (1, 1, 1, 1), mode="replicate")
    with torch.inference_mode():
        expected = decoder.module.decode(wider)[..., 2:-2, 2:-2]
    pixels = decoder.decode(latent)
    assert pixels.shape == (1, 6, 8, 3)
    assert torch.equal(pixels, (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))
    for legal, illegal in ((0, -1), (64, 65)):
        assert load_image_decoder(with_margin(legal)).margin == legal
        with pytest.raises(ValueError, match=rf"margin is {illegal}.* 0 to 64"):
            load_image_decoder(with_margin(illegal))


# Codes


def test_which_code_a_vector_becomes(monkeypatch):
    """The nearest one, or that of the largest product; large codebooks are compared in parts."""
    codes = torch.tensor([[1.0, 0.0], [3.0, 0.5], [0.0, 1.0]])
    latent = torch.tensor([[1.0, 0.1], [0.1, 2.0]]).T.reshape(1, 2, 1, 2)
    assert nearest_codes(latent, codes).tolist() == [[[0, 2]]]
    assert nearest_codes(latent, codes, by_product=True).tolist() == [[[1, 2]]]
    latent, codes = torch.randn(1, 4, 6, 5), torch.randn(50, 4)
    wanted = nearest_codes(latent, codes)
    assert torch.equal(wanted.flatten(), torch.cdist(latent[0].flatten(1).T, codes).argmin(1))
    monkeypatch.setattr("comfyui_specar.models.networks.vq._PAIRS", 120)
    assert torch.equal(nearest_codes(latent, codes), wanted)


def test_counters_of_batches_are_not_read(files, tmp_path):
    """Only training reads them; a file may leave them out, or have been cast as a whole."""
    whole = load_file(files["Emu3's MoVQ"])
    counters = {name for name in whole if name.endswith("num_batches_tracked")}
    wanted, pixels = load_image_decoder(files["Emu3's MoVQ"]), torch.rand(1, 4, 6, 3)
    for values in (None, torch.full((1,), torch.nan)):
        kept = {name: tensor for name, tensor in whole.items() if name not in counters}
        kept |= {} if values is None else {name: values.clone() for name in counters}
        save_file(kept, tmp_path / "movq.safetensors")
        found = load_image_decoder(tmp_path / "movq.safetensors")
        assert counters and torch.equal(found.encode_latent(pixels), wanted.encode_latent(pixels))


def test_which_decoders_encode_by_products(tmp_path):
    assert load_image_decoder(tiny_emu35.write_decoder(tmp_path / "ibq")).module.config.by_product
    (tmp_path / "ibq/config.json").unlink()
    assert not load_image_decoder(tmp_path / "ibq/model.safetensors").module.config.by_product
    with torch.device("meta"):
        tensors = VQModel(VQConfig(131072, 16, (1, 2), 32, 16, 1)).state_dict()
    assert vq.config_of(tensors).by_product


def test_codes_of_unit_length_are_compared_by_their_direction(files):
    model = load_image_decoder(files["LlamaGen's VQGAN"]).module
    with fp64():
        torch.testing.assert_close(model.codebook().norm(dim=1), torch.ones(32))
    tokens = torch.arange(32).view(1, 4, 8)
    assert torch.equal(model.quantize_latent(model.dequantize(tokens) * 3.7), tokens)
    with pytest.raises(ValueError, match="17 x 16 pixels.*multiples of 2"):
        model.encode(torch.zeros(1, 3, 16, 17))


@pytest.mark.parametrize("config", [COSMOS, CosmosConfig(levels=(8, 5, 3), widths=(32,), z_channels=4)])
def test_codes_of_cosmos_are_digits_and_quantise_to_themselves(config):
    """The first digit runs fastest; rounding a code's own steps gives the code again."""
    module, levels = Cosmos(config), torch.tensor(config.levels)
    tokens = torch.arange(config.codebook_size).view(1, 1, -1)
    steps = module.dequantize(tokens)[0, :, 0].T.double() * (levels // 2)
    place = torch.tensor([math.prod(config.levels[:i]) for i in range(len(levels))])
    assert torch.equal(((steps + levels // 2) * place).sum(-1), tokens.flatten().double())
    # Values that the squeezing maps onto the steps: its inverse, taken in double precision.
    half, offset = (levels - 1) * 1.001 / 2, torch.where(levels % 2 == 0, 0.5, 0.0).double()
    raw = ((steps + offset) / half).atanh() - (offset / half).atanh()
    assert torch.equal(module.quantize_latent(raw.T[None, :, None]), tokens)


def test_log_variance_is_clamped_and_sides_are_whole_tokens():
    model = KLModel(tiny_mar.KL).eval()
    with pytest.raises(ValueError, match="17 x 16 pixels.*multiples of 2"):
        model.encode_moments(torch.zeros(1, 3, 16, 17))
    torch.nn.init.constant_(model.quant_conv.bias, 50.0)
    assert model.encode_moments(torch.zeros(1, 3, 4, 4))[1].unique().tolist() == [20.0]


def test_the_bundled_file_brings_images_back():
    """A disc on a plain background, which the file was not trained on: much better than tokens of one colour each."""
    decoder, side = load_image_decoder(api.bundled("continuous")), 8
    axis = torch.linspace(-1, 1, side * decoder.factor)
    disc = (axis.square()[:, None] + axis.square() < 0.4).float()[..., None]
    pixels = disc * torch.tensor([0.9, 0.15, 0.15]) + (1 - disc) * torch.tensor([52.0, 112.0, 216.0]) / 255
    back = decoder.decode(decoder.encode_latent(pixels[None]))
    assert back.shape == (1, *pixels.shape)
    tokens = pixels.unflatten(1, (side, -1)).unflatten(0, (side, -1))
    flat = tokens.mean((1, 3), keepdim=True).expand_as(tokens).reshape(pixels.shape)
    assert (back - pixels).square().mean() < (flat - pixels).square().mean() / 4
    assert border_colour(back[0]) == "blue"


# What is refused


def test_only_half_of_a_cosmos(tmp_path):
    """A decoder alone decodes; an encoder alone, and another file where the encoder should be, are refused."""
    folder = write_cosmos(tmp_path / DECODER, halves=("decoder",))
    decoder = load_image_decoder(folder / "decoder.safetensors")
    assert decoder.decode(decoder.dequantize(torch.zeros(1, 2, 2, dtype=torch.int64))).shape == (1, 32, 32, 3)
    for encode in (decoder.encode, decoder.encode_latent):
        with pytest.raises(ValueError, match=r"decodes.*encoder\.safetensors of nvidia/.*beside"):
            encode(torch.rand(1, 32, 48, 3))
    other = (folder / "decoder.safetensors").rename(folder / "my_decoder.safetensors")
    write_llamagen(folder / "my_encoder.safetensors", text=False)
    refused(other, "my_encoder.safetensors", "my_decoder.safetensors", loader=load_image_decoder)
    write_cosmos(folder, halves=("encoder",))
    refused(folder / "encoder.safetensors", "only the encoder", "decoder.safetensors", loader=load_image_decoder)


@pytest.mark.parametrize("name", ["Cosmos-1.0-Tokenizer-DV4x8x8", "Cosmos-0.1-Tokenizer-DI16x16", "cosmos_cv8x16x16"])
def test_other_cosmos_tokenizers_are_named(tmp_path, name):
    """Their tensors have the same names, and some the same shapes: only the name of file or folder tells."""
    folder = write_cosmos(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"(?i)Cosmos.* [cd][iv]\d.*DV8x16x16"):
        load_image_decoder(folder / "decoder.safetensors")


FILTER = "decoder.mid.block_1.conv1.1.conv3d.weight"  # in time, which is summed


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("decoder", {"quantizer._levels": torch.tensor([8, 8], dtype=torch.int32)}, ("3 channels", "2")),
        ("decoder", {"quantizer._levels": torch.tensor([0, 8, 8])}, ("levels",)),
        ("decoder", {FILTER: torch.full((64, 64, 3, 1, 1), math.nan)}, ("decoder.mid.block_1.conv1.1.weight", "NaN")),
        ("movqgan_67M", {"encoder.conv_in.weight": torch.zeros(128, 3, 3, 3)}, ("67M", "movqgan_270M.ckpt")),
    ],
)
def test_files_of_other_sizes(tmp_path, file, changes, words):
    weights = cosmos_weights() if file == "decoder" else tiny_chameleon.movq_weights()
    refused(saved(tmp_path / f"{file}.safetensors", weights | changes), *words, loader=load_image_decoder)


def test_without_the_buffers_codes_have_the_released_levels():
    assert cosmos._levels({}, Checkpoint({})) == (8, 8, 8, 5, 5, 5)
    assert (CosmosConfig().codebook_size, CosmosConfig().base_channels, COSMOS.base_channels) == (64_000, 32, 4)
