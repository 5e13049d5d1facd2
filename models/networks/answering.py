"""What language models that generate images answer in words with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...device.placed import Placed


class Answering(Placed):
    """The head of a language model's words [words, width], of which generating images needs only a few rows.

    ``words``, the embedding of the same words, is the language model's own, set after loading.
    """

    words: nn.Module

    def __init__(self, width: int, words: int, operations=nn):
        super().__init__()
        self.head = operations.Linear(width, words, bias=False)

    def activation_bytes(self, images: int) -> int:
        """Rough bytes of the activations while so many images are read together: none beside their embeddings."""
        return 0


class WordsAndCodes(nn.Module):
    """Embedding of a vocabulary in which image codes follow the words: ids [...] (int64) -> [..., width].

    codes: another module's embedding, whose first rows are theirs. It stays that module's, with its device and dtype.
    """

    def __init__(self, words: nn.Embedding, codes: nn.Module):
        super().__init__()
        self.words = words
        self.__dict__["codes"] = codes

    def forward(self, ids: Tensor) -> Tensor:
        beyond = ids - self.words.num_embeddings
        words = self.words(ids.masked_fill(beyond >= 0, 0))
        return torch.where((beyond >= 0)[..., None], self.codes(beyond.clamp(min=0)), words)
