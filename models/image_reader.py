"""Models that also read images: an image and a question in, text out.

The language model that generates image tokens answers in words, so it is a model of token ids again: the same blocks
with the embedding and the head of its words. Every sampling method for token ids runs on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..samplers.contract import Callback, Request, SamplingParams
from ..samplers.layout import TokenLayout
from .discrete_model import DiscreteModel
from .networks.answering import Answering, WordsAndCodes
from .networks.prefix import GivenPrefix, TextPrefix
from .networks.siglip import Reading
from .pictures import resize
from .text.prompts import EncodedPrompt, checked_text
from .text.tokenizer import Tokenizer

GREY = 127  # of 255, beside an image that is not square: int(255 * mean) of the official processors
SHORTEST = 14  # pixels of an image's shorter side


class ImageReader(ABC):
    """Answers questions about images with a loaded model. ``reading``: the weights that only this needs.

    end: the token that ends an answer. defaults: the authors' settings for sampling words. ``tokens``: does it read
    images as tokens of the model's image decoder, or as pixels. The reader shares the model's blocks and sessions, not
    the model.
    """

    tokens = False

    def __init__(
        self,
        model: DiscreteModel,
        reading: Answering,
        tokenizer: Tokenizer,
        end: str,
        defaults: SamplingParams = SamplingParams(),
    ):
        self.reading, self.tokenizer, self._end = reading, tokenizer, end
        vocab = reading.head.out_features
        self.speaker = DiscreteModel(
            model.backbone.speaking(reading.words, reading.head, vocab),
            GivenPrefix(),
            f"{model.family}, text",
            (1, 1),
            defaults,
            model.prompt_encoder,
            positions=model.positions,
            longest=model.longest,
            guidance=False,
        )
        self.speaker.dtype, self.speaker.int8_cache = model.dtype, model.int8_cache
        self.speaker.sessions = model.sessions  # which are dropped with the weights that they refer to

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return self.tokenizer.id(self._end)

    @abstractmethod
    def scale(self, image: Tensor, patch: int) -> Tensor:
        """An image [H, W, 3] (0..1) as its tokens are made, of ``patch`` pixels a side, or as ``prompt`` takes it.

        Raises ValueError for a shape that the model does not read.
        """

    @abstractmethod
    def prompt(self, images: Tensor, question: str) -> EncodedPrompt:
        """The conversation about each of the images, tokens [B, h, w] (int64) or pixels [B, 3, side, side] in -1..1, as
        embeddings [B, n, width].

        Raises ValueError for a question that is too long, FileNotFoundError or CheckpointError without a tokenizer.
        """

    def request(
        self,
        prompt: EncodedPrompt,
        most: int,
        temperature: float = 0.0,
        seed: int = 0,
        callback: Callback | None = None,
    ) -> Request:
        """The request for the answers to ``prompt``, of ``most`` tokens each; image i with seed + i.

        A run does not end at the end of an answer by itself: see samplers/ending.py. Raises ValueError for more tokens
        than the model reads.
        """
        batch, count = prompt.features.shape[:2]
        longest = self.speaker.longest
        if longest is not None and count + most > longest:
            raise ValueError(
                f"Image and question have {count} tokens and the answer may have {most}, but the model reads at most "
                f"{longest}. Allow fewer tokens, shorten the question, or scale the image down."
            )
        self.speaker.device = self.reading.device
        options: dict[str, Any] = {"seed": seed, "batch": batch, "callback": callback, "temperature": temperature}
        return self.speaker.request(prompt, layout=TokenLayout.plain(1, most), **options)

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer's ids, without special tokens and the spaces around it."""
        return self.tokenizer.text(ids).strip()


class PatchReader(ImageReader):
    """Reads images as the features of their patches.

    write: (question, number of a picture's patches) -> ids of the conversation, and where the picture's begin.
    """

    reading: Reading

    def __init__(
        self,
        model: DiscreteModel,
        reading: Reading,
        tokenizer: Tokenizer,
        write: Callable[[str, int], tuple[Sequence[int], int]],
        end: str,
    ):
        assert isinstance(model.prefix, TextPrefix), "only language models answer"
        reading.words = model.prefix.embedding  # a module of both, wherever either of them was moved
        super().__init__(model, reading, tokenizer, end)
        self._write = write

    @property
    def side(self) -> int:
        """Pixels a side of the squares that it reads."""
        config = self.reading.config
        return config.patch * int(config.patches**0.5)

    def scale(self, image: Tensor, patch: int) -> Tensor:
        return square(image, self.side)

    def prompt(self, images: Tensor, question: str) -> EncodedPrompt:
        asked = checked_text(question, "question")
        ids, place = self._write(asked, self.reading.config.patches)
        with torch.inference_mode():
            seen = self.reading(images)
            words = self.reading.words(torch.tensor(ids, device=seen.device)).to(seen)
            before, after = words[:place], words[place + seen.shape[1] :]
            parts = [before.expand(len(seen), -1, -1), seen, after.expand(len(seen), -1, -1)]
        return EncodedPrompt(torch.cat(parts, dim=1), asked or None)


class TokenReader(ImageReader):
    """Reads images as tokens, whose ids are of the same vocabulary as the words'.

    scale: (image [H, W, 3] in 0..1, pixels per token) -> the image in the size in which it is encoded. write:
    (question, tokens [h, w] (int64)) -> ids of the conversation.
    """

    tokens = True

    def __init__(
        self,
        model: DiscreteModel,
        reading: Answering,
        tokenizer: Tokenizer,
        scale: Callable[[Tensor, int], Tensor],
        write: Callable[[str, Tensor], Sequence[int]],
        end: str,
        defaults: SamplingParams = SamplingParams(),
    ):
        assert isinstance(model.prefix, TextPrefix), "only language models answer"
        words = model.prefix.embedding
        codes_follow = reading.head.out_features > words.num_embeddings
        reading.words = WordsAndCodes(words, model.backbone.tok_embeddings) if codes_follow else words
        super().__init__(model, reading, tokenizer, end, defaults)
        self._scale, self._write = scale, write

    def scale(self, image: Tensor, patch: int) -> Tensor:
        return self._scale(image, patch)

    @torch.inference_mode()
    def prompt(self, images: Tensor, question: str) -> EncodedPrompt:
        asked = checked_text(question, "question")
        ids = torch.tensor([self._write(asked, image) for image in images], device=self.reading.device)
        return EncodedPrompt(self.reading.words(ids), asked or None)


def square(image: Tensor, side: int) -> Tensor:
    """An image [H, W, 3] (0..1) as the official processor hands it to the tower: [3, side, side] (fp32, -1..1).

    Its longer side becomes ``side`` (Pillow's bicubic filter, 8 bits), and grey fills the square. Source:
    VLMImageProcessor of https://github.com/deepseek-ai/Janus, with the settings of Janus-Pro's files.
    """
    longest = max(image.shape[:2])
    height, width = (max(int(length / longest * side), SHORTEST) for length in image.shape[:2])
    edge = max(height, width)
    top, left = (edge - height) // 2, (edge - width) // 2
    canvas = torch.full((edge, edge, 3), GREY / 255)
    canvas[top : top + height, left : left + width] = resize(image, height, width)
    return (canvas * 2 - 1).movedim(-1, 0).contiguous()
