"""Runs whose passes are timed: our samplers, ``generate``, the plain loop; and what a pass must read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.api import Output
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.pass_costs import wait
from torch import Tensor, nn

from .generate import counterpart, generate
from .plain import plain_loop

CHUNK = 1 << 28  # bytes of the largest buffer copied to measure bandwidth


@dataclass(frozen=True)
class Stretch:
    """The part of an image of ``layout`` that a run generates: ``tokens`` of it after ``behind`` others (zeros)."""

    layout: TokenLayout
    behind: int = 0
    tokens: int = 0

    @property
    def whole(self) -> bool:
        return self.tokens == self.layout.length

    @property
    def drawn(self) -> TokenLayout:
        """What a sampler is asked to generate: all, or a row of so many tokens."""
        return self.layout if self.whole else TokenLayout.plain(1, self.tokens)

    @classmethod
    def middle(cls, layout: TokenLayout, tokens: int) -> Stretch:
        """``tokens`` in the middle of an image, or all if it has no more."""
        tokens = min(tokens, layout.length)
        return cls(layout, (layout.length - tokens) // 2, tokens)


@dataclass(frozen=True)
class Run:
    """What one run took: seconds in all; passes after the prompt's, and milliseconds of one; passes of the drafter."""

    seconds: float
    passes: int
    pass_ms: float
    draft_passes: int = 0


class Staged:
    """A model as samplers see it, in the middle of an image: its caches already hold ``behind`` tokens of ``layout``.

    They are zeros: what they hold does not change what a pass costs. What runs leave behind for the next stays with
    this object, not with the model, so that methods do not displace each other.
    """

    def __init__(self, model: Any, stretch: Stretch):
        self._model, self._stretch = model, stretch
        self.sessions: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def request(self, *given: Any, **named: Any) -> Request:
        return replace(self._model.request(*given, **named), model=self)

    def start(self, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, *rest: Any, **named: Any) -> Any:
        whole = layout if self._stretch.whole else self._stretch.layout.to(self._model.device)
        state = self._model.start(conditioning, negative, batch, whole, *rest, **named)
        if self._stretch.behind:
            self._model.set_attention_length(state, self._stretch.behind)
            count = torch.full((batch,), self._stretch.behind, dtype=torch.int64, device=self._model.device)
            self._model.commit(state, count)
        return state

    def set_attention_length(self, state: Any, tokens: int | None) -> int:
        return self._model.set_attention_length(state, None if tokens is None else self._stretch.behind + tokens)


@dataclass
class Sampler:
    """A method of ours, ready to run again and again on a model (as ``staged``)."""

    name: str
    method: Any
    staged: Staged
    conditioning: Any
    stretch: Stretch
    params: Any
    batch: int = 1

    def asked(self, conditioning: Any) -> Sampler:
        """The same with another prompt."""
        return replace(self, conditioning=conditioning)

    def output(self, seed: int, callback: Callable[[Any], None] | None = None) -> Output:
        """The images of one run."""
        return specar.sample(
            self.staged,
            self.conditioning,
            self.method,
            cfg=self.params.cfg,
            temperature=self.params.temperature,
            top_k=self.params.top_k,
            top_p=self.params.top_p,
            seed=seed,
            batch_size=self.batch,
            layout=self.stretch.drawn,
            callback=callback,
        )

    def __call__(self, seed: int) -> Run:
        moments = []
        wait(self.staged.device)
        begun = time.perf_counter()
        totals = self.output(seed, lambda _: moments.append(time.perf_counter())).trace.totals
        wait(self.staged.device)
        ended, passes = time.perf_counter(), max(totals["target_passes"] - 1, 1)
        return Run(ended - begun, passes, 1e3 * (ended - moments[0]) / passes, totals["draft_passes"])


@dataclass
class Baseline:
    """A loop that is not ours: ``loop()`` returns the moments when tokens were there."""

    name: str
    device: torch.device
    loop: Callable[[], list[float]]

    def asked(self, conditioning: Any) -> Baseline:
        """Itself: it generates every token in a pass of its own, whatever the prompt says."""
        return self

    def __call__(self, seed: int) -> Run:
        torch.manual_seed(seed)
        wait(self.device)
        begun = time.perf_counter()
        moments = self.loop()
        wait(self.device)
        ended = time.perf_counter()
        passes = max(len(moments) - 1, 1)
        return Run(ended - begun, len(moments) - 1, 1e3 * (ended - moments[0]) / passes)


def baselines(model, conditioning, layout: TokenLayout, params) -> list[Baseline]:
    """``generate`` with both caches, in one row per branch of guidance, and the plain loop, of a whole image."""
    made, rows, prompt = counterpart(model), 1 + (params.cfg != 1), conditioning[0][0].shape[1]
    loops = {
        f"generate, {cache} cache": partial(generate, made, rows, prompt, layout.length, params, cache)
        for cache in ("static", "dynamic")
    }
    loops["plain loop"] = partial(plain_loop, model, conditioning, params, layout)
    return [Baseline(name, model.device, loop) for name, loop in loops.items()]


def weights_read(module: nn.Module) -> int:
    """Bytes of the weights that a pass reads: all but the tables, of which it looks up a few rows."""
    tables = {id(t) for part in module.modules() if isinstance(part, nn.Embedding) for t in part.parameters()}
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()) if id(t) not in tables)


def cache_read(model, rows: int, slots: float) -> float:
    """Bytes of the keys and values of ``slots`` tokens in all layers of ``rows`` rows."""
    config = model.backbone.config
    return 2 * config.layers * rows * slots * config.cached_heads * config.head_dim * model.dtype.itemsize


def bytes_of_a_pass(model, drafter, stretch: Stretch, prompt: int, rows: int, drafts_per_pass: float) -> float:
    """What one pass in the middle of the stretch must move, with the passes of the drafter that belong to it."""
    slots = prompt + stretch.behind + stretch.tokens / 2
    moved = weights_read(model.backbone) + cache_read(model, rows, slots)
    if drafter is not None and drafts_per_pass:
        own = drafter.module.backbone if hasattr(drafter.module, "backbone") else drafter.module
        head = 0 if own is not drafter.module else weights_read(model.backbone.output)
        moved += drafts_per_pass * (weights_read(own) + head)
    return moved


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that copying a buffer of ``size`` bytes (at most CHUNK) moves: read and written."""
    source = torch.ones(min(size, CHUNK), dtype=torch.uint8, device=device)
    return 2 * copy_speed(source, torch.empty_like(source))


def copy_speed(source: Tensor, target: Tensor) -> float:
    """Bytes per second that are copied from one buffer to another, best of ten."""
    best = float("inf")
    for _ in range(10):
        wait(target.device)
        begun = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        wait(target.device)
        best = min(best, (time.perf_counter() - begun) / 4)
    return source.nbytes / best
