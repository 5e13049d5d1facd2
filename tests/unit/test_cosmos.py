"""The Cosmos tokenizer: its files, its codes, and what is refused. Numbers against the official one: tests/parity."""

import math

import pytest
import torch
from comfyui_specar.model_loaders.decoders import cosmos
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from comfyui_specar.models.cosmos import Cosmos, CosmosConfig, fold, unfold
from safetensors.torch import save_file

from ..support.tiny import write_llamagen
from ..support.tiny_simplear import CODES, COSMOS, DECODER, cosmos_weights, write, write_cosmos


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_image_decoder(write_cosmos(tmp_path_factory.mktemp("cosmos")))


def pixels(count=1, rows=2, cols=3):
    return torch.rand(count, 16 * rows, 16 * cols, 3, generator=torch.Generator().manual_seed(1))


def test_what_the_nodes_read(decoder):
    config = decoder.module.config
    assert (decoder.factor, decoder.channels, config.codebook_size, config.base_channels) == (16, 3, CODES, 4)
    assert decoder.codebook.shape == (CODES, 3) and config == COSMOS
    assert CosmosConfig().codebook_size == 64_000 and CosmosConfig().base_channels == 32


def test_a_single_token_is_an_image(decoder):
    assert decoder.decode_tokens(torch.tensor([[[3]]])).shape == (1, 16, 16, 3)


def test_codes_are_digits_and_quantise_to_themselves(decoder):
    """The first digit runs fastest; rounding a code's own steps gives the code again."""
    levels = COSMOS.levels
    halves = torch.tensor([level // 2 for level in levels])
    steps = decoder.codebook * halves + halves
    weights = torch.tensor([math.prod(levels[:i]) for i in range(len(levels))], dtype=torch.float32)
    assert torch.equal((steps * weights).sum(-1), torch.arange(CODES).float())
    assert len(decoder.codebook.unique(dim=0)) == CODES and decoder.codebook.abs().max() == 1
    for config in (COSMOS, CosmosConfig(levels=(8, 5, 3), widths=(32,), z_channels=4)):
        module = Cosmos(config)
        tokens = torch.arange(config.codebook_size).view(1, 1, -1)
        wanted = module.dequantize(tokens)
        # Values that the squeezing maps onto the steps: its inverse, taken in double precision.
        top = torch.tensor(config.levels).double()
        half, offset = (top - 1) * 1.001 / 2, torch.where(top % 2 == 0, 0.5, 0.0).double()
        step = wanted.double().movedim(1, -1) * (top // 2)
        raw = ((step + offset) / half).atanh() - (offset / half).atanh()
        assert torch.equal(module.quantize_latent(raw.movedim(-1, 1)), tokens)


def test_wavelets_fold_and_unfold():
    """Of two equal frames nothing is lost, and a step's bands are averages and differences."""
    frame = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    bands = fold(frame)
    assert bands.shape == (2, 24, 4, 6) and torch.count_nonzero(bands[:, 12:]) == 0
    assert torch.allclose(bands[:, :3], torch.nn.functional.avg_pool2d(frame, 2))
    assert torch.allclose(unfold(bands), frame) and torch.allclose(unfold(unfold(fold(fold(frame)))), frame)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_every_form_of_the_files_is_the_same_tokenizer(decoder, tmp_path):
    """decoder.jit with encoder.jit beside it, autoencoder.jit, and safetensors of either."""
    wanted = decoder.module.state_dict()
    write_cosmos(tmp_path / "jit", suffix=".jit")
    write_cosmos(tmp_path / "whole", halves=("autoencoder",), suffix=".jit")
    write_cosmos(tmp_path / "mixed", halves=("encoder",))
    (tmp_path / "mixed" / "decoder.jit").write_bytes((tmp_path / "jit" / "decoder.jit").read_bytes())
    for folder in ("jit", "whole", "mixed"):
        found = load_image_decoder(tmp_path / folder).module.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), folder
    half = load_image_decoder(tmp_path / "jit" / "decoder.jit", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_only_the_decoder(tmp_path):
    folder = write_cosmos(tmp_path / DECODER, halves=("decoder",))
    decoder = load_image_decoder(folder / "decoder.safetensors")
    assert decoder.decode_tokens(torch.zeros(1, 2, 2, dtype=torch.int64)).shape == (1, 32, 32, 3)
    for encode in (decoder.encode, decoder.encode_latent):
        with pytest.raises(ValueError, match=r"decodes.*encoder\.safetensors of nvidia/.*beside"):
            encode(pixels())


def test_only_the_encoder(tmp_path):
    folder = write_cosmos(tmp_path / DECODER, halves=("encoder",))
    with pytest.raises(CheckpointError, match=r"only the encoder.*decoder\.safetensors"):
        load_image_decoder(folder / "encoder.safetensors")


def test_something_else_beside_the_decoder(tmp_path):
    folder = write_cosmos(tmp_path / "x", halves=("decoder",))
    (folder / "decoder.safetensors").rename(folder / "my_decoder.safetensors")
    write_llamagen(folder / "my_encoder.safetensors", text=False)
    with pytest.raises(CheckpointError, match="my_encoder.safetensors.*my_decoder.safetensors"):
        load_image_decoder(folder / "my_decoder.safetensors")


@pytest.mark.parametrize("name", ["Cosmos-1.0-Tokenizer-DV4x8x8", "Cosmos-0.1-Tokenizer-DI16x16", "cosmos_cv8x16x16"])
def test_other_cosmos_tokenizers_are_named(tmp_path, name):
    """Their tensors have the same names, and some the same shapes: only the name of file or folder tells."""
    folder = write_cosmos(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"(?i)Cosmos.* [cd][iv]\d.*DV8x16x16"):
        load_image_decoder(folder / "decoder.safetensors")


def test_codes_that_do_not_fit_the_decoder(tmp_path):
    tensors = cosmos_weights() | {"quantizer._levels": torch.tensor([8, 8], dtype=torch.int32)}
    save_file(tensors, str(tmp_path / "decoder.safetensors"))
    with pytest.raises(CheckpointError, match="3 channels.*2"):
        load_image_decoder(tmp_path / "decoder.safetensors")
    save_file(tensors | {"quantizer._levels": torch.tensor([0, 8, 8])}, str(tmp_path / "decoder.safetensors"))
    with pytest.raises(CheckpointError, match="levels"):
        load_image_decoder(tmp_path / "decoder.safetensors")


def test_without_the_buffers_codes_have_the_released_levels():
    assert cosmos._levels({}, Checkpoint({})) == (8, 8, 8, 5, 5, 5)


def test_damaged_numbers_are_named(tmp_path):
    tensors = cosmos_weights()
    tensors["decoder.mid.block_1.conv1.1.conv3d.weight"][0, 0, 1] = math.nan  # of a filter in time, which is summed
    save_file(tensors, str(tmp_path / "decoder.safetensors"))
    with pytest.raises(CheckpointError, match=r"decoder\.mid\.block_1\.conv1\.1\.weight.*NaN"):
        load_image_decoder(tmp_path / "decoder.safetensors")


def test_models_find_the_decoder_under_its_released_names(tmp_path):
    folder = write(tmp_path / "SimpleAR-1.5B-RL")
    assert find_image_decoder(folder, "simplear").parent.name == DECODER
    assert load_model(folder).codebook.shape == (CODES, 3)
    (tmp_path / "vae").mkdir()
    (folder / DECODER).rename(tmp_path / "vae" / DECODER)
    assert find_image_decoder(folder, "simplear") is None
    found = find_image_decoder(folder, "simplear", [tmp_path / "vae"])
    assert found == tmp_path / "vae" / DECODER / "decoder.safetensors"
    plain = tmp_path / "vae" / "cosmos_dv8x16x16_decoder.safetensors"
    found.rename(plain)
    assert find_image_decoder(folder, "simplear", [tmp_path / "vae"]) == plain


def test_a_decoder_of_another_family(tmp_path, caplog):
    folder = write(tmp_path / "model", codes=40)
    assert load_model(folder).codebook is None
    assert "image decoder" in caplog.text and "40 codes" in caplog.text
    assert cosmos.recognise(open_checkpoint(folder / DECODER / "decoder.safetensors").tensors)
    with pytest.raises(CheckpointError, match="image decoder"):
        load_model(folder / DECODER / "decoder.safetensors")
