"""Harmon (arXiv:2503.21979): MAR whose encoder output passes through a language model that has read the prompt.

The language model is Qwen2.5's trunk, through transformers. Attention between the picture's tokens is bidirectional in
MAR, so only the prompt's keys and values can be kept: every pass reads all known tokens again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mar import MAR, Encoded, MARConfig, Positions


@dataclass(frozen=True)
class LanguageConfig:
    """Sizes of the Qwen2.5 trunk; the defaults are those of the 0.5B model."""

    dim: int = 896
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    hidden: int = 4864
    vocab: int = 151936


class Prompt(NamedTuple):
    """Keys and values [R, kv_heads, n, d] of R prompts in every layer; valid [R, n] (bool): not padding."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    valid: Tensor


class Harmon(nn.Module):
    """Prompts and known tokens -> one vector z per position. Has MAR's interface, but its prompt is a :class:`Prompt`.

    ``operations`` makes the layers of MAR and of the projections; the language model's are transformers' own.
    """

    def __init__(self, config: MARConfig, language: LanguageConfig, operations=nn):
        super().__init__()
        self.config = config
        self.mar = MAR(config, operations)
        self.llm = language_model(language)
        self.proj_in = _projection(config.dim, language.dim, language.dim, operations)
        self.proj_out = _projection(language.dim, language.dim, config.dim, operations)

    def prompt(self, ids: Tensor, valid: Tensor) -> Prompt:
        """Read prompts, ids [R, n] (int64), padded behind their end where not valid [R, n] (bool)."""
        cache = _prompt_cache()()
        self._read(self.llm.embed_tokens(ids), valid, cache, valid[:, :0])
        return Prompt(tuple(cache.kept), valid)

    def positions(self, rows: int, cols: int) -> Positions:
        """The position tables for a grid."""
        return self.mar.positions(rows, cols)

    def encode(self, prompt: Prompt, tokens: Tensor, known: Tensor, seen: int, positions: Positions) -> Encoded:
        """Read the known ones (known [R, S], bool) of tokens [R, S, C] behind R prompts, or behind R / k prompts of k
        consecutive rows each. ``seen``: at least as many as any row knows.
        """
        slots = self.config.slots
        encoded = self.mar.encode(self.mar.unconditional(len(tokens)), tokens, known, seen, positions)
        # In the language model the tokens come first and the slots, which sum up what is known, last. Padding stands
        # between them: it is seen by nobody and takes no position.
        x = self.proj_in(encoded.hidden).roll(-slots, dims=1)
        repeats = len(tokens) // len(prompt.valid)
        before = prompt.valid.repeat_interleave(repeats, dim=0)
        read = self._read(x, F.pad(encoded.valid, (0, slots), value=True), _prompt_cache()(prompt.layers), before)
        return encoded._replace(hidden=encoded.hidden + self.proj_out(read.roll(slots, dims=1)))

    def decode(self, encoded: Encoded, positions: Positions) -> Tensor:
        """z [R, S, D] for every position."""
        return self.mar.decode(encoded, positions)

    def forward(
        self, prompt: Prompt, tokens: Tensor, known: Tensor, seen: int, positions: Positions | None = None
    ) -> Tensor:
        """z [R, S, D] behind prompts, under tokens [R, S, C] of which ``known`` [R, S] (bool) count."""
        positions = positions or self.positions(self.config.rows, self.config.cols)
        return self.decode(self.encode(prompt, tokens, known, seen, positions), positions)

    def _read(self, x: Tensor, valid: Tensor, cache, before: Tensor) -> Tensor:
        """Hidden states [R, n, D] of x [R, n, D] behind cached keys; valid [R, n] and before [R, T] mark both (bool)."""
        keys, length = torch.cat((before, valid), dim=1), x.shape[1]
        causal = torch.ones((length, keys.shape[1]), dtype=torch.bool, device=x.device).tril(before.shape[1])
        hidden_keys = ~(keys[:, None, None] & causal)
        mask = torch.zeros(hidden_keys.shape, dtype=x.dtype, device=x.device)
        mask.masked_fill_(hidden_keys, torch.finfo(x.dtype).min)
        places = (keys.cumsum(1) - 1).clamp(min=0)[:, -length:]
        out = self.llm(inputs_embeds=x, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        return out.last_hidden_state


def language_model(config: LanguageConfig) -> nn.Module:
    """Qwen2.5's trunk without its head (Qwen2Model), untrained."""
    from transformers import Qwen2Config, Qwen2Model

    model = Qwen2Model(Qwen2Config(
        vocab_size=config.vocab, hidden_size=config.dim, intermediate_size=config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        rope_theta=1e6, rms_norm_eps=1e-6,
    ))  # fmt: skip
    with torch.device("cpu"):  # its table of frequencies is in no file, so it must be real even in a model on meta
        model.rotary_emb = type(model.rotary_emb)(model.config)
    return model


def _projection(inner: int, hidden: int, outer: int, operations) -> nn.Sequential:
    return nn.Sequential(operations.Linear(inner, hidden), nn.SiLU(), operations.Linear(hidden, outer))


@functools.cache
def _prompt_cache() -> type:
    """The class of cache that we hand to transformers, which is imported when first needed."""
    from transformers import DynamicCache

    class PromptCache(DynamicCache):
        """Keeps the keys and values of the first thing it sees; everything later is put behind them and forgotten."""

        def __init__(self, layers: tuple[tuple[Tensor, Tensor], ...] = ()):
            super().__init__()
            self.kept, self.filled = list(layers), bool(layers)

        def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
            if not self.filled:
                self.kept.append((key, value))
                return key, value
            repeats = len(key) // len(self.kept[layer][0])  # only the layer at work is ever spread over the variants
            before = (part.repeat_interleave(repeats, dim=0) for part in self.kept[layer])
            return tuple(torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))

        def get_seq_length(self, *args, **kwargs) -> int:
            return self.kept[0][0].shape[2] if self.filled else 0

    return PromptCache
