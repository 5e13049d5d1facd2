"""GLM-Image's decoder, a diffusion transformer: from noise, and the codes of an image, to latents of its VAE.

Text and image tokens attend to each other with one set of weights. The text is what the prompt puts in quotes, read
byte by byte, so that letters come out right; the codes hold everything else. Source images (of an edit) are read once,
before the first step: the tokens of the new image attend to their keys and values, too. Parameter names follow the
released files (zai-org/GLM-Image, ``transformer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .positions import Rotation, grid_angles

EPS = 1e-5  # of all norms
PIXELS = 8  # per side of a place of a latent
MODULATIONS = 12  # shift, scale and gate of attention and feed-forward network, for image and text
KeysValues = tuple[Tensor, Tensor]  # [B, heads, T, head_dim] each, the keys rotated
SourceCache = list[KeysValues]  # a source image as every layer sees it


@dataclass(frozen=True)
class DiTConfig:
    """Sizes; the defaults are those of the release. channels: of a latent; patch: latent places per side of a token.

    text_dim: of the features of quoted text; time_dim: of the embedded time; size_dim: of each number of the embedded
    size; codes: different ones.
    """

    dim: int = 4096
    layers: int = 30
    heads: int = 32
    channels: int = 16
    patch: int = 2
    text_dim: int = 1472
    time_dim: int = 512
    size_dim: int = 256
    codes: int = 16384


def sinusoids(values: Tensor, dim: int) -> Tensor:
    """Cosines, then sines [..., dim] (fp32) of values [...] at dim / 2 frequencies from 1 down to 1 / 10000."""
    steps = torch.arange(dim // 2, device=values.device, dtype=torch.float32) / (dim // 2)
    angles = values[..., None].float() * 10000.0**-steps
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Projected(nn.Module):
    """A linear layer named ``proj``."""

    def __init__(self, before: int, after: int, operations):
        super().__init__()
        self.proj = operations.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class MLP(nn.Module):
    """Two linear layers around an activation, with the names of the released files (the second is dropout)."""

    def __init__(self, before: int, hidden: int, after: int, activation: nn.Module, operations):
        super().__init__()
        self.activation = activation
        self.net = nn.ModuleList(
            (Projected(before, hidden, operations), nn.Identity(), operations.Linear(hidden, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.activation(self.net[0](x)))


class Embedded(nn.Module):
    """Two linear layers around SiLU."""

    def __init__(self, before: int, after: int, operations):
        super().__init__()
        self.linear_1, self.linear_2 = operations.Linear(before, after), operations.Linear(after, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class Conditions(nn.Module):
    """Time and size of an image, embedded."""

    def __init__(self, config: DiTConfig, operations):
        super().__init__()
        self.config = config
        self.timestep_embedder = Embedded(config.time_dim, config.time_dim, operations)
        self.condition_embedder = Embedded(4 * config.size_dim, config.time_dim, operations)

    def forward(self, time: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[B, time_dim] for times [B] and a size (height, width) in pixels."""
        times = sinusoids(time, self.config.time_dim).to(dtype)
        numbers = torch.tensor([[0, 0, *size]], device=time.device)  # the first two: where training images were cut
        sizes = sinusoids(numbers, self.config.size_dim).flatten(1).to(dtype)
        return F.silu(self.timestep_embedder(times) + self.condition_embedder(sizes))


class Modulation(nn.Module):
    """A linear layer of the conditions."""

    def __init__(self, config: DiTConfig, parts: int, operations):
        super().__init__()
        self.parts = parts
        self.linear = operations.Linear(config.time_dim, parts * config.dim)

    def forward(self, conditions: Tensor) -> list[Tensor]:
        """``parts`` tensors [B, 1, dim]."""
        return list(self.linear(conditions)[:, None].chunk(self.parts, dim=-1))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm of x [B, T, dim] without weights, then shift and scale [B, 1, dim]."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


class JointAttention(nn.Module):
    """Attention of all tokens to all; queries and keys get a LayerNorm per head, without weights."""

    def __init__(self, config: DiTConfig, operations):
        super().__init__()
        self.heads = config.heads
        self.to_q, self.to_k, self.to_v = (operations.Linear(config.dim, config.dim) for _ in range(3))
        self.to_out = nn.ModuleList((operations.Linear(config.dim, config.dim),))

    def forward(
        self, x: Tensor, text: int, rotation: Rotation, sources: Sequence[KeysValues], kept: SourceCache | None
    ) -> Tensor:
        """x [B, T, dim], of which the first ``text`` tokens are not rotated. They attend to ``sources`` [1, ...], too.
        kept: their keys and values are appended to it."""
        parts = (part(x) for part in (self.to_q, self.to_k, self.to_v))
        q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=self.heads) for part in parts)
        q, k = (F.layer_norm(each, each.shape[-1:], eps=EPS) for each in (q, k))
        q, k = (torch.cat((each[:, :, :text], rotation(each[:, :, text:])), dim=2) for each in (q, k))
        if kept is not None:
            kept.append((k, v))
        if sources:
            known = ([each.expand(len(x), -1, -1, -1) for each in part] for part in zip(*sources, strict=True))
            k, v = (torch.cat((*part, own), dim=2) for part, own in zip(known, (k, v), strict=True))
        return self.to_out[0](rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Block(nn.Module):
    def __init__(self, config: DiTConfig, operations):
        super().__init__()
        self.norm1 = Modulation(config, MODULATIONS, operations)
        self.attn1 = JointAttention(config, operations)
        self.ff = MLP(config.dim, 4 * config.dim, config.dim, nn.GELU(approximate="tanh"), operations)

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        conditions: Tensor,
        rotation: Rotation,
        sources: Sequence[KeysValues] = (),
        kept: SourceCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image and text tokens [B, T, dim] after the block. sources, kept: see JointAttention."""
        parts = self.norm1(conditions)
        (shift, scale, gate, ff_shift, ff_scale, ff_gate), of_text = parts[::2], parts[1::2]
        t_shift, t_scale, t_gate, t_ff_shift, t_ff_scale, t_ff_gate = of_text
        joined = torch.cat((modulate(text, t_shift, t_scale), modulate(x, shift, scale)), dim=1)
        attended = self.attn1(joined, text.shape[1], rotation, sources, kept)
        text = text + attended[:, : text.shape[1]] * t_gate
        x = x + attended[:, text.shape[1] :] * gate
        x = x + self.ff(modulate(x, ff_shift, ff_scale)) * ff_gate
        return x, text + self.ff(modulate(text, t_ff_shift, t_ff_scale)) * t_ff_gate


class DiT(nn.Module):
    """``operations`` supplies Linear and Embedding: ``torch.nn``, or ComfyUI's casting versions."""

    def __init__(self, config: DiTConfig, operations=nn):
        super().__init__()
        self.config = config
        patch = config.channels * config.patch**2
        self.image_projector = Projected(patch, config.dim, operations)
        self.glyph_projector = MLP(config.text_dim, config.dim, config.dim, nn.GELU(), operations)
        self.prior_token_embedding = operations.Embedding(config.codes, config.dim)
        self.prior_projector = MLP(config.dim, config.dim, config.dim, nn.SiLU(), operations)
        self.time_condition_embed = Conditions(config, operations)
        self.transformer_blocks = nn.ModuleList(Block(config, operations) for _ in range(config.layers))
        self.norm_out = Modulation(config, 2, operations)
        self.proj_out = operations.Linear(config.dim, patch)

    def read(self, latent: Tensor, codes: Tensor) -> SourceCache:
        """A source image: its clean latent [1, channels, H, W] and its codes [1, H / 4, W / 4], without text. The keys
        and values of its tokens are the same in every step, and do not depend on other sources."""
        kept: SourceCache = []
        text, clean = latent.new_zeros(1, 0, self.config.text_dim), latent.new_zeros(1)
        self(latent, text, codes, clean, kept=kept)
        return kept

    def forward(
        self,
        latent: Tensor,
        text: Tensor,
        codes: Tensor | None,
        time: Tensor,
        sources: Sequence[SourceCache] = (),
        kept: SourceCache | None = None,
    ) -> Tensor:
        """Velocity [B, channels, H, W] of a noisy latent of that shape, H and W even.

        text [B, n, text_dim]: features of the quoted text. codes [B, H / 4, W / 4] (int64); None: without an image in
        mind, the second branch of guidance. time [B]: 0 (clean) to 999 (noise), before the schedule is shifted.
        sources: of ``read``. kept: becomes one of them.
        """
        side = self.config.patch
        rows, cols = (length // side for length in latent.shape[-2:])
        x = self.image_projector(rearrange(latent, "b c (r y) (l x) -> b (r l) (c y x)", y=side, x=side))
        x = x + self.prior_projector(self._prior(codes, x))
        text = self.glyph_projector(text)
        size = PIXELS * rows * side, PIXELS * cols * side
        conditions = self.time_condition_embed(time, size, x.dtype)
        angles = grid_angles(
            torch.arange(rows * cols, device=x.device)[None], cols, self.config.dim // self.config.heads
        )
        rotation = Rotation(angles.cos(), angles.sin(), halves=True)
        for i, block in enumerate(self.transformer_blocks):
            x, text = block(x, text, conditions, rotation, [source[i] for source in sources], kept)
        scale, shift = self.norm_out(conditions)
        x = self.proj_out(modulate(x, shift, scale))
        return rearrange(x, "b (r l) (c y x) -> b c (r y) (l x)", r=rows, y=side, x=side)

    def activation_bytes(self, tokens: int, sources: Sequence[int] = ()) -> int:
        """Rough bytes of the activations of a forward pass over so many tokens of image and text: of a feed-forward
        network, its input, twice its four times wider middle, and what waits for it. sources: tokens of each source
        image, whose keys and values stay for all layers, and lie beside the image's in the one that computes."""
        numbers = 12 * max((tokens, *sources)) + 2 * (self.config.layers + 1) * sum(sources)
        return numbers * self.config.dim * self.proj_out.weight.dtype.itemsize

    def _prior(self, codes: Tensor | None, like: Tensor) -> Tensor:
        """Embeddings [B, T, dim] of codes [B, h, w], each for 2 x 2 tokens; zeros without codes."""
        if codes is None:
            return torch.zeros_like(like)
        return self.prior_token_embedding(finer(codes)).to(like.dtype)


def finer(codes: Tensor) -> Tensor:
    """Codes [B, 4 * h * w] (int64) of the transformer's tokens, row by row, for codes [B, h, w] of 32 pixels: each is
    repeated 2 x 2 times. diffusers' pipeline takes them in this form, as ``prior_token_ids``."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


def schedule(steps: int, tokens: int) -> Iterator[tuple[int, float, float]]:
    """(time, sigma, next sigma) of every step of an image of ``tokens`` tokens of the transformer.

    Whole times from 1000 down, evenly spaced; sigma is time / 1000, shifted towards noise the more the larger the image
    is. The transformer was trained on times before this shift, less one.
    """
    shift = 0.25 + 0.75 * sqrt(tokens / 256)
    times = [int(time) for time in torch.linspace(1000, 1, steps + 1, dtype=torch.float64)[:-1]]
    sigmas = [shift / (shift + 1000 / time - 1) for time in times]
    return zip([time - 1 for time in times], sigmas, [*sigmas[1:], 0.0], strict=True)


def denoise(
    dit: DiT,
    noise: Tensor,
    codes: Tensor,
    text: Tensor,
    null: Tensor,
    steps: int,
    cfg: float,
    callback: Callable[[int], None] = lambda step: None,
    sources: Sequence[SourceCache] = (),
) -> Tensor:
    """Latents [B, channels, H, W] (fp32) for noise of that shape, by Euler's method.

    codes, text, sources: see ``DiT``. null: text of the second branch of guidance, which gets no codes and no sources.
    callback: called after each step.
    """
    dtype, latent = dit.proj_out.weight.dtype, noise.float()
    for step, (time, sigma, following) in enumerate(schedule(steps, noise[0, 0].numel() // dit.config.patch**2)):
        times = torch.full((len(noise),), float(time), device=noise.device)
        velocity = dit(latent.to(dtype), text, codes, times, sources).float()
        if cfg != 1:
            unguided = dit(latent.to(dtype), null, None, times).float()
            velocity = unguided + cfg * (velocity - unguided)
        latent = latent + (following - sigma) * velocity
        callback(step)
    return latent
