"""Qwen2.5's trunk (arXiv:2412.15115) of transformers, as the language model of models/networks/harmon.py."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ...models.networks.harmon import KeysAndValues

HEADS = {896: 14, 1536: 12}  # width -> heads of the 0.5B and the 1.5B model


class Qwen2(nn.Module):
    """Built from sizes, with the values that all Qwen2.5 models share; its weights are ``model.*``."""

    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int):
        super().__init__()
        from transformers import Qwen2Config, Qwen2Model

        self.width, self.hidden, self.vocab = width, hidden, vocab
        self.model = Qwen2Model(
            Qwen2Config(
                vocab_size=vocab,
                hidden_size=width,
                intermediate_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                rope_theta=1e6,
                rms_norm_eps=1e-6,
            )
        )
        with torch.device("cpu"):  # its frequencies are not in the file, so they must not be on the meta device
            self.model.rotary_emb = type(self.model.rotary_emb)(self.model.config)

    def embed(self, ids: Tensor) -> Tensor:
        """See LanguageModel."""
        return self.model.embed_tokens(ids)

    def read(self, x: Tensor, mask: Tensor, places: Tensor, before: KeysAndValues = ()) -> tuple[Tensor, KeysAndValues]:
        """See LanguageModel; only the first tokens' keys and values are returned, later ones are discarded."""
        cache = _cache_type()(before)
        out = self.model(
            inputs_embeds=x, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state, tuple(cache.own)


@functools.cache
def _cache_type() -> type:
    """A subclass of a transformers class, which is imported on first use."""
    from transformers import DynamicCache

    class Behind(DynamicCache):
        """Appends the keys and values of every layer to those in ``before``; stores them only if there are none."""

        def __init__(self, before: KeysAndValues):
            super().__init__()
            self.before, self.own = before, []

        def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
            if not self.before:
                self.own.append((key, value))
                return key, value
            repeats = len(key) // len(self.before[layer][0])  # spread over the rows of one layer at a time
            before = (part.repeat_interleave(repeats, dim=0) for part in self.before[layer])
            return tuple(torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))

        def get_seq_length(self, *args, **kwargs) -> int:
            return self.before[0][0].shape[2] if self.before else 0

    return Behind
