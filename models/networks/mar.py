"""The masked autoregressive transformer of MAR (arXiv:2406.11838): an encoder over the known tokens, then a decoder.

Attention is bidirectional, so nothing can be cached: every forward pass reads all known tokens again. Parameter names
follow the published files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .prefix import check_class, check_width
from .vit import Block


@dataclass(frozen=True)
class MARConfig:
    """Sizes of a model; the defaults are MAR-B. ``slots`` prompt vectors precede the image.

    conditions: number of classes, or the width of caption features if ``captions`` is set.
    """

    dim: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 12
    heads: int = 12
    rows: int = 16
    cols: int = 16
    channels: int = 16
    slots: int = 64
    conditions: int = 1000
    captions: bool = False


class PositionTables(NamedTuple):
    """Learned positions: encoder and decoder [1, slots + S, D], condition vectors of the head [1, S, D]."""

    encoder: Tensor
    decoder: Tensor
    head: Tensor


class Encoded(NamedTuple):
    """Hidden states [R, slots + K, D] of the prompt and of K tokens at positions index [R, K]; valid [R, K] (bool)."""

    hidden: Tensor
    index: Tensor
    valid: Tensor


class MAR(nn.Module):
    """Prompt vectors and known tokens -> one vector z per position, for the diffusion head.

    A class fills every slot with its embedding. A caption of n words (features [n, F], our own extension for the
    bundled model) fills the first n, and the unconditional vector the rest.
    """

    def __init__(self, config: MARConfig, operations=nn):
        super().__init__()
        self.config = config
        dim, length = config.dim, config.rows * config.cols
        if config.captions:
            self.caption_proj = operations.Linear(config.conditions, dim, bias=False)
        elif config.conditions:
            self.class_emb = operations.Embedding(config.conditions, dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, dim))
        self.z_proj = operations.Linear(config.channels, dim)
        self.z_proj_ln = operations.LayerNorm(dim, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, config.slots + length, dim))
        self.encoder_blocks = nn.ModuleList(Block(dim, config.heads, operations) for _ in range(config.encoder_layers))
        self.encoder_norm = operations.LayerNorm(dim, eps=1e-6)
        self.decoder_embed = operations.Linear(dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, config.slots + length, dim))
        self.decoder_blocks = nn.ModuleList(Block(dim, config.heads, operations) for _ in range(config.decoder_layers))
        self.decoder_norm = operations.LayerNorm(dim, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, length, dim))

    def prompt(self, features: Tensor) -> Tensor:
        """Slot vectors [B, slots, D] of prompt features: caption words [B, n, F], or class numbers [B, 1, 1];
        n = 0 is no prompt at all.

        Raises ValueError for the features of another model's prompt.
        """
        if not features.shape[1]:
            return self.unconditional(len(features))
        if not self.config.captions:
            check_class(features, self.config.conditions)
            return self.class_emb(features[:, 0, 0].long())[:, None].expand(-1, self.config.slots, -1)
        check_width(features, self.config.conditions)
        words = self.caption_proj(features.to(self.fake_latent.dtype))[:, : self.config.slots]
        return torch.cat((words, self.unconditional(len(words))[:, words.shape[1] :]), dim=1)

    def unconditional(self, rows: int) -> Tensor:
        """Slot vectors [rows, slots, D] of no prompt at all."""
        return self.fake_latent[:, None].expand(rows, self.config.slots, -1)

    def positions(self, rows: int, cols: int) -> PositionTables:
        """The position tables for a grid; those of the image are resized bilinearly if it is not the model's own."""
        tables = self.encoder_pos_embed_learned, self.decoder_pos_embed_learned, self.diffusion_pos_embed_learned
        own = self.config.rows, self.config.cols
        if (rows, cols) == own:
            return PositionTables(*tables)

        def resize(table: Tensor) -> Tensor:
            slots, grid = table[:, : -own[0] * own[1]], table[:, -own[0] * own[1] :]
            grid = rearrange(grid, "b (r c) d -> b d r c", r=own[0])
            grid = F.interpolate(grid, (rows, cols), mode="bilinear", align_corners=False)
            return torch.cat((slots, rearrange(grid, "b d r c -> b (r c) d")), dim=1)

        return PositionTables(*map(resize, tables))

    def encode(self, prompt: Tensor, tokens: Tensor, known: Tensor, seen: int, positions: PositionTables) -> Encoded:
        """Read the prompt [R, slots, D] and the known tokens (known [R, S], bool; tokens [R, S, C]).

        ``seen``: an upper bound of the known tokens per row; rows with fewer are padded with hidden tokens.
        """
        index = (~known).to(torch.uint8).argsort(dim=1, stable=True)[:, :seen]  # known ones first, in raster order
        valid = known.gather(1, index)
        chosen = tokens.to(prompt.dtype).gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))
        slots = prompt.shape[1]
        places = positions.encoder.expand(len(tokens), -1, -1)
        place = places[:, slots:].gather(1, index[..., None].expand(-1, -1, places.shape[-1]))
        x = torch.cat((prompt + places[:, :slots], self.z_proj(chosen) + place), dim=1)
        x = self.z_proj_ln(x)
        keys = F.pad(valid, (slots, 0), value=True)
        for block in self.encoder_blocks:
            x = block(x, keys)
        return Encoded(self.encoder_norm(x), index, valid)

    def decode(self, encoded: Encoded, positions: PositionTables) -> Tensor:
        """z [R, S, D] for every position."""
        slots, length = self.config.slots, positions.head.shape[1]
        x = self.decoder_embed(encoded.hidden)
        grid = self.mask_token.to(x.dtype).expand(len(x), length + 1, -1)  # the last position is scratch, for padding
        place = torch.where(encoded.valid, encoded.index, length)[..., None].expand(-1, -1, x.shape[-1])
        grid = grid.scatter(1, place, x[:, slots:])[:, :length]
        x = torch.cat((x[:, :slots], grid), dim=1) + positions.decoder
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, slots:] + positions.head

    def forward(
        self, prompt: Tensor, tokens: Tensor, known: Tensor, seen: int, positions: PositionTables | None = None
    ) -> Tensor:
        """z [R, S, D] given slot vectors [R, slots, D] and tokens [R, S, C] where ``known`` [R, S] (bool)."""
        positions = positions or self.positions(self.config.rows, self.config.cols)
        return self.decode(self.encode(prompt, tokens, known, seen, positions), positions)
