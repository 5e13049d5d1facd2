"""The decoder of GLM-Image (zai-org/GLM-Image): a diffusion transformer from codes to latents, its VAE, and the ByT5
encoder that reads what a prompt puts in quotes. Images that a prompt edits go through the VAE's encoder, too.

Reads the folders ``transformer``, ``vae`` and ``text_encoder`` of the release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ...limits.limits import LAYERS, LEVELS
from ...models.image_decoder import Autoencoder
from ...models.networks.glm_image_dit import DiT, DiTConfig, denoise
from ...models.networks.kl_vae import Decoder, Encoder, KLConfig
from ...models.text.prompt_encoders import left_out
from ..files.checkpoint import WEIGHT_FILES, Checkpoint, open_checkpoint, read_settings, weight_file
from ..files.errors import CheckpointError, as_released, incomplete_without
from ..files.names import count_modules
from ..files.weights import load_weights
from ..llama import positive
from ..text.t5 import T5, load_t5

STEPS, CFG = 50, 1.5  # of the release
MODEL = "vision_language_encoder"  # the folder of a release whose model generates the tokens
PARTS = ("transformer", "vae", "text_encoder")
_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", *WEIGHT_FILES)
_HEADS = 32
_QUOTES = (r"'([^']*)'", r"\u201c([^\u201c\u201d]*)\u201d", r'"([^"]*)"', r"\u300c([^\u300c\u300d]*)\u300d")
_LONGEST = 2048  # tokens of a quotation
_PAD, _END, _BYTES = 0, 1, 3  # ids of ByT5; a byte is its value plus the last
_VAE = (  # (pattern, replacement) from diffusers' names to latent diffusion's; levels of the decoder are turned around
    (r"^down_blocks\.", "down."),
    (r"^mid_block\.resnets\.0\.", "mid.block_1."),
    (r"^mid_block\.resnets\.1\.", "mid.block_2."),
    (r"\.resnets\.", ".block."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.(up|down)samplers\.0\.", r".\1sample."),
    (r"^conv_norm_out\.", "norm_out."),
)


class Half(nn.Module):
    """A half of the VAE. mean, std [C]: of its latents, which are shifted and scaled to the transformer's."""

    def __init__(self, config: KLConfig):
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.channels))
        self.register_buffer("std", torch.ones(config.channels))

    def moments(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """mean and std, as a latent [B, C, H, W] needs them."""
        return self.mean.to(latent)[:, None, None], self.std.to(latent)[:, None, None]


class Pixels(Half):
    """The VAE's decoder."""

    def __init__(self, config: KLConfig, operations=nn):
        super().__init__(config)
        self.decoder = Decoder(
            config, config.num_res_blocks, config.channels, False, operations, middle_attention=False
        )

    def decode(self, latent: Tensor) -> Tensor:
        """Latents [B, C, H, W] of the transformer -> [B, 3, 8 * H, 8 * W], about [-1, 1], not clamped."""
        mean, std = self.moments(latent)
        return self.decoder(latent * std + mean)


class Latents(Half):
    """The VAE's encoder."""

    def __init__(self, config: KLConfig, operations=nn):
        super().__init__(config)
        self.encoder = Encoder(
            config, config.num_res_blocks, 2 * config.channels, False, operations, middle_attention=False
        )

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, 8 * H, 8 * W] in [-1, 1] -> latents [B, C, H, W] of the transformer, without noise."""
        latent = self.encoder(pixels).chunk(2, dim=1)[0]
        mean, std = self.moments(latent)
        return (latent - mean) / std


class LatentEncoder(Autoencoder):
    """The encoder for source images. Its module is ``Latents``."""

    @torch.inference_mode()
    def encode_latent(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 8 * H, 8 * W, 3] in 0..1 -> latents [B, C, H, W] (fp32) of the transformer.

        Raises ValueError unless both sides are multiples of 8.
        """
        return self.module.encode(self.planes(pixels)).float()


@dataclass(frozen=True)
class SourceImage:
    """An image that a prompt edits, as the transformer reads it. latent [1, C, 4 * h, 4 * w]: of ``LatentEncoder``;
    tokens [h, w] (int64): its codes, one for 32 x 32 pixels."""

    latent: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class GlmImageDecoder:
    """reader: ByT5. What it reads (``read``) and tokens become ``latents``, which ``vae`` decodes: each with its module
    on the compute device."""

    dit: DiT
    vae: Autoencoder
    reader: T5

    @torch.inference_mode()
    def read(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Features [1, n, F] (fp32) of what a prompt puts in quotes, and of a prompt without quotations, which the
        second branch of guidance reads."""
        return self._glyphs(prompt), self._glyphs("")

    def _glyphs(self, prompt: str) -> Tensor:
        read = [self.reader(torch.tensor([ids], device=self.reader.device)) for ids in glyph_ids(prompt)]
        return torch.cat(read, dim=1).float()

    @torch.inference_mode()
    def latents(
        self,
        tokens: Tensor,
        text: Tensor,
        null: Tensor,
        seed: int,
        steps: int,
        cfg: float,
        device: torch.device | str,
        callback: Callable[[int], None] = lambda step: None,
        sources: Sequence[SourceImage] = (),
    ) -> Tensor:
        """The VAE's latents [B, C, 4 * h, 4 * w] (fp32) for tokens [B, h, w] (int64) and the features of ``read``.

        Images are denoised one after the other, as the tokens of one keep a device busy; image i starts from the noise
        of seed + i. device: on which the transformer computes. callback: called after each of the B * ``steps`` steps.
        sources: images that the prompt edits, the same for the whole batch.
        """
        shape = 1, self.dit.config.channels, 4 * tokens.shape[1], 4 * tokens.shape[2]
        dtype = self.dit.proj_out.weight.dtype
        text, null = (each.to(device, dtype) for each in (text, null))
        known = [self.dit.read(each.latent.to(device, dtype), each.tokens[None].to(device)) for each in sources]
        made = []
        for i, image in enumerate(tokens):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed((seed + i) % 2**64))
            inputs = noise.to(device), image[None].to(device), text, null
            made.append(denoise(self.dit, *inputs, steps, cfg, callback, known))
        return torch.cat(made)


def quotations(prompt: str) -> list[str]:
    """What a prompt puts in quotes, by kind of quote; [""] if nothing."""
    return [quoted for pattern in _QUOTES for quoted in re.findall(pattern, prompt)] or [""]


def unread_quotations(prompt: str) -> list[str]:
    """What of the quotations the decoder does not read, a sentence each."""
    rest = (text.encode()[_LONGEST - 1 :].decode(errors="ignore") for text in quotations(prompt))
    return left_out(_LONGEST, "bytes of a quotation, its end included,", " ... ".join(filter(None, rest)))


def glyph_ids(prompt: str) -> list[list[int]]:
    """ByT5's ids of every quotation. An even number of them gets a pad token in front of each, as in training."""
    found = quotations(prompt)
    front = [_PAD] * (len(found) % 2 == 0)
    return [[*front, *(byte + _BYTES for byte in text.encode()[: _LONGEST - 1]), _END] for text in found]


# Files


def find_folder(model: Path, search: Sequence[Path]) -> Path:
    """The folder that contains the decoder's, for the folder or file of a model: that of the release, or one named
    GLM-Image in the search folders. Raises CheckpointError if there is none."""
    folder = model if model.is_dir() else model.parent
    home = folder.parent if folder.name == MODEL else folder
    folders = (home, *(place / "GLM-Image" for place in search))
    found = next((each for each in folders if all((each / part).is_dir() for part in PARTS)), None)
    if found is None:
        raise CheckpointError(
            f"GLM-Image's image decoder was not found. Put the folders {', '.join(PARTS)} of zai-org/GLM-Image into "
            f"{home}."
        )
    return found


def load(folder: Path, dtype: torch.dtype, operations=nn) -> GlmImageDecoder:
    """The decoder of a released folder, on the CPU; the VAE is in fp32, as fp16 overflows.

    Raises CheckpointError for folders or tensors that are missing, and for tensors that are unknown, misshapen or not
    finite.
    """
    transformer, vae, text = (open_part(folder, part) for part in PARTS)
    with as_released(transformer.path):
        dit = load_dit(transformer, dtype, operations)
    with as_released(vae.path):
        pixels = load_vae(vae, operations)
    if pixels.channels != dit.config.channels:
        raise CheckpointError(
            f"The vae in {folder.name} has {pixels.channels} channels, its transformer {dit.config.channels}: they do "
            "not belong together. Download the folders of zai-org/GLM-Image again."
        )
    with as_released(text.path):
        return GlmImageDecoder(dit, pixels, load_t5(text.path, dit.config.text_dim, dtype, "GLM-Image's text_encoder"))


def open_part(folder: Path, part: str) -> Checkpoint:
    """The weights in a folder of the release. Raises CheckpointError if there are none."""
    if not any((folder / part / name).is_file() for name in _FILES):
        raise CheckpointError(
            f"{folder.name} has no weights in its folder {part}. Download the folders {', '.join(PARTS)} of "
            "zai-org/GLM-Image again."
        )
    return open_checkpoint(weight_file(folder / part, _FILES))


def load_dit(checkpoint: Checkpoint, dtype: torch.dtype, operations=nn) -> DiT:
    """The diffusion transformer, in the size of its tensors."""
    tensors = checkpoint.tensors
    settings = read_settings(checkpoint.path.parent / "config.json")
    heads, side = int(positive(settings, "num_attention_heads", _HEADS)), int(positive(settings, "patch_size", 2))
    with incomplete_without("all tensors of the diffusion transformer", checkpoint.path):
        dim, patch = tensors["image_projector.proj.weight"].shape
        config = DiTConfig(
            dim,
            count_modules(tensors, r"transformer_blocks\.", LAYERS),
            heads,
            patch // side**2,
            side,
            tensors["glyph_projector.net.0.proj.weight"].shape[1],
            len(tensors["time_condition_embed.timestep_embedder.linear_1.weight"]),
            tensors["time_condition_embed.condition_embedder.linear_1.weight"].shape[1] // 4,
            len(tensors["prior_token_embedding.weight"]),
        )
    if dim % (4 * heads):  # positions rotate quarters of a head
        raise CheckpointError(f"config.json says num_attention_heads {heads}, but the transformer has width {dim}.")
    with torch.device("meta"):
        module = DiT(config, operations)
    return load_weights(module, tensors, checkpoint, dtype)


def load_latent_encoder(folder: Path, operations=nn) -> LatentEncoder:
    """The encoder for source images, of a released folder, on the CPU, in fp32. Raises CheckpointError as ``load``, and
    for a VAE without encoder."""
    checkpoint = open_part(folder, "vae")
    if not any(name.startswith("encoder.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path.name} in {folder.name} is a VAE without encoder, which source images need. Download the "
            "folder vae of zai-org/GLM-Image, or leave the source images out of the prompt."
        )
    with as_released(checkpoint.path):
        config, scale = vae_config(checkpoint)
        with torch.device("meta"):
            module = Latents(config, operations)
        tensors = vae_names(checkpoint.tensors, "encoder") | scale
        return LatentEncoder.load(module, config.factor, config.channels, tensors, checkpoint, torch.float32)


def load_vae(checkpoint: Checkpoint, operations=nn) -> Autoencoder:
    """The VAE's decoder, in fp32."""
    config, scale = vae_config(checkpoint)
    with torch.device("meta"):
        module = Pixels(config, operations)
    tensors = vae_names(checkpoint.tensors, "decoder") | scale
    return Autoencoder.load(module, config.factor, config.channels, tensors, checkpoint, torch.float32)


def vae_config(checkpoint: Checkpoint) -> tuple[KLConfig, dict[str, Tensor]]:
    """The VAE's sizes, by its decoder's tensors, and the latents' mean and std."""
    settings = read_settings(checkpoint.path.parent / "config.json")
    with incomplete_without("the decoder, and the latents' mean and std in config.json,", checkpoint.path):
        tensors = vae_names(checkpoint.tensors, "decoder")
        levels = count_modules(tensors, r"decoder\.up\.", LEVELS)
        widths = [len(tensors[f"decoder.up.{i}.block.0.conv1.weight"]) for i in range(levels)]
        config = KLConfig(
            tensors["decoder.conv_in.weight"].shape[1],
            tuple(width // widths[0] for width in widths),
            widths[0],
            count_modules(tensors, r"decoder\.up\.0\.block\.", LEVELS) - 1,
        )
        mean, std = (torch.tensor(settings[f"latents_{name}"], dtype=torch.float32) for name in ("mean", "std"))
    if not len(mean) == len(std) == config.channels or not (std > 0).all():
        raise CheckpointError(
            f"config.json says latents_mean {mean.tolist()} and latents_std {std.tolist()}, which are no numbers for "
            f"{config.channels} channels. Download it again."
        )
    return config, {"mean": mean, "std": std}


def vae_names(tensors: Mapping[str, Tensor], half: Literal["encoder", "decoder"]) -> dict[str, Tensor]:
    """The tensors of the VAE's encoder or decoder under the names of models/networks/kl_vae.py."""
    found = {name.removeprefix(f"{half}."): t for name, t in tensors.items() if name.startswith(f"{half}.")}
    last = count_modules(found, r"(?:up|down)_blocks\.", LEVELS) - 1
    return {f"{half}.{latent_diffusion_name(name, last)}": tensor for name, tensor in found.items()}


def latent_diffusion_name(name: str, last: int) -> str:
    """A name of diffusers' encoder or decoder in latent diffusion's naming. last: number of the deepest level."""
    for pattern, replacement in _VAE:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"^up_blocks\.(\d+)\.", lambda match: f"up.{last - int(match[1])}.", name)
