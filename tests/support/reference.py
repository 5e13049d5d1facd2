"""Comparisons with reference implementations that families share: a language model of transformers that runs live, and
the names and shapes of released files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar import api
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.image_reader import ImageReader
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.ending import generate_until
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from torch import Tensor

from .closeness import assert_as_exact, decided, fp64
from .models import teacher_forced
from .stepwise import stepwise

Grid = tuple[int, int]


@fp64()
def hidden_and_logits(reference: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Hidden states [T, D] and logits over the whole vocabulary [T, N] of a language model of transformers."""
    hidden = reference.model(input_ids=torch.tensor([[*ids]])).last_hidden_state
    return hidden[0], reference.lm_head(hidden)[0]


@torch.inference_mode()
def assert_same_states(
    model: DiscreteModel,
    reference: Any,
    text: str,
    prompts: Sequence[Sequence[int]],
    grid: Grid,
    images: Sequence[Tensor] = (),
):
    """Ours are the reference's hidden states and logits, in one pass and in steps, in both branches of guidance.

    prompts: ids before the image with the prompt ``text`` and its ``images``, and with the model's own negative prompt.
    """
    layout = model.layout(*grid)
    image = torch.arange(grid[0] * grid[1]).view(1, *grid) * 5 % model.vocab
    tokens = layout.keeping(image, torch.ones_like(image, dtype=torch.bool)).forced
    words = torch.tensor(model.word_ids)
    found = [hidden_and_logits(reference, [*prompt, *words[tokens[0]].tolist()]) for prompt in prompts]
    first = [len(prompt) - 1 for prompt in prompts]
    hidden = torch.stack([states[n:-1] for n, (states, _) in zip(first, found, strict=True)])
    logits = torch.stack([scores[n:-1, words] for n, (_, scores) in zip(first, found, strict=True)])
    conditioning = model.encode_prompt(text, images)
    assert_as_exact(lambda: teacher_forced(model, conditioning, image), logits[:1])
    assert_as_exact(lambda: stepwise(model, conditioning, tokens, layout), [hidden, logits])


@torch.inference_mode()
def assert_same_image(
    model: DiscreteModel,
    reference: Any,
    text: str,
    prompts: Sequence[Sequence[int]],
    grid: Grid,
    cfg: float,
    images: Sequence[Tensor] = (),
    **run: Any,
):
    """At temperature 0 our methods generate the image of a plain loop over the reference: guidance, then the tokens
    that the layout allows, then the likeliest. prompts: see ``assert_same_states``; run: options of api.sample."""
    layout, words, drawn = model.layout(*grid), torch.tensor(model.word_ids), []
    for token in layout.forced[0].tolist():
        if token < 0:
            cond, uncond = (hidden_and_logits(reference, [*prompt, *drawn])[1][-1] for prompt in prompts)
            token = int((uncond + cfg * (cond - uncond))[words[: model.vocab]].argmax())
        drawn.append(int(words[token]))
    wanted = words[: model.vocab] == torch.tensor(drawn)[:, None]
    wanted = layout.to_grid(wanted.int().argmax(1)[None])
    assert len(wanted.unique()) > 3
    conditioning = model.encode_prompt(text, images)
    for method in (NextToken(), SJD(window=5)):

        def compute(method=method):
            return api.sample(model, conditioning, method, cfg=cfg, temperature=0, layout=layout, **run).tokens

        assert torch.equal(decided(compute), wanted), method


@torch.inference_mode()
def assert_same_answer(reader: ImageReader, reference: Any, image: Tensor, question: str, ids: Sequence[int]) -> None:
    """Ours are the reference's logits over the whole vocabulary after a question about an image, and at temperature 0
    the answer of a plain loop over it, which takes the likeliest word.

    image: tokens [h, w] (int64). ids: the whole conversation, as the official code writes it.
    """
    drawn: list[int] = []
    for _ in range(24):
        drawn.append(int(hidden_and_logits(reference, [*ids, *drawn])[1][-1].argmax()))
    assert len({*drawn}) > 3

    def ask(count: int) -> Request:
        return reader.request(reader.prompt(image[None], question), count)

    def logits() -> Tensor:
        asked = ask(24)
        state = reader.speaker.start(asked.conditioning, None, 1, asked.layout, 1, False)
        first = state.prefill.logits
        return torch.cat((first, reader.speaker.step(state, torch.tensor([drawn]), torch.arange(24)[None]).logits), 1)

    assert_as_exact(logits, hidden_and_logits(reference, [*ids, *drawn])[1][None, len(ids) - 1 :])
    for method in (NextToken(), SJD(window=4)):
        found = decided(lambda by=method: torch.tensor(generate_until(by, ask(24), -2)))
        assert found.tolist() == [drawn], method
    end = drawn[9]
    with patch.object(type(reader), "end", end):
        assert generate_until(SJD(window=4), ask(24), reader.end) == [drawn[: drawn.index(end)]]


# Released files


def digest(shapes: Mapping[str, Iterable[int]]) -> list:
    """Number of tensors, of their numbers, and a SHA-256 of all names and shapes."""
    lines = sorted(f"{name} {[*shape]}" for name, shape in shapes.items())
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    return [len(lines), numbers, hashlib.sha256("\n".join(lines).encode()).hexdigest()]


def on_meta(shapes: Mapping[str, Iterable[int]]) -> dict[str, Tensor]:
    """Tensors of these shapes without any memory."""
    return {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
