"""Harmon (arXiv:2503.21979): MAR with a language model, which has read the prompt, after its encoder.

Attention between image tokens is bidirectional in MAR, so only the prompt's keys and values are cached: every forward
pass reads all known tokens again. Parameter names follow the published files, except the diffusion head's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mar import MAR, Encoded, MARConfig, PositionTables

KeysAndValues = tuple[tuple[Tensor, Tensor], ...]  # of every layer, each [R, heads, n, d]


class LanguageModel(Protocol):
    """A module; ``width`` is that of its hidden states."""

    width: int

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [R, n, width] of token ids [R, n]."""
        ...

    def read(self, x: Tensor, mask: Tensor, places: Tensor, before: KeysAndValues = ()) -> tuple[Tensor, KeysAndValues]:
        """Hidden states [R, n, width] of embeddings x at places [R, n] after T earlier ones, and their keys and values.

        mask [R, 1, n, T + n] is added to the attention scores. ``before`` may have R / k rows, each shared by k rows.
        """
        ...


class Prompt(NamedTuple):
    """The language model's cache of R prompts of n tokens; valid [R, n] (bool): not padding."""

    layers: KeysAndValues
    valid: Tensor


class Harmon(nn.Module):
    """Prompts and known tokens -> one vector z per position: MAR's interface, except for the prompt.

    ``operations`` makes the layers of MAR and of the projections.
    """

    def __init__(self, config: MARConfig, llm: LanguageModel, operations=nn):
        super().__init__()
        self.config = config
        self.mar = MAR(config, operations)
        self.llm = llm
        self.proj_in = _projection(config.dim, llm.width, llm.width, operations)
        self.proj_out = _projection(llm.width, llm.width, config.dim, operations)

    def prompt(self, ids: Tensor, valid: Tensor) -> Prompt:
        """Read prompts, ids [R, n] (int64), padded at the end where not valid [R, n] (bool)."""
        x = self.llm.embed(ids)
        return Prompt(self.llm.read(x, *_attention(valid[:, :0], valid, x.dtype))[1], valid)

    def positions(self, rows: int, cols: int) -> PositionTables:
        """The position tables for a grid."""
        return self.mar.positions(rows, cols)

    def encode(self, prompt: Prompt, tokens: Tensor, known: Tensor, seen: int, positions: PositionTables) -> Encoded:
        """Read the known tokens (known [R, S], bool; tokens [R, S, C]) after R prompts, or after R / k prompts shared
        by k consecutive rows each. ``seen``: an upper bound of the known tokens per row.
        """
        slots = self.config.slots
        encoded = self.mar.encode(self.mar.unconditional(len(tokens)), tokens, known, seen, positions)
        # In the language model the tokens come first and the slots, which summarise them, last. Padding is between
        # them: it is hidden and takes no position.
        x = self.proj_in(encoded.hidden).roll(-slots, dims=1)
        before = prompt.valid.repeat_interleave(len(tokens) // len(prompt.valid), dim=0)
        mask, places = _attention(before, F.pad(encoded.valid, (0, slots), value=True), x.dtype)
        read, _ = self.llm.read(x, mask, places, prompt.layers)
        return encoded._replace(hidden=encoded.hidden + self.proj_out(read.roll(slots, dims=1)))

    def decode(self, encoded: Encoded, positions: PositionTables) -> Tensor:
        """z [R, S, D] for every position."""
        return self.mar.decode(encoded, positions)

    def forward(
        self, prompt: Prompt, tokens: Tensor, known: Tensor, seen: int, positions: PositionTables | None = None
    ) -> Tensor:
        """z [R, S, D] after prompts, given tokens [R, S, C] where ``known`` [R, S] (bool)."""
        positions = positions or self.positions(self.config.rows, self.config.cols)
        return self.decode(self.encode(prompt, tokens, known, seen, positions), positions)


def _projection(inner: int, hidden: int, outer: int, operations) -> nn.Sequential:
    return nn.Sequential(operations.Linear(inner, hidden), nn.SiLU(), operations.Linear(hidden, outer))


def _attention(before: Tensor, valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Additive causal mask [R, 1, n, T + n] and places [R, n] of n tokens after T others.

    Tokens that are not valid (before [R, T], valid [R, n], bool) are hidden and take no position.
    """
    length, keys = valid.shape[1], torch.cat((before, valid), dim=1)
    causal = torch.ones((length, keys.shape[1]), dtype=torch.bool, device=keys.device).tril(before.shape[1])
    hidden = ~(keys[:, None, None] & causal)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, torch.finfo(dtype).min)
    return mask, (keys.cumsum(1) - 1)[:, -length:].clamp(min=0)
