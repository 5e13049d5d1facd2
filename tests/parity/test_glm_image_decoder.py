"""GLM-Image's decoder against diffusers, on the same random weights, in fp32.

glm_image.safetensors holds what https://github.com/huggingface/diffusers 0.37.0 gave on a CPU (torch 2.12.1,
transformers 5.20.2), for weights and inputs that ``fill`` in tests/support/tiny.py derives from names:
  velocity, velocity_null   GlmImageTransformer2DModel at times 719 and 39, with codes and without
  block, block_text         its first block, of image and text tokens so small that the norms' epsilon matters
  glyphs_0 .. 2             GlmImagePipeline._get_glyph_embeds of PROMPTS
  prior                     GlmImagePipeline._upsample_token_ids of CODES
  denoised, denoised_unguided   GlmImagePipeline for the first codes and the second prompt, 6 steps, guidance 1.5 and 1
  pixels                    the former as an image, every eighth row and column
  decoded                   AutoencoderKL.decode of a latent of 2 x 3
and for the source images SHAPES, which ``picture`` and ``source_codes`` make, as PIL images:
  encoded_0, 1              their latents, by AutoencoderKL.encode (the mean), shifted and scaled
  keys_0, 1, values_0, 1    GlmImageKVCache of both sources, by layer, with heads before tokens
  velocity_1, 2             as velocity, the cache of one and of both sources being read
  denoised_1, 2             as denoised, by GlmImagePipeline with ``image`` and the sources' codes, of one and of both
  edited                    the latter as an image, every eighth row and column
The schedule had base_shift 0.25, max_shift 0.75, base_image_seq_len 256, dynamic and linear shifting, as released.
diffusers after 0.39 (its pull request 14011) tells the transformer shifted times instead of those it was trained on.
RELEASED are numbers of tensors, numbers in them, and a SHA-256 of names and shapes, of the transformer as released and
of an AutoencoderKL with its widths.
"""

from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.families import glm_image_diffusion as glm_image
from comfyui_specar.models.networks.glm_image_dit import DiT, DiTConfig, denoise, finer, schedule
from comfyui_specar.models.networks.positions import Rotation, grid_angles
from safetensors.torch import load_file

from ..support.closeness import assert_as_exact
from ..support.reference import digest
from ..support.tiny import fill, named_shapes
from ..support.tiny_glm_image import vae_shapes, write_decoder

OFFICIAL = load_file(Path(__file__).parent / "glm_image.safetensors")
PROMPTS = ("no words", 'a sign "open" and \u201cna\u00efve\u201d', "'one' only \u300c\u4e8c\u300d \"3\"")
CODES = torch.arange(12).view(2, 2, 3) * 7 % 32
RELEASED = {
    "transformer": (443, 6_926_882_880, "c857a7f18e94dd1c4700c4799a6575681be4671a612f0652caef8a154ee2bf1b"),
    "vae": (288, 406_100_643, "c2c6e1e2fdb33c7dbe7aed044ca197270af612b230f914a7c78f78d9995efbc1"),
}
SHAPES = ((3, 2), (1, 1))  # rows and columns of the tokens of source images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_decoder(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def decoder(folder):
    return glm_image.load(folder, torch.float32)


@pytest.fixture(scope="module")
def encoder(folder):
    return glm_image.load_latent_encoder(folder)


def picture(rows: int, cols: int) -> torch.Tensor:
    """[1, 32 * rows, 32 * cols, 3] in 0..1: bent stripes of the 256 values that a PIL image has."""
    y, x, channel = torch.meshgrid(*map(torch.arange, (32 * rows, 32 * cols, 3)), indexing="ij")
    return ((3 * y + 5 * x + 80 * channel + x * y // 7) % 256)[None] / 255


def source_codes(rows: int, cols: int) -> torch.Tensor:
    return torch.arange(rows * cols).view(rows, cols) * 5 % 32


def test_codes_as_the_pipeline_takes_them():
    assert torch.equal(finer(CODES), OFFICIAL["prior"])


def read_sources(decoder, count: int = 2):
    return [
        decoder.dit.read(OFFICIAL[f"encoded_{i}"], source_codes(*shape)[None]) for i, shape in enumerate(SHAPES[:count])
    ]


@pytest.mark.parametrize(
    ("name", "codes", "count"),
    [("velocity", CODES, 0), ("velocity_null", None, 0), ("velocity_1", CODES, 1), ("velocity_2", CODES, 2)],
)
def test_velocity(decoder, name, codes, count):
    latent, text = fill("latent embedding", (2, 4, 8, 12)), fill("text embedding", (2, 5, 24))
    time = torch.tensor([719.0, 39.0])
    assert_as_exact(lambda: decoder.dit(latent, text, codes, time, read_sources(decoder, count)), OFFICIAL[name])


def test_a_block(decoder):
    shapes = {"x": (2, 24, 32), "t": (2, 5, 32), "c": (2, 16)}
    x, text, conditions = (fill(f"{name} embedding", shape) / 50 for name, shape in shapes.items())

    def compute():
        angles = grid_angles(torch.arange(24)[None], 6, 16)
        rotation = Rotation(angles.cos(), angles.sin(), halves=True)
        return decoder.dit.transformer_blocks[0](x, text, conditions, rotation)

    assert_as_exact(compute, [OFFICIAL["block"], OFFICIAL["block_text"]])


@pytest.mark.parametrize("number", range(3))
def test_quoted_text(decoder, number):
    assert_as_exact(lambda: decoder.read(PROMPTS[number])[0], OFFICIAL[f"glyphs_{number}"])


@pytest.mark.parametrize(
    ("name", "cfg", "count", "image"),
    [
        ("denoised", 1.5, 0, "pixels"),
        ("denoised_unguided", 1.0, 0, None),
        ("denoised_1", 1.5, 1, None),
        ("denoised_2", 1.5, 2, "edited"),
    ],
)
def test_denoised_latents_and_pixels(decoder, encoder, name, cfg, count, image):
    """Guidance leaves the sources out of the second branch."""
    noise = fill("noise embedding", (1, 4, 8, 12))

    def denoised():
        text, null = decoder.read(PROMPTS[1])
        sources = [
            decoder.dit.read(encoder.encode_latent(picture(*shape)), source_codes(*shape)[None])
            for shape in SHAPES[:count]
        ]
        return denoise(decoder.dit, noise, CODES[:1], text, null, 6, cfg, sources=sources)

    assert_as_exact(denoised, OFFICIAL[name])
    if image:
        assert_as_exact(lambda: decoder.vae.decode(denoised()).movedim(-1, 1)[:, :, ::8, ::8], OFFICIAL[image])


def test_decoded_pixels(decoder):
    latent = fill("small embedding", (1, 4, 2, 3))
    assert_as_exact(lambda: decoder.vae.module.decode(latent), OFFICIAL["decoded"])


@pytest.mark.parametrize("number", range(2))
def test_latents_of_a_source(encoder, number):
    assert_as_exact(lambda: encoder.encode_latent(picture(*SHAPES[number])), OFFICIAL[f"encoded_{number}"])


def test_keys_and_values_of_sources(decoder):
    def compute():
        layers = zip(*read_sources(decoder), strict=True)
        return [torch.cat(part, dim=2) for layer in layers for part in zip(*layer, strict=True)]

    assert_as_exact(compute, [OFFICIAL[f"{part}_{layer}"] for layer in range(2) for part in ("keys", "values")])


def test_times_are_those_before_the_shift():
    """1024 x 1024 pixels: 4096 tokens of the transformer, a shift of 3.25."""
    steps = list(schedule(50, 4096))
    assert [time for time, *_ in steps[:3]] == [999, 979, 959] and steps[-1][0] == 19
    assert steps[0][1] == 1 and steps[-1][2] == 0 and steps[10][1] == pytest.approx(3.25 / (3.25 + 1 / 0.8 - 1))
    assert all(sigma == before for (_, sigma, _), (*_, before) in zip(steps[1:], steps, strict=False))


def test_released_sizes_have_the_official_names_and_shapes():
    assert tuple(digest(named_shapes(lambda: {"": DiT(DiTConfig())}))) == RELEASED["transformer"]
    assert tuple(digest(vae_shapes((1, 4, 8, 8), 128, 3, 16))) == RELEASED["vae"]
