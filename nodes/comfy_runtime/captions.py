"""Describing images with a loaded model, under ComfyUI's memory management."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...model_loaders.detect import load_reader
from ...models.image_reader import ImageReader
from ...samplers.contract import Method
from ...samplers.ending import generate_until, until
from ...samplers.generate import AnyRequest
from ...samplers.methods.next_token import NextToken
from .memory import Patcher, load_models_gpu
from .models import LoadedModel, patcher_of
from .progress import Report, notify, show_text
from .runs import bring_the_rest, place
from .vae import image_tokens

TOGETHER, TOKENS = 4, 2048  # most images that are described in one run, and most tokens of their answers
SHOWN = 300  # characters at the end of an answer that the node shows while it is written


@dataclass(frozen=True, repr=False)  # ComfyUI quotes the inputs of a node that failed
class LoadedReader:
    """What of a model reads images, under ComfyUI's memory management."""

    reader: ImageReader
    patcher: Patcher

    def look(self, images: Tensor, question: str) -> Any:
        """The prompt about images (see ``ImageReader.prompt``); the weights are on the compute device for it."""
        reading = self.reader.reading
        load_models_gpu([self.patcher], memory_required=reading.activation_bytes(len(images)))
        bring_the_rest(reading, reading.device)
        return self.reader.prompt(images, question)


# As long as a model is loaded: its weights for reading images are read when the first image is.
_readers: WeakKeyDictionary[torch.nn.Module, LoadedReader] = WeakKeyDictionary()


def reader_of(loaded: LoadedModel) -> LoadedReader:
    """What of a model's files reads images. Raises ValueError for a model that does not."""
    if loaded.model not in _readers:
        reader = loaded.more(load_reader)
        _readers[loaded.model] = LoadedReader(reader, patcher_of(reader.reading, loaded.model))
    return _readers[loaded.model]


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
    held, texts, together = reader_of(loaded), [], max(1, min(TOGETHER, TOKENS // most))
    for first in range(0, len(images), together):

        @contextmanager
        def reserve(method: Method, request: AnyRequest, first: int = first) -> Iterator[Report]:
            with place(loaded, held, method, request):
                report = Report(request.length, None, Writing(held.reader, first, len(images)).show)
                yield report
                report.finish()

        prompt = held.look(
            images_to_read(loaded, held.reader, images[first : first + together, ..., :3], vae), question
        )
        request = held.reader.request(prompt, most, temperature, seed + first)
        notify(request.notices)
        texts += map(held.reader.text, generate_until(NextToken(), request, held.reader.end, reserve))
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
