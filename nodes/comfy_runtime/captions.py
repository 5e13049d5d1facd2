"""Describing images with a loaded model, under ComfyUI's memory management."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.detect import load_reader
from ...models.image_reader import ImageReader
from ...models.text.prompts import EncodedPrompt
from ...samplers.contract import Method
from ...samplers.ending import generate_until, until
from ...samplers.generate import AnyRequest
from ...samplers.methods.next_token import NextToken
from .memory import load_models_gpu
from .models import LoadedModel, LoadedPart
from .progress import Report, notify, show_text
from .runs import bring_the_rest, place
from .vae import image_tokens

TOGETHER, TOKENS = 4, 2048  # most images that are described in one run, and most tokens of their answers
SHOWN = 300  # characters at the end of an answer that the node shows while it is written


def look(held: LoadedPart[ImageReader], images: Tensor, question: str) -> EncodedPrompt:
    """The prompt about images (see ``ImageReader.prompt``); the weights are on the compute device for it."""
    reading = held.content.reading
    load_models_gpu([held.patcher], memory_required=reading.activation_bytes(len(images)))
    bring_the_rest(reading, reading.device)
    return held.content.prompt(images, question)


class Writing:
    """The last words of the first answer, for its node. before: texts that are finished, of ``total``."""

    def __init__(self, reader: ImageReader, before: int, total: int):
        self.reader, self.before, self.total = reader, before, total

    def show(self, progress: Any) -> None:
        """Show it on the node that is executing."""
        ids = progress.tokens[:1, : int(progress.committed[0])].cpu()
        place = f"{self.before + 1} of {self.total}\n" if self.total > 1 else ""
        show_text(f"{place}{self.reader.text(until(ids, self.reader.end)[0])[-SHOWN:]}")


def answer(
    loaded: LoadedModel, images: Tensor, question: str, most: int, temperature: float, seed: int, vae: Any = None
) -> list[str]:
    """An answer to the question about each of the images [B, H, W, 3] (0..1), of at most so many tokens.

    Image i gets seed + i. vae: makes tokens of images for a model that reads these. Raises ValueError for a model that
    does not read images, without its VAE if it needs that, and for a question that is too long.
    """
    held = loaded.part(load_reader, lambda reader: reader.reading)
    reader, texts, together = held.content, [], max(1, min(TOGETHER, TOKENS // most))
    for first in range(0, len(images), together):

        @contextmanager
        def reserve(method: Method, request: AnyRequest, first: int = first) -> Iterator[Report]:
            with place(loaded, held, method, request):
                report = Report(request.length, None, Writing(reader, first, len(images)).show)
                yield report
                report.finish()

        seen = images_to_read(loaded, reader, images[first : first + together, ..., :3], vae)
        request = reader.request(look(held, seen, question), most, temperature, seed + first)
        notify(request.notices)
        texts += map(reader.text, generate_until(NextToken(), request, reader.end, reserve))
    return texts


def images_to_read(loaded: LoadedModel, reader: ImageReader, images: Tensor, vae: Any) -> Tensor:
    """Images [B, H, W, 3] (0..1) as the reader takes them. Raises ValueError as ``answer`` does."""
    model = loaded.model
    pixels = torch.stack([reader.scale(image, model.pixels_per_token) for image in images])
    if not reader.tokens:
        return pixels
    if vae is None:
        raise ValueError(
            f"{loaded.name} reads images as tokens, which its VAE makes, but vae is not connected. Connect the VAE of "
            "Load AR Checkpoint."
        )
    return image_tokens(vae, pixels, model.vocab)
