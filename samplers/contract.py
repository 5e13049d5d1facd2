"""What a sampler and a model need from each other. Samplers know nothing else of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .layout import TokenLayout
from .trace import Trace


@dataclass(frozen=True)
class StepOut:
    """Logits [R, T, V+] (in the model's dtype) and hidden states [R, T, D] of a pass.

    R = 2B with guidance, conditional rows first.
    """

    logits: Tensor
    hidden: Tensor


class ARModel(Protocol):
    """A discrete autoregressive image model; vocab V counts image codes, vocab_total V+ adds the layout's specials."""

    vocab: int
    vocab_total: int
    device: torch.device
    codebook: Tensor  # [V, C]
    defaults: SamplingParams
    kept: dict[Hashable, Any]  # what runs leave for the next of their kind (see engine/session.py)

    def layout(self, rows: int | None = None, cols: int | None = None) -> TokenLayout: ...

    def start(
        self, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, slack: int, guided: bool,
        into: Any = None,
    ) -> Any:
        """Prefilled state; ``state.prefill`` is the StepOut that predicts position 0. ``slack``: uncommitted tokens.

        into: the state of an earlier run, which is filled anew and returned where its sizes fit.
        """
        ...

    def reach(self, state: Any, tokens: int | None) -> int:
        """Promise that from now on no token of an image stands behind its first ``tokens``, fed ones included; None
        promises nothing.

        Steps need to look at no more of the caches than that. Returns how much they look at: a shape of the step.
        """
        ...

    def step(
        self, state: Any, tokens: Tensor, positions: Tensor, tree_mask: Tensor | None = None, behind: int = 0
    ) -> StepOut:
        """Feed tokens [B, T] (int64) standing at positions [B, T] behind what is committed and ``behind`` others.

        tree_mask [B, T, behind + T] (bool): does token i see uncommitted token j; None is a chain.
        """
        ...

    def commit(self, state: Any, count: Tensor, path: Tensor | None = None) -> None:
        """Keep ``count`` [B] (int64, or bool: 1 or 0) tokens of the last step: its first ones, or the first of ``path``
        [B, P] (offsets)."""
        ...

    def neighbours(self, count: int) -> Tensor:
        """Table [V, count] (int64): for each code the others by distance of their code vectors, nearest first."""
        ...


class Drafter(Protocol):
    """Guesses what a target model will draw: its own vocabulary and token layout are the target's.

    Rows of logits and hidden states are those of the target (conditional ones first).
    """

    kind: str  # what sort of drafter, for the trace
    module: Any  # its weights

    def start(
        self, target_state: Any, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, slack: int,
        guided: bool, into: Any = None,
    ) -> Any:
        """State behind the prompt; target_state is the target's, freshly started. ``slack``: tokens and drafts
        that may stand behind the decided ones. into: as in ARModel."""
        ...

    def reach(self, state: Any, tokens: int | None) -> int:
        """See ARModel."""
        ...

    def observe(self, state: Any, tokens: Tensor, positions: Tensor, hidden: Tensor, count: Tensor) -> StepOut:
        """Take over the first ``count`` [B] of the decided tokens [B, T], forgetting what was expanded.

        hidden [R, T, D]: the target's hidden state one position before each token. Returns the StepOut [R, 1, ...]
        behind the last token taken.
        """
        ...

    def expand(self, state: Any, tokens: Tensor, positions: Tensor, hidden: Tensor, tree_mask: Tensor) -> StepOut:
        """Feed drafts [B, F] at positions [B, F] on top of the E expanded since the last ``observe``.

        hidden [R, F, D]: what this drafter returned for each draft's parent. tree_mask [B, F, E + F] (bool): does draft
        i see draft j.
        """
        ...

    def rewind(self, state: Any, count: Tensor) -> None:
        """Forget the last ``count`` [B] tokens observed."""
        ...


COLDEST = 1e-6  # temperature above 0: logits divided by less may become infinite


@dataclass(frozen=True)
class SamplingParams:
    """How logits become probabilities.

    cfg >= 1 (1: no guidance); temperature 0 (greedy) or >= COLDEST; top_k 0 (off) .. V; top_p in (0, 1];
    order: the base model's own sequence of the two filters, ("top_k", "top_p") or ("top_p", "top_k").
    """

    cfg: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    order: tuple[str, str] = ("top_k", "top_p")

    @property
    def guided(self) -> bool:
        """Is there a second prompt?"""
        return self.cfg != 1

    @property
    def switches(self) -> tuple[Hashable, ...]:
        """What is on, which decides about the operations of a step; the numbers are only theirs to read."""
        filters = self.top_k > 0, self.top_p < 1
        return self.guided, self.temperature == 0, *filters, self.order if all(filters) else None

    def check(self, vocab: int) -> None:
        """Raise ValueError naming the parameter and its legal range."""
        if not self.cfg >= 1:
            raise ValueError(f"cfg is {self.cfg}, but must be 1 (no guidance) or more.")
        if not (self.temperature == 0 or self.temperature >= COLDEST):
            raise ValueError(f"temperature is {self.temperature}, but must be 0 (greedy) or more, from {COLDEST} on.")
        if not 0 <= self.top_k <= vocab:
            raise ValueError(f"top_k is {self.top_k}, but this model has {vocab} image tokens: use 0 (off) to {vocab}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (off).")


@dataclass(frozen=True)
class Progress:
    """State after a pass: tokens [B, S] (undrawn: 0), committed [B] (int64, on the CPU) tokens per image, S, passes so
    far. On a GPU committed is what the host knows, and tokens may be one pass further.

    draft [B, D] (int64): the guesses that go into the next pass, for the positions behind the ``start`` [B] (int64)
    decided ones among ``tokens`` (some may lie behind the end); None where a method keeps no guesses between passes.
    Both are on the model's device and stand until the callback returns.
    """

    tokens: Tensor
    committed: Tensor
    length: int
    passes: int
    draft: Tensor | None = None
    start: Tensor | None = None


Callback = Callable[[Progress], None]


@dataclass(frozen=True)
class Request:
    """What every sampler is asked: draw ``batch`` images (image i with seed + i) from ``model`` under a prompt.

    strength [1 or B, S] (fp32, 0..1): how far a relaxed acceptance rule may go at each position, 0 being exact; None is
    1 everywhere. skippable [1 or B, S] (bool): where a schedule may take drafts unverified; None is everywhere.
    """

    model: ARModel
    conditioning: Any
    layout: TokenLayout
    params: SamplingParams
    negative: Any = None
    seed: int = 0
    batch: int = 1
    callback: Callback | None = None
    strength: Tensor | None = None
    skippable: Tensor | None = None


@dataclass(frozen=True)
class Decoded:
    """tokens [B, S] (int64) and the trace of how they came about."""

    tokens: Tensor
    trace: Trace
