"""What methods and models need from each other, and what every method answers.

ARModel and Drafter are all that methods know of models of token ids; continuous_contract.py has those of vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

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
    codebook: Tensor | None  # [V, C]
    defaults: SamplingParams
    sessions: dict[Hashable, Any]  # of earlier runs, by key (see engine/session.py)

    def layout(self, rows: int | None = None, cols: int | None = None) -> TokenLayout: ...

    def start(
        self, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, slack: int, guided: bool,
        into: Any = None,
    ) -> Any:
        """Prefilled state; ``state.prefill`` is the StepOut that predicts position 0. ``slack``: uncommitted tokens.

        into: the state of an earlier run, which is filled anew and returned where its sizes fit.
        """
        ...

    def set_attention_length(self, state: Any, tokens: int | None) -> int:
        """Promise that the next steps commit and feed no token past the first ``tokens`` of an image; None: no promise.

        Returns the attention length, the cached tokens that steps attend to. It is a shape of the step.
        """
        ...

    def step(
        self, state: Any, tokens: Tensor, positions: Tensor, tree_mask: Tensor | None = None, uncommitted: int = 0
    ) -> StepOut:
        """Feed tokens [B, T] (int64) at positions [B, T], after the committed and the last ``uncommitted`` tokens.

        tree_mask [B, T, uncommitted + T] (bool): may token i see uncommitted token j; None is a chain.
        """
        ...

    def commit(self, state: Any, count: Tensor, path: Tensor | None = None) -> None:
        """Keep ``count`` [B] (int64, or bool: 1 or 0) tokens of the last step: its first ones, or the first of ``path``
        [B, P] (offsets)."""
        ...

    def neighbours(self, count: int) -> Tensor:
        """Table [V, count] (int64): for each code the others by distance of their code vectors, nearest first."""
        ...

    def dequantize(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] (fp32) of tokens [B, h, w]."""
        ...

    def prompt_tokens(
        self, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, guided: bool
    ) -> int:
        """Tokens of the longer of both prompts."""
        ...

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int) -> int:
        """Bytes of the KV cache of a run after prompts of ``prompt`` tokens."""
        ...

    def activation_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of the activations of a pass over ``tokens`` tokens in each of so many rows."""
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

    def set_attention_length(self, state: Any, tokens: int | None) -> int:
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

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int) -> int:
        """See ARModel."""
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


P = TypeVar("P")


def chosen_params(defaults: P, given: dict[str, Any], kind: str) -> P:
    """A model's own sampling parameters with the ``given`` ones in their place; None stands for the model's own.

    Raises ValueError naming those that a model of this kind ("models of token ids") does not have.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if unfit := given.keys() - {field.name for field in fields(defaults)}:
        raise ValueError(f"{', '.join(sorted(unfit))}: not supported for {kind}.")
    return replace(defaults, **given)


@dataclass(frozen=True)
class Sketch:
    """How far a run is with its first image: latent [1, C, h, w], which tokens are decided and which are drafts that go
    into the next pass (known, guessed [h, w], bool, on the CPU, never both)."""

    latent: Tensor
    known: Tensor
    guessed: Tensor


@dataclass(frozen=True)
class Result:
    """tokens of a run and the trace of how they came about: [B, S] (int64), or [B, S, C] (fp32, model units) of a
    continuous model."""

    tokens: Tensor
    trace: Trace


@dataclass(frozen=True)
class Output:
    """tokens [B, rows, cols] (int64; of continuous models [B, rows, cols, C], fp32), latent [B, C, rows, cols] for the
    image decoder (None while a discrete model has no codebook), trace."""

    tokens: Tensor
    latent: Tensor | None
    trace: Trace


@dataclass(frozen=True)
class Request:
    """What a method is asked: generate ``batch`` images (image i with seed + i) from ``model`` under a prompt.

    conditioning, negative: prompts in a form that model.start takes. strength [1 or B, S] (fp32, 0..1): how far a
    relaxed acceptance rule may go at each position, 0 being exact; None is 1 everywhere. skippable [1 or B, S] (bool):
    where a schedule may take drafts unverified; None is everywhere.
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
    continuous: ClassVar[bool] = False

    @property
    def length(self) -> int:
        """Tokens of an image's sequence."""
        return self.layout.length

    def output(self, result: Result) -> Output:
        """The result on the image's grid."""
        tokens = self.layout.to_grid(result.tokens)
        latent = None if self.model.codebook is None else self.model.dequantize(tokens)
        return Output(tokens, latent, result.trace)

    def sketch(self, progress: Progress) -> Sketch:
        """The first image as far as it is decided, and the drafts after that. Kept tokens are there from the start."""
        layout = self.layout
        forced, tokens = layout.forced[0].cpu(), progress.tokens[0].to("cpu", copy=True)
        decided = int((progress.committed if progress.start is None else progress.start)[0])
        known = torch.arange(layout.length) < decided
        guessed = torch.zeros_like(known)
        if progress.draft is not None:
            draft = progress.draft[0, : layout.length - decided].cpu()  # no more than there are positions
            tokens[decided : decided + len(draft)] = draft
            guessed[decided : decided + len(draft)] = True
        known, guessed = known | (forced >= 0), guessed & (forced < 0)
        tokens = torch.where(forced >= 0, forced, tokens)
        latent = self.model.dequantize(layout.to_grid(tokens)[None])
        return Sketch(latent, layout.to_grid(known), layout.to_grid(guessed))


class Method(ABC):
    """A way of generating images. Methods are frozen dataclasses whose fields are their settings.

    A request is a Request, or a ContinuousRequest where the method is ``continuous`` (its tokens are vectors).
    """

    name: str  # in traces
    lossless: bool  # do images follow the model's own distribution
    continuous: ClassVar[bool] = False

    @abstractmethod
    def check(self, request: Any) -> None:
        """Raise ValueError naming the setting or parameter that is illegal, and its legal values."""

    @abstractmethod
    def width(self, request: Any) -> int:
        """The most tokens of an image that a pass of the model is fed (a continuous one: predicts)."""

    @abstractmethod
    def describe(self, request: Any) -> dict[str, Any]:
        """The settings of a run for its trace and report, JSON-ready: "method", "lossless" and the method's own."""

    @staticmethod
    @abstractmethod
    def in_words(settings: dict[str, Any]) -> str:
        """How a run that ``describe`` describes drafted, for people: "SJD, coupled"."""

    def session_key(self, request: Any) -> Hashable | None:
        """Equal for runs that may take over each other's caches and captured steps (engine/session.py); None: none."""
        return None

    @abstractmethod
    def run_bytes(self, request: Any) -> int:
        """Bytes of memory that a run takes beside the weights."""

    @abstractmethod
    def sample(self, request: Any) -> Result:
        """Generate ``request.batch`` images, each at its own pace. Raises ValueError as ``check`` does."""
