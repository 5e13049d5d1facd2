"""Training data of a drafter: token grids, and the target's hidden states for them."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...models.discrete_model import DiscreteModel
from ...models.image_decoder import ImageDecoder
from ...models.text.prompt_encoders import WordEncoder
from ...samplers.contract import Request
from ...samplers.methods.next_token import NextToken
from .autoregressive import Batches
from .captions import Captions
from .data import load_images
from .settings import SETTINGS

log = logging.getLogger(__name__)

IMAGES = (".png", ".jpg", ".jpeg", ".webp")


class Example(NamedTuple):
    """Features [n, F] of a prompt, and the tokens [S] (int64) of its image."""

    features: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Batch:
    """features [B, n, F], tokens [B, S], hidden: the target's states [B, n_b + S - 1, D] (fp32) in the conditional and
    in the unconditional branch, whose prompts have n_b slots: those of the prompt, then of all tokens except the last.
    """

    features: Tensor
    tokens: Tensor
    hidden: tuple[Tensor, ...]

    def prompts(self) -> list[int]:
        """Slots of each branch's prompt."""
        return [hidden.shape[1] - self.tokens.shape[1] + 1 for hidden in self.hidden]

    def states(self, first: int) -> Tensor:
        """Hidden states [2B, S - first, D] that predict the tokens ``first`` .. S - 1, conditional rows first."""
        return torch.cat([h[:, n - 1 + first :] for h, n in zip(self.hidden, self.prompts(), strict=True)])

    def to(self, device: torch.device) -> Batch:
        return Batch(self.features.to(device), self.tokens.to(device), tuple(h.to(device) for h in self.hidden))


class Pool:
    """Examples by prompt length, with the target's hidden states in fp16 (in memory)."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.weights = [float(len(batch.tokens)) for batch in batches]

    @classmethod
    def build(cls, model: DiscreteModel, examples: Iterable[Example], rows: int = 16) -> Pool:
        """Run the target on every example, with and without its prompt."""
        by_length: dict[int, list[Example]] = defaultdict(list)
        for example in examples:
            by_length[len(example.features)].append(example)
        batches = []
        for group in by_length.values():
            features, tokens = (torch.stack(part) for part in zip(*group, strict=True))
            parts = [hidden_states(model, *part) for part in zip(features.split(rows), tokens.split(rows), strict=True)]
            hidden = tuple(torch.cat(branch).half() for branch in zip(*parts, strict=True))
            batches.append(Batch(features, tokens, hidden))
        return cls(batches)

    def sample(self, count: int, choice: random.Random) -> Batch:
        """``count`` random examples (fewer if a group has fewer) with prompts of the same length."""
        group = choice.choices(self.batches, self.weights)[0]
        return self._take(group, choice.sample(range(len(group.tokens)), min(count, len(group.tokens))))

    def all(self, count: int) -> Iterable[Batch]:
        """Every example once, up to ``count`` at a time."""
        for group in self.batches:
            for index in torch.arange(len(group.tokens)).split(count):
                yield self._take(group, index.tolist())

    @staticmethod
    def _take(group: Batch, index: list[int]) -> Batch:
        return Batch(group.features[index], group.tokens[index], tuple(h[index].float() for h in group.hidden))

    def save(self, file: Path) -> None:
        torch.save([(b.features, b.tokens, b.hidden) for b in self.batches], file)

    @classmethod
    def load(cls, file: Path) -> Pool:
        return cls([Batch(*parts) for parts in torch.load(file, weights_only=True)])


@torch.inference_mode()
def hidden_states(model: DiscreteModel, features: Tensor, tokens: Tensor) -> list[Tensor]:
    """Hidden states [B, n_b + S - 1, D] of the target on the CPU: conditional, then unconditional (see Batch).

    features [B, n, F], tokens [B, S].
    """
    batch, length = tokens.shape
    state = model.start(model.encode_features(features), None, batch, model.layout(), length, guided=True)
    positions = torch.arange(length - 1, device=model.device).expand(batch, -1)
    out = model.step(state, tokens[:, :-1].to(model.device), positions)
    branches = zip(state.prefix_hidden, out.hidden.split(batch), strict=True)
    return [torch.cat(parts, dim=1).cpu() for parts in branches]


def own_samples(model: DiscreteModel, prompts: list[Tensor], rows: int = 64) -> list[Example]:
    """Samples of the model for prompt features [n, F], alternating between its default settings and temperature 1."""
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for features in prompts:
        by_length[len(features)].append(features)
    plain = replace(model.defaults, temperature=1.0, top_k=0, top_p=1.0)
    examples = []
    for group in by_length.values():
        for at in range(0, len(group), rows):
            features = torch.stack(group[at : at + rows])
            request = Request(
                model,
                model.encode_features(features),
                model.layout(),
                (model.defaults, plain)[at // rows % 2],
                seed=len(examples),
                batch=len(features),
            )
            with torch.inference_mode():
                tokens = NextToken().sample(request).tokens.cpu()
            examples += [Example(f, t) for f, t in zip(features, tokens, strict=True)]
            log.info("generated %d of %d samples", len(examples), len(prompts))
    return examples


def from_folder(model: DiscreteModel, decoder: ImageDecoder, folder: Path) -> list[Example]:
    """Images of a folder, each with its prompt in a .txt file of the same name; cropped to the model's shape.

    Raises ValueError if there are none.
    """
    (rows, cols), layout = model.grid, model.layout()
    examples = []
    for file in sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGES):
        caption = file.with_suffix(".txt")
        if not caption.is_file():
            log.warning("%s has no prompt (%s is missing): skipped", file.name, caption.name)
            continue
        with Image.open(file) as image:
            image = ImageOps.fit(image.convert("RGB"), (cols * decoder.factor, rows * decoder.factor))
        pixels = torch.from_numpy(np.asarray(image).copy())[None] / 255.0
        features = model.encode_prompt(caption.read_text(encoding="utf-8").strip())[0][0]
        tokens = decoder.encode(pixels).view(1, rows, cols).cpu()
        whole = layout.keeping(tokens, torch.ones_like(tokens, dtype=torch.bool))
        examples.append(Example(features[0], whole.forced[0]))
    if not examples:
        raise ValueError(f"{folder} contains no image with a .txt file of the same name. Put the prompts there.")
    return examples


def bundled_images(model: DiscreteModel, decoder: ImageDecoder, cache: Path, count: int) -> list[Example]:
    """Randomly augmented training images of the bundled model, with random captions.

    Raises ValueError if the model has the vocabulary of no setting.
    """
    encoder, known = model.prompt_encoder, ((each, Captions(each, seed=0)) for each in SETTINGS.values())
    words = encoder.words if isinstance(encoder, WordEncoder) else None
    setting, captions = next((pair for pair in known if pair[1].words == words), (None, None))
    if not isinstance(encoder, WordEncoder) or setting is None or captions is None:
        raise ValueError(
            f"The model's vocabulary is of no setting ({', '.join(SETTINGS)}): these are not its training images. Set "
            "--pictures or --prompts, or use the scripts of the commit that the model's card names."
        )
    images = load_images(cache, setting.portrait_count).select(setting.concepts)
    batches = Batches(setting, images, captions, decoder.module, seed=0)
    examples = []
    while len(examples) < count:
        rows, _, tokens = batches.sample(32)
        examples += [Example(encoder.table[row[row >= 0]], t) for row, t in zip(rows, tokens, strict=True)]
    log.info("encoded %d images", len(examples))
    return examples
