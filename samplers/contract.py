"""What methods and models need from each other, and what every method can do.

ARModel and Drafter are all that methods know of discrete models; continuous_contract.py is for continuous ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from .layout import TokenLayout
from .settings import Setting, check_settings, setting
from .trace import Trace


@dataclass(frozen=True)
class StepOut:
    """Logits [R, T, V+] (in the model's dtype) and hidden states [R, T, D] of a forward pass.

    R = 2B with guidance, conditional rows first, else B.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Extent:
    """What the host knows of a round that it launches.

    values: read of the state before it, () where nothing varies. variant: what the kernels of a captured round depend
    on, apart from shapes. drafter_passes: forward passes of the drafter in it. expected_tokens: that it decides (0: not
    known). lasts: rounds for which the host uses it.
    """

    values: tuple[int, ...] = ()
    variant: Hashable = ()
    drafter_passes: int = 0
    expected_tokens: float = 0.0
    lasts: int = 1


class ARModel(Protocol):
    """A discrete autoregressive image model. vocab: V image codes; vocab_total: V+, special tokens included."""

    vocab: int
    vocab_total: int
    device: torch.device
    dtype: torch.dtype  # of its computation
    codebook: Tensor | None  # [V, C]
    defaults: SamplingParams
    sessions: dict[Hashable, Any]  # of earlier runs, by key (see engine/session.py)

    def layout(self, rows: int | None = None, cols: int | None = None) -> TokenLayout: ...

    def start(
        self,
        conditioning: Any,
        negative: Any,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: Any = None,
    ) -> Any:
        """The state after the prompt; ``state.prefill`` is the StepOut that predicts position 0.

        slack: the most uncommitted tokens. into: the state of an earlier run, which is reused if its sizes fit.
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
        """Keep the first ``count`` [B] (int64 or bool) tokens of the last step, or of ``path`` [B, P] (indices)."""
        ...

    def neighbours(self, count: int) -> Tensor:
        """Table [V, count] (int64): the nearest other codes of each code, by distance of their code vectors."""
        ...

    def dequantize(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] (fp32) of tokens [B, h, w]."""
        ...

    def prompt_tokens(self, conditioning: Any, negative: Any, batch: int, layout: TokenLayout, guided: bool) -> int:
        """Number of tokens of the longer of both prompts."""
        ...

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int) -> int:
        """Bytes of the KV cache of a run, for prompts of ``prompt`` tokens."""
        ...

    def activation_bytes(self, rows: int, tokens: int, prompt: int = 0) -> int:
        """Bytes of the activations of a forward pass over [rows, tokens], or of reading a prompt of ``prompt``
        tokens, if those are more."""
        ...


class Drafter(Protocol):
    """Proposes tokens to a target model, whose vocabulary and token layout it shares.

    Rows of logits and hidden states are as in StepOut.
    """

    kind: str  # in traces
    module: Any  # its weights

    def start(
        self,
        target_state: Any,
        conditioning: Any,
        negative: Any,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: Any = None,
    ) -> Any:
        """The state after the prompt. target_state: the target's, just started; slack, into: as in
        ARModel.start."""
        ...

    def set_attention_length(self, state: Any, tokens: int | None) -> int:
        """The promise of ARModel.set_attention_length, for the drafter's own cache."""
        ...

    def observe(self, state: Any, tokens: Tensor, positions: Tensor, hidden: Tensor, count: Tensor) -> StepOut:
        """Feed the first ``count`` [B] of the decided tokens [B, T], and forget what was expanded.

        hidden [R, T, D]: the target's hidden state one position before each token. Returns the StepOut [R, 1, ...]
        after the last of these tokens.
        """
        ...

    def expand(self, state: Any, tokens: Tensor, positions: Tensor, hidden: Tensor, tree_mask: Tensor) -> StepOut:
        """Feed drafts [B, F] at positions [B, F], after the E drafts expanded since the last ``observe``.

        hidden [R, F, D]: what this drafter returned for each draft's parent. tree_mask [B, F, E + F] (bool): may draft
        i see draft j.
        """
        ...

    def rewind(self, state: Any, count: Tensor) -> None:
        """Forget the last ``count`` [B] observed tokens."""
        ...

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int) -> int:
        """Bytes of the drafter's own cache in a run, for prompts of ``prompt`` tokens."""
        ...


MIN_TEMPERATURE = 1e-6  # least temperature above 0: logits divided by less may become infinite


@dataclass(frozen=True)
class SamplingParams:
    """How logits become probabilities.

    cfg >= 1 (1: no guidance); temperature 0 (greedy) or >= MIN_TEMPERATURE; top_k 0 (off) .. V; top_p in (0, 1];
    order: the base model's own sequence of the two filters, ("top_k", "top_p") or ("top_p", "top_k").

    entropy (T0, alpha, theta): the temperature of a token is multiplied by T0 exp(-H / alpha) + theta, where H is the
    entropy (nats) of its distribution after the filters; None: off. Ma et al., NeurIPS 2025, arXiv:2510.09012, eq. 2
    (2.5, 3, 0.6 there). This is another distribution, which exact methods sample exactly; temperature 0 ignores it.
    """

    cfg: float = setting(1.0, 1, advice="1 is no guidance")
    temperature: float = setting(1.0, 0, advice="0 is greedy")
    top_k: int = setting(0, 0, advice="0 is off")
    top_p: float = setting(1.0, 0, 1, advice="1 is off", above=True)
    order: tuple[str, str] = ("top_k", "top_p")
    entropy: tuple[float, float, float] | None = None

    @property
    def guided(self) -> bool:
        """Is there a second prompt?"""
        return self.cfg != 1

    @property
    def switches(self) -> tuple[Hashable, ...]:
        """What is on. This decides which operations a step has; these read the values as numbers."""
        filters = self.top_k > 0, self.top_p < 1
        order = self.order if all(filters) else None
        return self.guided, self.temperature == 0, *filters, order, self.entropy is not None

    def check(self, vocab: int) -> None:
        """Raise ValueError naming the parameter and its legal range."""
        Setting(0, vocab, advice=f"0 is off, and this model has {vocab} image tokens").check("top_k", self.top_k)
        check_settings(self)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, but must be 0 (greedy) or at least {MIN_TEMPERATURE:g}."
            )
        if self.entropy is not None:
            check_entropy(*self.entropy)


def check_entropy(first: float, decay: float, last: float) -> None:
    """Raise ValueError unless these are legal values T0, alpha, theta of an entropy temperature."""
    legal = {"T0": Setting(0), "alpha": Setting(0, above=True), "theta": Setting(MIN_TEMPERATURE)}
    for (name, each), value in zip(legal.items(), (first, decay, last), strict=True):
        each.check(f"The entropy temperature's {name}", value)


@dataclass(frozen=True)
class Progress:
    """Progress after a forward pass.

    tokens [B, S] (0 where not decided); committed [B] (int64, on the CPU): decided tokens; length: S; passes: forward
    passes so far; p [B, S] (fp32): target probabilities of the tokens. On a GPU committed is what the host knows, and
    tokens and p may be one pass further.

    draft [B, D] (int64): the guesses that the next pass is fed, at the positions after the first ``start`` [B] (int64)
    tokens (some may be past the end). None if a method keeps no guesses between passes. The tensors are on the model's
    device and valid until the callback returns.
    """

    tokens: Tensor
    committed: Tensor
    length: int
    passes: int
    draft: Tensor | None = None
    start: Tensor | None = None
    p: Tensor | None = None


Callback = Callable[[Progress], None]


P = TypeVar("P", bound=Any)


def chosen_params(defaults: P, chosen: dict[str, Any], kind: str) -> P:
    """A model's own sampling parameters, replaced by the ``chosen`` ones that are not None.

    Raises ValueError naming those that a model of this ``kind`` (such as "models of token ids") does not have,
    TypeError for one that is no number and should be.
    """
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if unknown := chosen.keys() - {field.name for field in fields(defaults)}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{names}: not supported for {kind}. Leave it at its default (in a node: -1).")
    whole = {field.name for field in fields(defaults) if field.type.startswith("int")}
    for name, value in chosen.items():
        if isinstance(getattr(defaults, name), Real) and not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}, but must be a number.")
        if name in whole and not isinstance(value, Integral):
            raise TypeError(f"{name} is {value!r}, but must be a whole number.")
    return replace(defaults, **chosen)


def check_grids(shape: tuple[int, ...], **grids: Tensor | None) -> None:
    """Raises ValueError naming one of ``grids`` (None: not given) that cannot be ``expand``ed to ``shape``, [B, rows,
    cols] or more."""
    for name, grid in grids.items():
        if grid is not None and (grid.shape[0] not in (1, shape[0]) or grid.shape[1:] != shape[1:]):
            raise ValueError(
                f"{name} has the shape {list(grid.shape)}, but must have {list(shape)}: images, rows and "
                "columns of tokens."
            )


def check_both(tokens: Tensor | None, kept: Tensor | None) -> None:
    """Raises ValueError where one is there without the other, or ``kept`` is no mask."""
    if (tokens is None) != (kept is None):
        raise ValueError("tokens are those of an image, and kept says which of them to keep. Give both.")
    if kept is not None and kept.dtype != torch.bool:
        raise ValueError(f"kept is {kept.dtype}, but must be bool: which tokens to keep.")


def check_masks(strength: Tensor | None, skippable: Tensor | None) -> None:
    """Raises ValueError for a strength that leaves 0..1, and for a ``skippable`` that is no mask."""
    if strength is not None and not ((strength >= 0) & (strength <= 1)).all():
        raise ValueError("strength has values outside 0 (exact) to 1 (the rule as set).")
    if skippable is not None and skippable.dtype != torch.bool:
        raise ValueError(f"skippable is {skippable.dtype}, but must be torch.bool: true where drafts may be skipped.")


@dataclass(frozen=True)
class Sketch:
    """A preview of the first image of a run: latent [1, C, h, w], and which of its tokens are decided (known) and which
    are drafts (guessed); [h, w], bool, on the CPU, never both."""

    latent: Tensor
    known: Tensor
    guessed: Tensor


@dataclass(frozen=True)
class Result:
    """The tokens of a run, [B, S] (int64) or of a continuous model [B, S, C] (fp32, model units), and its trace."""

    tokens: Tensor
    trace: Trace


@dataclass(frozen=True)
class Output:
    """Tokens [B, rows, cols] (int64; of continuous models [B, rows, cols, C], fp32), their latent [B, C, rows, cols]
    for the image decoder (None if a discrete model has no codebook), and the trace."""

    tokens: Tensor = field(repr=False)
    latent: Tensor | None = field(repr=False)
    trace: Trace

    @property
    def notices(self) -> list[str]:
        """What of the request the run did not use, a sentence each."""
        return self.trace.notices


@dataclass(frozen=True)
class Request:
    """A request to a method: generate ``batch`` images (image i with seed + i) from ``model`` and a prompt.

    conditioning, negative: prompts as model.start takes them. strength [1 or B, S] (fp32, 0..1): how far a relaxed
    acceptance rule or settling may go at each position, 0 is exact. Default: 1. skippable [1 or B, S] (bool): where a
    schedule may skip verification. Default: everywhere. notices: what of the request is not used, a sentence each.
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
    notices: tuple[str, ...] = ()
    continuous: ClassVar[bool] = False
    group: ClassVar[int] = 1  # tokens of a pass of next-token sampling

    @property
    def length(self) -> int:
        """S, the tokens of an image's sequence."""
        return self.layout.length

    def output(self, result: Result) -> Output:
        """The result on the image's grid."""
        tokens = self.layout.to_grid(result.tokens)
        latent = None if self.model.codebook is None else self.model.dequantize(tokens)
        return Output(tokens, latent, result.trace)

    def count_sampled(self, committed: Tensor) -> float:
        """How many of the first ``committed`` [B] (int64, on the CPU) tokens are sampled ones, on average over
        images."""
        free = (self.layout.forced < 0).cpu() & (torch.arange(self.layout.length) < committed[:, None])
        return float(free.sum(1).float().mean())

    def sketch(self, progress: Progress) -> Sketch:
        """The first image as far as it is decided, and the drafts after that. Kept tokens are known from the start."""
        layout = self.layout
        forced, tokens = layout.forced[0].cpu(), progress.tokens[0].to("cpu", copy=True)
        decided = int((progress.committed if progress.start is None else progress.start)[0])
        known = torch.arange(layout.length) < decided
        guessed = torch.zeros_like(known)
        if progress.draft is not None:
            draft = progress.draft[0, : layout.length - decided].cpu()  # some may be past the end
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

    def without_measuring(self) -> Method:
        """The method with what it would measure in a run given instead: two runs of it do the same."""
        return self

    @abstractmethod
    def check(self, request: Any) -> None:
        """Raise ValueError naming the setting or parameter that is illegal, and its legal values."""

    @abstractmethod
    def width(self, request: Any) -> int:
        """The most tokens of an image that a forward pass is fed (for continuous models: predicts)."""

    @abstractmethod
    def describe(self, request: Any) -> dict[str, Any]:
        """The settings of a run for its trace and report, JSON-ready: "method", "lossless" and the method's own."""

    @staticmethod
    @abstractmethod
    def in_words(settings: dict[str, Any]) -> str:
        """How a run that ``describe`` describes drafted, for people: "SJD, coupled, window 16"."""

    def session_key(self, request: Any) -> Hashable | None:
        """The key of the run's session, equal for runs that can share one (engine/session.py); None: no session."""
        return None

    @abstractmethod
    def run_bytes(self, request: Any) -> int:
        """Bytes of memory that a run takes besides the weights."""

    @abstractmethod
    def sample(self, request: Any) -> Result:
        """Generate ``request.batch`` images, each at its own pace. Raises ValueError like ``check``."""
