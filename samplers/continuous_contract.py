"""What samplers and continuous models need from each other: tokens are vectors, sampled in any order.

Shapes: B images, S positions of an image (raster order), C channels of a token, V variants of an image that run as one
batch, M positions predicted at once, T denoising steps per token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..device.graphs import Graphs
from ..kernels.sampling import inverse
from .continuous_distributions import Distribution
from .contract import Output, Result, Sketch
from .rng import Purpose, Stream
from .settings import check_settings, setting
from .trace import CONTINUOUS_FIELDS, Record, Source

GUIDANCE = ("linear", "constant")


@dataclass(frozen=True)
class ContinuousParams:
    """How a head samples.

    cfg >= 1 (1: no guidance); cfg_schedule: "constant", or "linear" in the fraction of the image that is known;
    temperature >= 0: scales the noise of every denoising step; steps: denoising steps per token; kind: "ddpm" or
    "ddim"; iterations: forward passes of next-token sampling. Default: one per token.
    """

    cfg: float = setting(1.0, 1, advice="1 is no guidance")
    cfg_schedule: str = setting("linear", options=GUIDANCE)
    temperature: float = setting(1.0, 0, advice="0 is no noise")
    steps: int = 100
    kind: str = "ddpm"
    iterations: int | None = setting(None, 1)

    def check(self) -> None:
        """Raise ValueError naming the parameter and its legal range."""
        check_settings(self)


class DenoisingSteps(Protocol):
    """Denoising steps of a head. last_width: nominal standard deviation of the last one, in latent units."""

    steps: int
    last_width: float


class ContinuousModel(Protocol):
    """A model whose tokens are vectors.

    grid: its own (rows, cols); group: the number of positions that it samples together (a cell); order [S] (int64): the
    order it samples positions in, None for any.
    """

    grid: tuple[int, int]
    channels: int
    group: int
    order: Tensor | None
    device: torch.device
    defaults: ContinuousParams
    sessions: dict[Hashable, Any]  # see ARModel
    module: Any  # its weights

    def start(
        self,
        conditioning: Any,
        negative: Any,
        batch: int,
        grid: tuple[int, int],
        guided: bool,
        graphs: Graphs | None = None,
    ) -> Any:
        """The state of a run: what all its forward passes share. graphs: capture their steps."""
        ...

    def schedule(self, params: ContinuousParams) -> DenoisingSteps:
        """The denoising steps under these parameters. Raises ValueError for ones the head does not support."""
        ...

    def guidance(self, params: ContinuousParams, before: Tensor, after: Tensor, length: int) -> Tensor:
        """Guidance scale (fp32) of tokens sampled when ``before`` of ``length`` are known, ``after`` once they are."""
        ...

    def predict(
        self,
        state: Any,
        tokens: Tensor,
        known: Tensor,
        query: Tensor,
        seen: int,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: DenoisingSteps,
    ) -> Distribution:
        """The distribution [B, V, M] of the tokens at query [B, V, M], given exactly the tokens in known [B, V, S].

        tokens [B, S, C]; seen: at least the most tokens known in any row; cfg [B, V, M]: guidance scales; noise0
        [B, V, M, C] and noise_t [T, B, V, M, C]: the initial noise of a token and that of its steps.
        """
        ...

    def to_latent(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Latents [B, C, h, w] of the image decoder (fp32) for tokens [B, S, C]."""
        ...

    def run_bytes(self, rows: int, tokens: int, draws: int) -> int:
        """Bytes of the activations of a forward pass over [rows, tokens] that samples ``draws`` tokens of each row."""
        ...


@dataclass(frozen=True)
class ContinuousProgress:
    """Progress after a forward pass.

    tokens [B, S, C]; known [B, S] (bool): which of them are decided; committed [B] (int64, on the CPU): how many;
    length: S; passes: forward passes so far.
    """

    tokens: Tensor
    known: Tensor
    committed: Tensor
    length: int
    passes: int


ContinuousCallback = Callable[[ContinuousProgress], None]


@dataclass(frozen=True)
class ContinuousRequest:
    """A request to a method: generate ``batch`` images (image i with seed + i) on a grid (rows, cols).

    conditioning, negative: prompts as model.start takes them. kept [B, S] (bool): mask of the kept tokens, those of
    ``tokens`` [B, S, C] that stay as they are. notices: what of the request is not used, a sentence each.
    """

    model: ContinuousModel
    conditioning: Any
    grid: tuple[int, int]
    params: ContinuousParams
    negative: Any = None
    seed: int = 0
    batch: int = 1
    callback: ContinuousCallback | None = None
    tokens: Tensor | None = None
    kept: Tensor | None = None
    notices: tuple[str, ...] = ()
    continuous: ClassVar[bool] = True

    @property
    def length(self) -> int:
        """Tokens of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def group(self) -> int:
        """Tokens of a pass of next-token sampling: those of a cell of the model."""
        return self.model.group

    @property
    def guided(self) -> bool:
        """Is there a second prompt?"""
        return self.params.cfg != 1

    def output(self, result: Result) -> Output:
        """The result on the image's grid."""
        tokens = result.tokens.unflatten(1, self.grid)
        return Output(tokens, self.model.to_latent(result.tokens, self.grid), result.trace)

    def count_sampled(self, committed: Tensor) -> float:
        """How many of ``committed`` [B] (int64, on the CPU) tokens are not kept, on average over images."""
        kept = 0 if self.kept is None else self.kept.sum(1).cpu()
        return float((committed - kept).float().mean())

    def sketch(self, progress: ContinuousProgress) -> Sketch:
        """The first image as far as it is decided. It has no drafts, since every round drafts again."""
        known = progress.known[0]
        latent = self.model.to_latent(torch.where(known[:, None], progress.tokens[0], 0)[None], self.grid)
        known = known.unflatten(0, self.grid).cpu()
        return Sketch(latent, known, torch.zeros_like(known))


class Canvas:
    """The images of a run: their tokens, the order in which each samples its positions, and how far it has come.

    order [B, S]: positions, kept ones first; done [B]: how many of them are known. Drafts written past ``done`` are
    seen only by forward passes that look ahead.
    """

    def __init__(self, request: ContinuousRequest, stream: Stream):
        """Raises ValueError for kept tokens that are illegal or leave nothing to sample, or if the batch is empty."""
        if request.batch < 1:
            raise ValueError(f"The batch is {request.batch}, but must be at least 1.")
        model, batch = request.model, request.batch
        self.batch, self.device, self.length = batch, model.device, request.length
        positions = torch.arange(self.length, device=self.device).expand(batch, -1)
        if model.order is None:
            self.order = stream.uniform(positions, Purpose.ORDER).argsort(dim=1, stable=True)
        else:
            self.order = model.order.to(self.device).expand(batch, -1)
        self._tokens = torch.zeros((batch, self.length + 1, model.channels), device=self.device)
        self.done = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.kept = torch.zeros_like(positions, dtype=torch.bool)
        if request.kept is not None and request.kept.any():
            kept, tokens = request.kept, request.tokens
            assert tokens is not None, "a request has both or none"
            check_kept(kept, tokens, model)
            self.kept = kept.to(self.device).expand(batch, -1)
            self.order = self.order.gather(1, (~self.kept.gather(1, self.order)).byte().argsort(dim=1, stable=True))
            self.tokens.copy_(torch.where(self.kept[..., None], tokens.to(self.device), 0.0))
            self.done = self.kept.sum(1)
        self.rank = inverse(self.order)

    @property
    def tokens(self) -> Tensor:
        """[B, S, C], without the scratch slot past the end, where write() puts what is not to be kept."""
        return self._tokens[:, : self.length]

    def known_mask(self, ahead: Tensor | int = 0) -> Tensor:
        """Known tokens [B, V, S] (bool) of variants that look ``ahead`` [V] tokens past the decided ones."""
        end = self.done[:, None] + torch.as_tensor(ahead, device=self.device).reshape(1, -1)
        return self.rank[:, None] < end[..., None]

    def upcoming(self, count: int) -> tuple[Tensor, Tensor]:
        """The next ``count`` undecided positions [B, count], and which of them exist (bool)."""
        place = self.done[:, None] + torch.arange(count, device=self.device)
        return self.order.gather(1, place.clamp(max=self.length - 1)), place < self.length

    def write(self, positions: Tensor, values: Tensor, where: Tensor) -> None:
        """Put values [B, M, C] at positions [B, M] where ``where`` [B, M] (bool)."""
        place = torch.where(where, positions, self.length)[..., None].expand(-1, -1, values.shape[-1])
        self._tokens.scatter_(1, place, values)

    def extent(self) -> tuple[int, int]:
        """The least and the greatest number of known tokens in any image. Reads the device."""
        low, high = torch.stack(self.done.aminmax()).tolist()
        return low, high

    def record(self) -> Record:
        """A new record, which has the sampling order and the kept tokens."""
        record = Record.empty(self.length, len(self.order), self.device, CONTINUOUS_FIELDS)
        everywhere = torch.ones_like(self.kept)
        record.write(self.order, everywhere, order=torch.arange(self.length, device=self.device))
        record.write(self.order, self.kept.gather(1, self.order), source=Source.FORCED)
        return record

    def final_tokens(self) -> Tensor:
        """The tokens of complete images. Raises ValueError if some are not finite."""
        if not self.tokens.isfinite().all():
            raise ValueError(
                "The model sampled tokens that are not finite (NaN or infinite): its arithmetic overflowed. Load it in "
                "fp32 or bf16 (Load AR Checkpoint, dtype), or lower the guidance."
            )
        return self.tokens.clone()

    def progress(self, passes: int) -> ContinuousProgress:
        return ContinuousProgress(self.tokens, self.known_mask()[:, 0], self.done.cpu(), self.length, passes)


def check_kept(kept: Tensor, tokens: Tensor, model: ContinuousModel) -> None:
    """Raise ValueError where the model keeps no parts, nothing is left to sample, or kept tokens are not finite."""
    if model.order is not None:
        raise ValueError(
            f"This model samples cells of {model.group} tokens in a fixed order: it cannot keep parts of an image. "
            "Remove the mask."
        )
    if kept.all():
        raise ValueError("The noise mask keeps every token of every image: nothing to generate. Mask a part.")
    if not torch.where(kept[..., None], tokens.to(kept.device), 0).isfinite().all():
        raise ValueError("The kept image has values that are not finite. Encode it again.")


def noise_bytes(request: ContinuousRequest, width: int) -> int:
    """Bytes of the noise of a forward pass that predicts ``width`` tokens per image: fp32, and the integers before."""
    return 40 * request.batch * width * (request.params.steps + 1) * request.model.channels


def noises(
    stream: Stream, positions: Tensor, channels: int, steps: int, purpose: Purpose = Purpose.NOISE
) -> tuple[Tensor, Tensor]:
    """The noise of tokens at positions [B, M]: the initial one [B, M, C] and that of the steps [T, B, M, C].

    It belongs to the position, so that two models share it (the paper's trajectory alignment).
    """
    noise = stream.normal(positions, (steps + 1) * channels, purpose).unflatten(-1, (steps + 1, channels))
    return noise[..., 0, :], noise[..., 1:, :].movedim(-2, 0)


def own_noise(
    stream: Stream, positions: Tensor, channels: int, purpose: Purpose = Purpose.TARGET
) -> tuple[Tensor, Tensor]:
    """Normal [B, M, C] and uniform [B, M] numbers to sample from a Distribution."""
    return stream.normal(positions, channels, purpose), stream.uniform(positions, purpose, draw=1)


def masked_guidance(params: ContinuousParams, before: Tensor, after: Tensor, length: int) -> Tensor:
    """MAR's guidance scale: constant, or 1 + (cfg - 1) * known / S, the pass's own tokens counted (but never all)."""
    share = after.clamp(max=length - 1) / length if params.cfg_schedule == "linear" else torch.ones_like(after)
    return 1 + (params.cfg - 1) * share.float()
