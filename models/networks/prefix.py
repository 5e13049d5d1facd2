"""Prefixes of the image tokens: caption features or a class (LlamaGen), or the tokens of a language model.

Parameter names are LlamaGen's (``cls_embedding.*``). ``unconditional`` is the prompt of the second guidance branch if
the user wrote none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CaptionProjection(nn.Module):
    def __init__(self, caption_dim: int, dim: int, operations):
        super().__init__()
        self.fc1 = operations.Linear(caption_dim, dim, bias=False)
        self.fc2 = operations.Linear(dim, dim, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


class CaptionPrefix(nn.Module):
    """Caption features [B, n, caption_dim] -> prefix embeddings [B, n, dim].

    LlamaGen pads captions on the left to ``slots`` and zeroes the padding, which then contributes nothing. Only the n
    valid slots are kept, and an unconditional prefix of n slots uses the last n learned rows.
    """

    def __init__(self, caption_dim: int, slots: int, dim: int, operations=nn):
        super().__init__()
        self.slots = slots
        self.cap_proj = CaptionProjection(caption_dim, dim, operations)
        self.register_buffer("uncond_embedding", torch.zeros(slots, caption_dim))

    @property
    def reads(self) -> str:
        """What stands for a prompt, in words."""
        return f"captions of {self.slots} x {self.uncond_embedding.shape[1]} numbers"

    def forward(self, features: Tensor) -> Tensor:
        """Raises ValueError for the features of another text encoder."""
        check_width(features, self.uncond_embedding.shape[1])
        return self.cap_proj(features.to(self.uncond_embedding.dtype))

    def null_features(self) -> Tensor:
        """The learned null caption [1, slots, caption_dim]."""
        return self.uncond_embedding[None]

    def unconditional(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Prefix embeddings [1, n, dim] of the learned null caption; n as in ``features`` [B, n, caption_dim]."""
        return self.cap_proj(self.uncond_embedding[None, -features.shape[1] :].to(features.device))


def check_width(features: Tensor, width: int) -> None:
    """Raise ValueError unless caption features [B, n, F] have F = ``width`` numbers per token."""
    if features.ndim != 3 or features.shape[2] != width:
        raise ValueError(
            f"The prompt has the shape {list(features.shape)}, but this model reads {width} numbers a word: it was "
            "encoded with another model's CLIP. Connect the CLIP of this model's own loader to CLIP Text Encode."
        )


def check_class(number: Tensor, classes: int) -> None:
    """Raise ValueError unless all numbers are integers from 0 to ``classes``, the null class.

    An index out of range would raise an asynchronous error on a GPU, which ends the process.
    """
    if not ((number >= 0) & (number <= classes) & (number == number.floor())).all():
        raise ValueError(
            f"The prompt holds the class {number.flatten()[0].item():g}, but this model has the classes 0 to "
            f"{classes - 1}: it was encoded with another model's CLIP. Connect the CLIP of this model's own loader."
        )


class ClassPrefix(nn.Module):
    """Class numbers [B, 1, 1] -> prefix embeddings [B, 1, dim]; the last row of the table is the null class."""

    def __init__(self, classes: int, dim: int, operations=nn):
        super().__init__()
        self.classes = classes
        self.embedding_table = operations.Embedding(classes + 1, dim)

    @property
    def reads(self) -> str:
        """What stands for a prompt, in words."""
        return f"one of {self.classes} classes"

    def forward(self, features: Tensor) -> Tensor:
        """Raises ValueError unless ``features`` are class numbers."""
        check_class(features[..., 0], self.classes)
        return self.embedding_table(features[..., 0].long())

    def null_features(self) -> Tensor:
        """The null class [1, 1, 1] (fp32)."""
        return torch.tensor([[[float(self.classes)]]])

    def unconditional(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Prefix embeddings [1, n, dim] of the null class; n as in ``features`` [B, n, 1]."""
        return self.embedding_table(torch.full((1, features.shape[1]), self.classes, device=features.device))


class TextPrefix(nn.Module):
    """Token ids of a language model [B, n, 1] -> prefix embeddings [B, n, dim].

    null: (features [B, n, 1] of a prompt, grid (rows, cols)) -> features of the unconditional prompt that the model was
    trained with. The ids from ``words`` on, if there are any, are image codes (see ``read_images``).
    """

    def __init__(self, words: int, dim: int, null: Callable[[Tensor, tuple[int, int]], Tensor], operations=nn):
        super().__init__()
        self.words, self.null = words, null
        self.embedding = operations.Embedding(words, dim)
        self.codes = 0

    def read_images(self, embedding: nn.Module, codes: int) -> None:
        """Let prompts hold image codes, too: the ids ``words`` to ``words + codes - 1``, whose vectors are the first of
        a backbone's ``embedding``. That stays the backbone's, with its device and dtype."""
        self.__dict__["images"], self.codes = embedding, codes

    @property
    def reads(self) -> str:
        """What stands for a prompt, in words."""
        return f"a language model's {self.words} words"

    def offload(self) -> None:
        """Keep the embedding table out of the modules that are moved to a device: only prompts need it."""
        self.__dict__["embedding"] = self._modules.pop("embedding")

    def forward(self, features: Tensor) -> Tensor:
        """Raises ValueError unless ``features`` are token ids."""
        ids = features[..., 0].long()
        count = self.words + self.codes
        if not ids.numel() or not 0 <= ids.min() <= ids.max() < count or not torch.equal(ids, features[..., 0]):
            raise ValueError(
                f"The prompt is not a list of ids of this model's {count} words: {ids.flatten()[:4].tolist()} ... "
                f"{'Other ids' if self.codes else 'Image tokens'} cannot be part of it."
            )
        images = ids >= self.words
        words = ids.masked_fill(images, 0).to(self.embedding.weight.device)  # the table may stay elsewhere
        found = self.embedding(words).to(ids.device)
        if not images.any():
            return found
        return torch.where(images[..., None], self.images((ids - self.words).clamp(min=0)), found)

    def unconditional(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Prefix embeddings [B, m, dim] of the null prompt for the prompt ``features`` [B, n, 1]."""
        return self(self.null(features, grid).to(features.device))


class GivenPrefix(nn.Module):
    """Embeddings of a language model [B, n, dim], as they are: of words, and of an image that it reads."""

    reads = "embeddings"

    def forward(self, features: Tensor) -> Tensor:
        return features
