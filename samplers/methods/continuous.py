"""Continuous speculative decoding (anonymous, "Continuous speculative decoding for autoregressive image generation").

A small model drafts vectors one after another, the target judges them all in one pass. With shared noise (the paper's
trajectory alignment) both heads end in Gaussians close to each other: q = N(mu_q, sigma_q) and p = N(mu_p, sigma_p).

Section 3 of the paper accepts x with min(1, Sigma p(x)/q(x)), stops at the first rejection, and redraws from
[Sigma p - q]+ by acceptance-rejection. Its published code widens both Gaussians 42 times, judges every token of the
block in place without seeing the drafts, and inverts Sigma. All of that is here:

  mode "block"   judge every token in place, put the target's own sample where it is rejected. Fast; approximate within
                 ``tolerance``.
  mode "prefix"  the paper's algorithm 1: the first rejection ends the block, one more token if there is none.
  mode "exact"   "prefix" without widening and without Sigma, both models adding the noise of their last step: given
                 the shared noise this is ordinary speculative sampling between two Gaussians, and exact. (MAR itself
                 adds no noise in its last step; a delta cannot be matched, so any speed-up there is a tolerance.)

Sigma (eq. 8) is off by default: at any other value the output law is biased, and where Sigma p < q everywhere the
residual is empty.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels import continuous as kernels
from ..continuous_contract import Canvas, ContinuousModel, ContinuousRequest, noise_bytes, noises, own_noise
from ..contract import Method, Result
from ..distributions import Law, Normal, join
from ..layout import TokenLayout
from ..rng import Purpose, Stream
from ..trace import Source

log = logging.getLogger(__name__)
MODES = ("block", "prefix", "exact")
CONDITIONS = ("prefix", "drafts")
PATHS = {"off": 0.0, "paper": 1.0, "official": -1.0}  # sign of log Sigma
TRIES = 100  # proposals of the residual, as in the published code; giving up then costs up to 0.4 % in total variation
PATIENCE = 100  # times as many in mode "exact", so that it is exact to less than 0.004 %
ABSURD = 1e10  # no model draws a number as large: such a guess is garbage, as NaN is
SMALLEST_KAPPA, LARGEST_KAPPA = 1e-6, 1e15  # tolerances of zero and infinity


def log_ratio(x: Tensor, p: Law, q: Law, kappa: float = 1.0, sign: float = 0.0) -> Tensor:
    """log of Sigma^sign p(x)/q(x) [...] (eq. 9), the exponents of both Gaussians widened ``kappa`` times.

    log Sigma = path_q - path_p (eq. 8), clamped to +-50. Infinite kappa accepts everything (infinite ratio). Mixtures
    have neither widening nor Sigma.
    """
    if not isinstance(p, Normal) or not isinstance(q, Normal):
        return p.log_density(x) - q.log_density(x)
    if kappa > LARGEST_KAPPA:
        return torch.full(x.shape[:-1], math.inf, device=x.device)
    return kernels.log_ratio(x, _parts(p), _parts(q), max(kappa, SMALLEST_KAPPA), sign)


def _parts(law: Normal) -> kernels.Gaussian:
    return law.mean, law.log_std, law.path


def residual(
    p: Law, q: Law, normal: Tensor, uniform: Tensor, accept: Tensor, sign: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A draw [..., C] from norm([Sigma p - q]+) by acceptance-rejection (eqs. 12, 13), and the proposals it took [...].

    Proposals come from p: normal [n, ..., C], uniform and accept [n, ...] are the numbers of all n tries. Where none is
    accepted the last one stands, and the count is -n.
    """
    if isinstance(p, Normal) and isinstance(q, Normal):
        return kernels.redraw(normal, accept, _parts(p), _parts(q), sign)
    proposals = p.map(lambda t: t.expand(len(normal), *t.shape)).draw(normal, uniform)
    return kernels.first_accepted(proposals, log_ratio(proposals, p, q, sign=sign), accept)


@dataclass(frozen=True)
class ContinuousSpeculative(Method):
    """Draft with a small model, judge with the target.

    length: tokens (or cells) drafted per round. prefill: share of the picture that the target draws alone first.
    mode: see above. condition: what the target sees of a block when it judges a token of it: "prefix" (nothing: one
    pass for the whole block, mode "block" only) or "drafts" (the earlier drafts: one variant of the picture per token);
    None: "prefix" for "block", else "drafts". tolerance: width, in units of the latent (whose standard deviation is
    about 1), within which a draft passes for a target sample; the published kappa is tolerance over the width of the
    last denoising step (which is proportional to the temperature), and 0.26 is its value 42. Not used in mode "exact".
    path: log Sigma "off", as in the "paper", or inverted as in the "official" code. aligned: do both models share their
    noise.
    """

    drafter: ContinuousModel
    length: int = 8
    prefill: float = 0.05
    mode: str = "block"
    condition: str | None = None
    tolerance: float = 0.26
    path: str = "off"
    aligned: bool = True
    name: ClassVar[str] = "continuous_speculative"
    continuous: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        return self.mode == "exact"

    @property
    def sees_drafts(self) -> bool:
        return (self.condition or ("prefix" if self.mode == "block" else "drafts")) == "drafts"

    @property
    def variants(self) -> int:
        """Variants of every picture in a pass of the target."""
        return self.length + (self.mode != "block") if self.sees_drafts else 1

    def check(self, request: ContinuousRequest) -> None:
        request.params.check()
        if not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"The draft length is {self.length}, but must be a number from 1 on.")
        if not 0 <= self.prefill <= 1:
            raise ValueError(f"prefill is {self.prefill}, but must be a share from 0 to 1.")
        for name, value, options in (("mode", self.mode, MODES), ("path", self.path, PATHS),
                                     ("condition", self.condition or "prefix", CONDITIONS)):
            if value not in options:
                raise ValueError(f"{name} is {value!r}; choose one of: {', '.join(options)}.")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}, but must be 0 or more.")
        if self.mode != "block" and self.condition == "prefix":
            raise ValueError(f"Mode {self.mode!r} needs a target that sees the earlier drafts: condition 'drafts'.")
        if self.mode == "exact" and self.path != "off":
            raise ValueError("In mode 'exact' Sigma must be off: any other value would bias the pictures.")
        if self.mode == "exact" and request.params.kind == "ddim":
            raise ValueError("Mode 'exact' needs the noise of the last denoising step, which ddim has not: use ddpm.")
        if self.mode != "block" and request.model.group > 1:
            raise ValueError(f"This model draws cells of {request.model.group} tokens: use mode 'block' with it.")
        if request.params.kind == "ddpm" and not request.params.temperature > 0:
            raise ValueError("temperature is 0: acceptance compares widths, so with ddpm it must be above 0.")
        pair = [(model.channels, model.group) for model in (self.drafter, request.model)]
        if pair[0] != pair[1]:
            raise ValueError("The drafter draws {} numbers a token and {} tokens at once, the model {} and {}: they do "
                             "not belong together.".format(*pair[0], *pair[1]))

    def kappa(self, request: ContinuousRequest) -> float:
        """How many times the test widens both Gaussians."""
        if self.mode == "exact":
            return 1.0
        temperature = request.params.temperature if request.params.kind == "ddpm" else 1
        return self.tolerance / (request.model.schedule(request.params).last_width * temperature)

    def width(self, request: ContinuousRequest) -> int:
        return min(self.length * request.model.group, request.length)

    def describe(self, request: ContinuousRequest) -> dict[str, Any]:
        settings = {
            "method": self.name, "length": self.length, "prefill": self.prefill, "mode": self.mode,
            "condition": "drafts" if self.sees_drafts else "prefix", "path": self.path, "aligned": self.aligned,
            "lossless": self.lossless,
        }
        if self.mode != "exact":
            settings |= {"tolerance": self.tolerance, "kappa": self.kappa(request)}
        return settings | {name: value for name, value in asdict(request.params).items() if name != "iterations"}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        seen = ", seen by the model" if settings["mode"] == "block" and settings["condition"] == "drafts" else ""
        return f"small model, {'blocks' if settings['mode'] == 'block' else 'prefixes'} of {settings['length']}{seen}"

    def run_bytes(self, request: ContinuousRequest) -> int:
        model, width = request.model, self.width(request)
        rows, variants = request.batch * (1 + request.guided), min(self.variants, width // model.group + 1)
        target = model.run_bytes(rows * variants, request.length, -(-width // variants))
        return noise_bytes(request, width) + target + self.drafter.run_bytes(rows, request.length, model.group)

    def sample(self, request: ContinuousRequest) -> Result:
        self.check(request)
        started = time.perf_counter()
        run = Run(self, request)
        run.prefill()
        while run.lowest < run.canvas.length:
            run.round()
        seconds, layout = time.perf_counter() - started, TokenLayout.plain(*request.grid)
        trace = run.record.finish(
            layout, request.seed, self.describe(request), seconds, draft_passes=run.draft_passes
        )
        judged = trace.positions["depth"] > 0
        if judged.any() and (trace.positions["log_ratio"][judged] == -math.inf).all():
            log.warning(
                "No guess of the drafter could be used in this run, so it saved nothing: its numbers are NaN, infinite "
                "or absurd. The picture is sound. Load the drafter's file anew, or the model with another dtype."
            )
        return Result(run.canvas.finished(), trace)


class Run:
    """The state of one sampling run: draft -> judge -> decide, until every picture is complete."""

    def __init__(self, method: ContinuousSpeculative, request: ContinuousRequest):
        model, batch = request.model, request.batch
        self.method, self.request, self.model, self.params = method, request, model, request.params
        self.group = model.group
        self.schedule, self.kappa = model.schedule(self.params), method.kappa(request)
        self.stream = Stream.of(request.seed, batch, model.device)
        self.canvas = Canvas(request, self.stream)
        self.record = self.canvas.record()
        prompts = (request.conditioning, request.negative, batch, request.grid, request.guided)
        self.state, self.draft_state = model.start(*prompts), method.drafter.start(*prompts)
        self.lowest, self.highest = self.canvas.extent()
        self.passes = self.rounds = self.draft_passes = 0
        self.turn = torch.zeros_like(self.canvas.done)[:, None]  # passes a picture took part in: kept ones may idle

    def predict(
        self, model: ContinuousModel, state: Any, ahead: Tensor | int, positions: Tensor, first: int, seen: int,
        noise: tuple[Tensor, Tensor],
    ) -> Law:
        """The law [B, n] at the undecided positions [B, n] from the ``first`` on, cut into one part per variant."""
        canvas, batch = self.canvas, len(positions)
        known = canvas.known(ahead)
        variants = known.shape[1]
        before = canvas.done[:, None] + first + torch.arange(positions.shape[1], device=canvas.device)
        before = before // self.group * self.group
        cfg = model.guidance(self.params, before, before + self.group, canvas.length)
        noise0, noise_t = noise
        shape = (batch, variants, -1)
        law = model.predict(
            state, canvas.tokens, known, positions.reshape(shape), min(seen, canvas.length), cfg.reshape(shape),
            self.params.temperature, noise0.reshape(*shape, model.channels),
            noise_t.reshape(len(noise_t), *shape, model.channels), self.schedule,
        )
        return law.map(lambda t: t.flatten(1, 2))

    def noise(self, positions: Tensor, purpose: Purpose = Purpose.NOISE) -> tuple[Tensor, Tensor]:
        return noises(self.stream, positions, self.model.channels, self.schedule.steps, purpose)

    def take(self, law: Law, positions: Tensor, purpose: Purpose) -> Tensor:
        """A token of the law [B, n]: drawn from it in mode "exact", else what the model itself takes."""
        numbers = own_noise(self.stream, positions, self.model.channels, purpose)
        return law.draw(*numbers) if self.method.mode == "exact" else law.token(*numbers)

    def prefill(self) -> None:
        """The target draws the first ``prefill`` of every picture alone (section 3.2), one token or cell a pass."""
        canvas, group = self.canvas, self.group
        wanted = round(self.method.prefill * canvas.length / group) * group
        while self.lowest < wanted:
            positions, _ = canvas.upcoming(0, group)
            behind = (canvas.done < wanted)[:, None]
            law = self.predict(self.model, self.state, 0, positions, 0, self.highest, self.noise(positions))
            canvas.write(positions, self.take(law, positions, Purpose.TARGET), behind.expand_as(positions))
            self.record.write(
                positions, behind.expand_as(positions), finalised_at=self.turn, source=Source.PREFILL
            )
            self.finish_pass(behind[:, 0] * group, accepted=torch.zeros_like(canvas.done), width=group)

    def round(self) -> None:
        """Draft a block, judge it, decide."""
        method, canvas, group = self.method, self.canvas, self.group
        left = -(-(canvas.length - self.lowest) // group)  # tokens, or cells, of the picture that is farthest behind
        drafts = min(method.length, left) * group
        judged = drafts + (method.mode != "block")  # and the token behind the block
        positions, exist = canvas.upcoming(0, judged)
        noise = self.noise(positions)
        noise_q = noise if method.aligned else self.noise(positions[:, :drafts], Purpose.DRAFT_NOISE)

        laws, guesses = [], []
        for start in range(0, drafts, group):
            here = slice(start, start + group)
            law = self.predict(
                method.drafter, self.draft_state, start, positions[:, here], start, self.highest + start,
                (noise_q[0][:, here], noise_q[1][:, :, here]),
            )
            guess = self.take(law, positions[:, here], Purpose.DRAFT)
            sound = (guess.abs() < ABSURD).all(-1, keepdim=True)
            # Tokens that are not to be seen still are multiplied, by zero: which NaN would survive.
            canvas.write(positions[:, here], guess.where(sound, 0.0), exist[:, here])
            guesses.append(guess.where(sound, math.nan))
            laws.append(law)
            self.draft_passes += 1
        q, x = join(laws), torch.cat(guesses, dim=1)

        ahead = torch.arange(0, judged, group, device=canvas.device) if method.sees_drafts else 0
        seen = self.highest + (judged - group if method.sees_drafts else 0)
        p = self.predict(self.model, self.state, ahead, positions, 0, seen, noise)
        self.rounds += 1
        (self.decide_block if method.mode == "block" else self.decide_prefix)(p, q, x, positions, exist)

    def judge(self, p: Law, q: Law, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Which drafts [B, n] pass the test log u <= log ratio, and what is recorded of the test. NaN never passes."""
        ratio = log_ratio(x, p, q, self.kappa, PATHS[self.method.path])
        ratio = torch.where(x.isfinite().all(-1) & ~ratio.isnan(), ratio, -math.inf)
        # 1 - u is never 0, whose log would let anything pass.
        accept = (1 - self.stream.uniform(positions, Purpose.ACCEPT)).log() <= ratio
        test = {"log_ratio": ratio, "block": self.rounds,
                "depth": torch.arange(x.shape[1], device=x.device) // self.group + 1}
        if isinstance(p, Normal):
            test["distance"] = (q.mean - p.mean).norm(dim=-1).nan_to_num(nan=math.inf)
        return accept, test

    def decide_block(self, p: Law, q: Law, x: Tensor, positions: Tensor, exist: Tensor) -> None:
        """Every token by itself: the draft where it passes, the target's own sample elsewhere."""
        accept, test = self.judge(p, q, x, positions)
        token = torch.where(accept[..., None], x, self.take(p, positions, Purpose.TARGET))
        self.canvas.write(positions, token, exist)
        source = torch.where(accept, Source.RELAXED, Source.RESIDUAL)
        self.record.write(positions, exist, finalised_at=self.turn, source=source, **test)
        self.finish_pass(exist.sum(1), (accept & exist).sum(1), x.shape[1])

    def decide_prefix(self, p: Law, q: Law, x: Tensor, positions: Tensor, exist: Tensor) -> None:
        """The drafts before the first rejection, then one token of the residual, or of p if there is none."""
        exact, n = self.method.mode == "exact", x.shape[1]
        judged = p.map(lambda t: t[:, :n])
        accept, test = self.judge(judged, q, x, positions[:, :n])
        accepted = (accept & exist[:, :n]).long().cumprod(1).sum(1)
        row = torch.arange(len(x), device=x.device)[:, None]
        last = accepted[:, None]  # place of the token behind the accepted ones
        at = positions.gather(1, last)
        rejected = last < n
        behind, there = last.clamp(max=n - 1), exist.gather(1, last)
        redrawn, tries = self.redraw(
            judged.map(lambda t: t[row, behind]), q.map(lambda t: t[row, behind]), at, there & rejected
        )
        bonus = self.take(p.map(lambda t: t[row, last]), at, Purpose.TARGET)
        self.canvas.write(at, torch.where(rejected[..., None], redrawn, bonus), there)

        kept = torch.arange(n, device=x.device) < last
        source = torch.where(kept, Source.ACCEPTED if exact else Source.RELAXED, Source.RESIDUAL)
        until = kept | (torch.arange(n, device=x.device) == last)
        self.record.write(
            positions[:, :n], until & exist[:, :n], finalised_at=self.turn, source=source, **test
        )
        self.record.write(at, there & rejected, tries=tries)
        self.record.write(
            at, there & ~rejected, finalised_at=self.turn, source=Source.BONUS, block=self.rounds
        )
        self.finish_pass(accepted + there[:, 0], accepted, n + 1)

    def redraw(self, p: Law, q: Law, positions: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The residual's token at positions [B, 1], and the proposals it took; "exact" does not give up so soon."""
        token, count = residual(p, q, *self.proposals(positions, 0), PATHS[self.method.path])
        for more in range(1, PATIENCE if self.method.mode == "exact" else 1):
            unfinished = count < 0
            if not (unfinished & wanted).any():
                break
            y, tries = residual(p, q, *self.proposals(positions, more))
            token = torch.where(unfinished[..., None], y, token)
            tries = torch.where(tries > 0, more * TRIES + tries, tries - more * TRIES)
            count = torch.where(unfinished, tries, count)
        return token, count

    def proposals(self, positions: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """The random numbers of TRIES proposals at positions [B, 1]: normal [n, B, 1, C], uniform twice [n, B, 1]."""
        draws = torch.arange(part * TRIES, (part + 1) * TRIES, device=positions.device)
        many = positions.expand(-1, TRIES)
        normal = self.stream.normal(many, self.model.channels, Purpose.REDRAW, draw=3 * draws)
        uniform, accept = (self.stream.uniform(many, Purpose.REDRAW, draw=3 * draws + i) for i in (1, 2))
        return tuple(t.movedim(1, 0).unsqueeze(2) for t in (normal, uniform, accept))

    def finish_pass(self, committed: Tensor, accepted: Tensor, width: int) -> None:
        """Commit tokens, note the round, tell the callback."""
        self.canvas.done = self.canvas.done + committed
        self.turn = self.turn + (committed > 0)[:, None]
        self.record.round(accepted=accepted, committed=committed, width=width)
        self.passes += 1
        self.lowest, self.highest = self.canvas.extent()
        if self.request.callback:
            self.request.callback(self.canvas.progress(self.passes))
