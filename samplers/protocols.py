"""What a sampler and a model need from each other. Samplers know nothing else of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .trace import Trace


@dataclass(frozen=True)
class TokenLayout:
    """The token sequence of one image: a grid of codes in raster order, with forced tokens in between or in place.

    forced [1 or B, S] (int64): -1 where the model draws, else the id that must stand there (an end-of-line token, or a
    token the user keeps). Position = row * stride + column; stride - cols forced tokens follow every row, and
    S - rows * stride tokens follow the last.
    """

    rows: int
    cols: int
    stride: int
    forced: Tensor

    @classmethod
    def plain(cls, rows: int, cols: int) -> TokenLayout:
        """A grid without any forced token."""
        return cls.ruled(rows, cols, (), ())

    @classmethod
    def ruled(cls, rows: int, cols: int, row_end: Sequence[int], endings: Sequence[int]) -> TokenLayout:
        """A grid with the ids ``row_end`` behind every row and the ids ``endings`` behind the last."""
        row = torch.tensor([-1] * cols + list(row_end), dtype=torch.int64)
        forced = torch.cat((row.repeat(rows), torch.tensor(list(endings), dtype=torch.int64)))
        return cls(rows, cols, len(row), forced[None])

    @property
    def length(self) -> int:
        return self.forced.shape[1]

    @property
    def forces(self) -> bool:
        """Is any token forced? Reads the device."""
        return bool((self.forced >= 0).any())

    @property
    def drawn(self) -> int:
        """How many tokens the model draws of a picture (of the one that needs most). Reads the device."""
        return int((self.forced < 0).sum(1).max())

    def position(self, row: int, col: int) -> int:
        return row * self.stride + col

    def forced_at(self, position: Tensor) -> Tensor:
        """The id forced at positions [B, T] or -1; behind the end, that of the last position."""
        return self.forced.expand(len(position), -1).gather(1, position.clamp(max=self.length - 1))

    def to_grid(self, values: Tensor) -> Tensor:
        """Values [..., S] of a sequence -> [..., rows, cols] of the picture."""
        body = values[..., : self.rows * self.stride]
        return body.unflatten(-1, (self.rows, self.stride))[..., : self.cols]

    def spread(self, grid: Tensor, fill: float) -> Tensor:
        """Values [B, rows, cols] of pictures -> [B, S] of sequences, with ``fill`` at the other positions."""
        values = torch.full((len(grid), self.length), fill, dtype=grid.dtype, device=grid.device)
        self.to_grid(values).copy_(grid)  # to_grid returns a view
        return values

    def keeping(self, tokens: Tensor, keep: Tensor) -> TokenLayout:
        """The layout with ``tokens`` [B, rows, cols] forced wherever ``keep`` [B, rows, cols] (bool) is true."""
        forced = self.forced.to(tokens.device).expand(tokens.shape[0], -1).clone()
        self.to_grid(forced)[keep] = tokens[keep]  # to_grid returns a view
        return replace(self, forced=forced)

    def beginning(self, tokens: int) -> TokenLayout:
        """The shortest beginning of the sequence in which every picture draws so many tokens; all of it if it has
        fewer.

        It belongs to a picture of as many rows as before, so prompts and positions stay what they are; but a run over
        it stops early, and its values fill no grid.
        """
        enough = ((self.forced < 0).cumsum(1) >= tokens).all(0)
        return replace(self, forced=self.forced[:, : int(enough.long().argmax()) + 1]) if enough.any() else self

    def to(self, device: torch.device | str) -> TokenLayout:
        return replace(self, forced=self.forced.to(device))


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
    kept: dict[Hashable, Any]  # what runs leave for the next of their kind (see session.py)

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
