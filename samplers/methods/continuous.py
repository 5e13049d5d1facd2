"""Continuous speculative decoding (Wang et al., "Continuous speculative decoding for autoregressive image generation",
2024, arXiv:2411.11925).

A small model drafts vectors one by one, and the target verifies them in one forward pass. With shared noise (the
paper's trajectory alignment) both heads end in Gaussians close to each other: q = N(mu_q, sigma_q) and
p = N(mu_p, sigma_p).

Section 3 of the paper accepts x with min(1, Sigma p(x)/q(x)), stops at the first rejection, and resamples from
[Sigma p - q]+ by acceptance-rejection. Its published code widens both Gaussians 42 times in the test (the paper does
not), verifies every token of the block in place without seeing the drafts, and inverts Sigma. A rejected token becomes
a sample of [p - q / Sigma']+ with that inverted Sigma' and without widening, or zeros if 100 proposals of it fail. Here
are

  mode "block"      verify every token in place, as that code does, but replace a rejected one by the target's own
                    sample, not by one of the residual. Fast; approximate within ``tolerance``.
  mode "prefix"     the paper's algorithm 1 with that tolerance: the first rejection ends the block; without one, one
                    more token is sampled.
  mode "exact"      "prefix" without widening and without Sigma, where both models add the noise of their last step:
                    given the shared noise this is ordinary speculative sampling between two Gaussians, and exact. (MAR
                    itself adds no noise in its last step. Two point masses never match, so any speed-up there is a
                    tolerance.)
  mode "printed"    algorithm 1 to the letter: "exact" but for Sigma, which biases it.
  mode "published"  "block" with the Sigma, residual and zeros of the published code.

Sigma (eq. 8) is off by default in the first two: any other value biases the output distribution, and where Sigma p < q
everywhere the residual is empty.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..continuous_contract import Canvas, ContinuousModel, ContinuousRequest, noise_bytes, noises, own_noise
from ..continuous_distributions import Distribution, Normal, join
from ..contract import Method, Result
from ..engine.session import Session, continuous_session_key, use_session
from ..layout import TokenLayout
from ..rng import Purpose, Stream
from ..settings import check_settings, setting
from ..trace import Source

log = logging.getLogger(__name__)
CONDITIONS = ("prefix", "drafts")
PATHS = {"off": 0.0, "paper": 1.0, "official": -1.0}  # sign of log Sigma
TRIES = 100  # proposals of the residual, as in the published code; giving up then costs up to 0.4 % in total variation
EXACT_TRIES = 100  # times as many in patient modes: "exact" is then exact to less than 0.004 % a token
MAX_VALUE = 1e10  # no model samples numbers this large: such a draft is garbage, as NaN is
SMALLEST_KAPPA, LARGEST_KAPPA = 1e-6, 1e15  # tolerances of zero and infinity


@dataclass(frozen=True)
class Decisions:
    """What the modes decide differently.

    in_place: every draft is decided by itself; else the first rejection ends the block. noise: tokens have the noise of
    the last denoising step. widened: the test widens both Gaussians to the tolerance; else kappa is 1. path: the Sigma
    of test and residual, one of PATHS; None: that of the method. residual: a rejected draft is replaced by a sample of
    the residual; else by the target's own. patient: EXACT_TRIES times as many proposals of the residual. zeros: if all
    of them fail, the token is zeros; else the last proposal.
    """

    in_place: bool = False
    noise: bool = False
    widened: bool = True
    path: str | None = None
    residual: bool = True
    patient: bool = False
    zeros: bool = False


_EXACT = Decisions(noise=True, widened=False, path="off", patient=True)
MODES = {
    "block": Decisions(in_place=True, residual=False),
    "prefix": Decisions(),
    "exact": _EXACT,
    "printed": replace(_EXACT, path="paper"),
    "published": Decisions(in_place=True, path="official", zeros=True),
}


def log_ratio(x: Tensor, p: Distribution, q: Distribution, kappa: float = 1.0, sign: float = 0.0) -> Tensor:
    """log of Sigma^sign p(x)/q(x) [...] (eq. 9), the exponents of both Gaussians widened ``kappa`` times.

    log Sigma = path_q - path_p (eq. 8), clamped to +-50. Infinite kappa accepts everything (infinite ratio). Mixtures
    have neither widening nor Sigma.
    """
    if not isinstance(p, Normal) or not isinstance(q, Normal):
        return p.log_density(x) - q.log_density(x)
    if kappa > LARGEST_KAPPA:
        return torch.full(x.shape[:-1], math.inf, device=x.device)
    kappa = max(kappa, SMALLEST_KAPPA)
    to_p, to_q = ((x - g.mean).square() / (2 * kappa**2) * (-2 * g.log_std).exp() for g in (p, q))
    return (to_q - to_p + q.log_std - p.log_std).sum(-1) + sign * (q.path - p.path).clamp(-50, 50)


def sample_residual(
    p: Distribution, q: Distribution, normal: Tensor, uniform: Tensor, accept: Tensor, sign: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sample [..., C] from norm([Sigma p - q]+) by acceptance-rejection (eqs. 12, 13); returns it and the tries [...].

    Every try is a proposal from p. normal [n, ..., C], uniform and accept [n, ...]: random numbers of n tries. If none
    is accepted, the last proposal is returned, and -n.
    """
    proposals = p.sample(normal, uniform)
    return first_accepted(proposals, log_ratio(proposals, p, q, sign=sign), accept)


def first_accepted(proposals: Tensor, ratio: Tensor, accept: Tensor) -> tuple[Tensor, Tensor]:
    """The first of n proposals [n, ..., C] with accept < 1 - exp(-ratio) [n, ...], and its number from 1 [...].

    If none passes, the result is the last proposal and the number -n. A ratio of NaN means that the draft had no valid
    distribution: the first proposal passes.
    """
    taken = ~(accept >= -torch.expm1(-ratio))
    found, tries = taken.any(0), len(proposals)
    first = torch.where(found, taken.byte().argmax(0), tries - 1)
    y = proposals.gather(0, first[None, ..., None].expand(1, *proposals.shape[1:]))[0]
    return y, torch.where(found, first + 1, -tries)


@dataclass(frozen=True)
class ContinuousSpeculative(Method):
    """Draft with a small model, verify with the target.

    length: tokens (or cells) drafted per round. prefill: fraction of the image that the target samples alone first.
    mode: see above. condition: what the target sees of a block when it verifies a token of it: "prefix" (nothing: one
    row for the whole block, modes "block" and "published" only) or "drafts" (the earlier drafts: one variant of the
    image per token). Default: "prefix" in these two modes, else "drafts". tolerance: width, in units of the latent
    (whose standard deviation is about 1), within which a draft passes for a target sample. kappa is tolerance / width
    of the last denoising step (proportional to the temperature); 0.26 is the published code's 42. Not used in modes
    "exact" and "printed". path: log Sigma "off", as in the "paper", or inverted as in the "official" code; modes
    "printed" and "published" have their own, and "exact" must have none. aligned: do both models share their noise.
    """

    drafter: ContinuousModel
    length: int = setting(8, 1)
    prefill: float = setting(0.05, 0, 1)
    mode: str = setting("block", options=tuple(MODES))
    condition: str | None = setting(None, options=CONDITIONS)
    tolerance: float = 0.26
    path: str = setting("off", options=tuple(PATHS))
    aligned: bool = True
    name: ClassVar[str] = "continuous_speculative"
    continuous: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        return self.mode == "exact"

    @property
    def decisions(self) -> Decisions:
        return MODES[self.mode]

    @property
    def sigma(self) -> str:
        """The Sigma that is applied, one of PATHS."""
        return self.decisions.path or self.path

    @property
    def sees_drafts(self) -> bool:
        return (self.condition or ("prefix" if self.decisions.in_place else "drafts")) == "drafts"

    @property
    def variants(self) -> int:
        """Variants of every image in a forward pass of the target."""
        return self.length + (not self.decisions.in_place) if self.sees_drafts else 1

    def check(self, request: ContinuousRequest) -> None:
        request.params.check()
        check_settings(self)
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}, but must be at least 0.")
        if not self.decisions.in_place and self.condition == "prefix":
            raise ValueError(
                f"Mode {self.mode!r} needs a target that sees the earlier drafts. Use condition 'drafts' "
                "(target_sees: what is decided, and earlier guesses)."
            )
        if self.mode == "exact" and self.path != "off":
            raise ValueError(
                "Mode 'exact' does not support Sigma, which biases the distribution. Use path 'off' (sigma)."
            )
        if self.decisions.noise and request.params.kind == "ddim":
            raise ValueError(
                f"Mode {self.mode!r} needs the noise of the last denoising step, which ddim lacks. "
                "Use ddpm (head_sampler)."
            )
        if not self.decisions.in_place and request.model.group > 1:
            raise ValueError(
                f"This model samples cells of {request.model.group} tokens. Use mode 'block' with it "
                "(each guess alone)."
            )
        if request.params.kind == "ddpm" and not request.params.temperature > 0:
            raise ValueError(
                "temperature is 0, but must be above 0 with ddpm, since acceptance compares widths. "
                "Set it to -1 for the model's default."
            )
        pair = [(model.channels, model.group) for model in (self.drafter, request.model)]
        if pair[0] != pair[1]:
            raise ValueError(
                "The drafter has {} channels and samples {} tokens at once, but the model has {} and "
                "samples {}. Load a drafter that was trained for it.".format(*pair[0], *pair[1])
            )

    def kappa(self, request: ContinuousRequest) -> float:
        """How much the test widens both Gaussians."""
        if not self.decisions.widened:
            return 1.0
        temperature = request.params.temperature if request.params.kind == "ddpm" else 1
        return self.tolerance / (request.model.schedule(request.params).last_width * temperature)

    def width(self, request: ContinuousRequest) -> int:
        return min(self.length * request.model.group, request.length)

    def describe(self, request: ContinuousRequest) -> dict[str, Any]:
        settings = {
            "method": self.name,
            "length": self.length,
            "prefill": self.prefill,
            "mode": self.mode,
            "condition": "drafts" if self.sees_drafts else "prefix",
            "path": self.sigma,
            "aligned": self.aligned,
            "lossless": self.lossless,
        }
        if self.decisions.widened:
            settings |= {"tolerance": self.tolerance, "kappa": self.kappa(request)}
        return settings | {name: value for name, value in asdict(request.params).items() if name != "iterations"}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        in_place = settings["mode"] in [name for name, mode in MODES.items() if mode.in_place]
        seen = ", seen by the model" if in_place and settings["condition"] == "drafts" else ""
        return f"small model, {'blocks' if in_place else 'prefixes'} of {settings['length']}{seen}"

    def run_bytes(self, request: ContinuousRequest) -> int:
        model, width = request.model, self.width(request)
        rows, variants = request.batch * (1 + request.guided), min(self.variants, width // model.group + 1)
        target = model.run_bytes(rows * variants, request.length, -(-width // variants))
        noise = noise_bytes(request, width)
        if self.decisions.in_place and self.decisions.residual:  # proposals for every token of the block
            noise += noise * TRIES // (request.params.steps + 1)
        return noise + target + self.drafter.run_bytes(rows, request.length, model.group)

    def session_key(self, request: ContinuousRequest) -> Hashable:
        return continuous_session_key(request, self.name, self.drafter)

    def sample(self, request: ContinuousRequest) -> Result:
        self.check(request)
        started = time.perf_counter()
        with use_session(self, request, self.drafter) as session:
            run = ContinuousRun(self, request, session)
            run.prefill()
            while run.lowest < run.canvas.length:
                run.round()
        seconds, layout = time.perf_counter() - started, TokenLayout.plain(*request.grid)
        trace = run.record.finish(layout, request.seed, self.describe(request), seconds, draft_passes=run.draft_passes)
        verified = trace.positions["depth"] > 0
        if verified.any() and (trace.positions["log_ratio"][verified] == -math.inf).all():
            log.warning(
                "No draft could be used in this run, so the drafter saved nothing: its numbers are NaN, infinite or "
                "absurd. The image is unaffected. Reload the drafter's file, or load the model with another dtype."
            )
        return Result(run.canvas.final_tokens(), trace)


class ContinuousRun:
    """One run: draft, verify and decide, round by round, until every image is complete."""

    def __init__(self, method: ContinuousSpeculative, request: ContinuousRequest, session: Session):
        model, batch = request.model, request.batch
        self.method, self.request, self.model, self.params = method, request, model, request.params
        self.group = model.group
        self.schedule, self.kappa = model.schedule(self.params), method.kappa(request)
        self.stream = Stream.of(request.seed, batch, model.device)
        self.canvas = Canvas(request, self.stream)
        self.record = self.canvas.record()
        prompts = (request.conditioning, request.negative, batch, request.grid, request.guided, session.active_graphs)
        self.state, self.draft_state = model.start(*prompts), method.drafter.start(*prompts)
        self.lowest, self.highest = self.canvas.extent()
        self.passes = self.rounds = self.draft_passes = 0
        self.verified_passes = torch.zeros_like(self.canvas.done)[:, None]  # that decided tokens of the image

    def predict(
        self,
        model: ContinuousModel,
        state: Any,
        ahead: Tensor | int,
        positions: Tensor,
        first: int,
        seen: int,
        noise: tuple[Tensor, Tensor],
    ) -> Distribution:
        """The Distribution [B, n] at undecided positions [B, n], of which the first is number ``first``.

        ahead, one per variant: how many drafts the variant sees; it predicts its share of the positions.
        """
        canvas, batch = self.canvas, len(positions)
        known = canvas.known_mask(ahead)
        variants = known.shape[1]
        before = canvas.done[:, None] + first + torch.arange(positions.shape[1], device=canvas.device)
        before = before // self.group * self.group
        cfg = model.guidance(self.params, before, before + self.group, canvas.length)
        noise0, noise_t = noise
        shape = (batch, variants, -1)
        distribution = model.predict(
            state,
            canvas.tokens,
            known,
            positions.reshape(shape),
            min(seen, canvas.length),
            cfg.reshape(shape),
            self.params.temperature,
            noise0.reshape(*shape, model.channels),
            noise_t.reshape(len(noise_t), *shape, model.channels),
            self.schedule,
        )
        return distribution.map(lambda t: t.flatten(1, 2))

    def noise(self, positions: Tensor, purpose: Purpose = Purpose.NOISE) -> tuple[Tensor, Tensor]:
        return noises(self.stream, positions, self.model.channels, self.schedule.steps, purpose)

    def take(self, distribution: Distribution, positions: Tensor, purpose: Purpose) -> Tensor:
        """A token [B, n, C] of the distribution: with the last step's noise, or as the model itself samples it."""
        numbers = own_noise(self.stream, positions, self.model.channels, purpose)
        return distribution.sample(*numbers) if self.method.decisions.noise else distribution.token(*numbers)

    def prefill(self) -> None:
        """The target samples the first part of every image alone (section 3.2), one token or cell per forward pass."""
        canvas, group = self.canvas, self.group
        wanted = round(self.method.prefill * canvas.length / group) * group
        while self.lowest < wanted:
            positions, _ = canvas.upcoming(group)
            active = (canvas.done < wanted)[:, None]
            distribution = self.predict(self.model, self.state, 0, positions, 0, self.highest, self.noise(positions))
            canvas.write(positions, self.take(distribution, positions, Purpose.TARGET), active.expand_as(positions))
            self.record.write(
                positions, active.expand_as(positions), finalised_at=self.verified_passes, source=Source.PREFILL
            )
            self.finish_pass(active[:, 0] * group, accepted=torch.zeros_like(canvas.done), width=group)

    def round(self) -> None:
        """Draft a block, verify it, decide."""
        method, canvas, group = self.method, self.canvas, self.group
        left = -(-(canvas.length - self.lowest) // group)  # tokens, or cells, of the slowest image
        drafts = min(method.length, left) * group
        predicted = drafts + (not method.decisions.in_place)  # and the token after the block
        positions, exist = canvas.upcoming(predicted)
        noise = self.noise(positions)
        noise_q = noise if method.aligned else self.noise(positions[:, :drafts], Purpose.DRAFT_NOISE)

        distributions, proposed = [], []
        for start in range(0, drafts, group):
            here = slice(start, start + group)
            distribution = self.predict(
                method.drafter,
                self.draft_state,
                start,
                positions[:, here],
                start,
                self.highest + start,
                (noise_q[0][:, here], noise_q[1][:, :, here]),
            )
            draft = self.take(distribution, positions[:, here], Purpose.DRAFT)
            usable = (draft.abs() < MAX_VALUE).all(-1, keepdim=True)
            # Hidden tokens are multiplied by zero in attention, and 0 * NaN would be NaN.
            canvas.write(positions[:, here], draft.where(usable, 0.0), exist[:, here])
            proposed.append(draft.where(usable, math.nan))
            distributions.append(distribution)
            self.draft_passes += 1
        q, x = join(distributions), torch.cat(proposed, dim=1)

        ahead = torch.arange(0, predicted, group, device=canvas.device) if method.sees_drafts else 0
        seen = self.highest + (predicted - group if method.sees_drafts else 0)
        p = self.predict(self.model, self.state, ahead, positions, 0, seen, noise)
        self.rounds += 1
        (self.decide_block if method.decisions.in_place else self.decide_prefix)(p, q, x, positions, exist)

    def verify(self, p: Distribution, q: Distribution, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Which drafts [B, n] pass the test log u <= log ratio, and what is recorded of the test. NaN never passes."""
        ratio = log_ratio(x, p, q, self.kappa, PATHS[self.method.sigma])
        ratio = torch.where(x.isfinite().all(-1) & ~ratio.isnan(), ratio, -math.inf)
        # 1 - u is never 0, whose log would let anything pass.
        accept = (1 - self.stream.uniform(positions, Purpose.ACCEPT)).log() <= ratio
        test = {
            "log_ratio": ratio,
            "block": self.rounds,
            "depth": torch.arange(x.shape[1], device=x.device) // self.group + 1,
        }
        if isinstance(p, Normal) and isinstance(q, Normal):
            test["distance"] = (q.mean - p.mean).norm(dim=-1).nan_to_num(nan=math.inf)
        return accept, test

    def decide_block(self, p: Distribution, q: Distribution, x: Tensor, positions: Tensor, exist: Tensor) -> None:
        """Decide every token by itself: the draft if it passes, else the target's own sample or one of the residual."""
        accept, test = self.verify(p, q, x, positions)
        if self.method.decisions.residual:
            other, tries = self.resample(p, q, positions, exist & ~accept)
            test["tries"] = torch.where(accept, 0, tries)
        else:
            other = self.take(p, positions, Purpose.TARGET)
        self.canvas.write(positions, torch.where(accept[..., None], x, other), exist)
        source = torch.where(accept, Source.RELAXED, Source.RESIDUAL)
        self.record.write(positions, exist, finalised_at=self.verified_passes, source=source, **test)
        self.finish_pass(exist.sum(1), (accept & exist).sum(1), x.shape[1])

    def decide_prefix(self, p: Distribution, q: Distribution, x: Tensor, positions: Tensor, exist: Tensor) -> None:
        """Decide the drafts before the first rejection, then one token from the residual, or from p without one."""
        n = x.shape[1]
        p_drafts = p.map(lambda t: t[:, :n])
        accept, test = self.verify(p_drafts, q, x, positions[:, :n])
        accepted = (accept & exist[:, :n]).long().cumprod(1).sum(1)
        row = torch.arange(len(x), device=x.device)[:, None]
        last = accepted[:, None]  # place of the token after the accepted ones
        at = positions.gather(1, last)
        rejected = last < n
        draft, there = last.clamp(max=n - 1), exist.gather(1, last)
        resampled, tries = self.resample(
            p_drafts.map(lambda t: t[row, draft]), q.map(lambda t: t[row, draft]), at, there & rejected
        )
        bonus = self.take(p.map(lambda t: t[row, last]), at, Purpose.TARGET)
        self.canvas.write(at, torch.where(rejected[..., None], resampled, bonus), there)

        is_accepted = torch.arange(n, device=x.device) < last
        source = torch.where(is_accepted, Source.ACCEPTED if self.method.lossless else Source.RELAXED, Source.RESIDUAL)
        until = is_accepted | (torch.arange(n, device=x.device) == last)
        self.record.write(
            positions[:, :n], until & exist[:, :n], finalised_at=self.verified_passes, source=source, **test
        )
        self.record.write(at, there & rejected, tries=tries)
        self.record.write(
            at, there & ~rejected, finalised_at=self.verified_passes, source=Source.BONUS, block=self.rounds
        )
        self.finish_pass(accepted + there[:, 0], accepted, n + 1)

    def resample(self, p: Distribution, q: Distribution, positions: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """A token [B, n, C] from the residual at positions [B, n], and the tries it took (negative: all failed).

        Patient modes go on while a ``wanted`` token [B, n] has failed.
        """
        decisions, sign = self.method.decisions, PATHS[self.method.sigma]
        token, count = sample_residual(p, q, *self.proposals(positions, 0), sign)
        for more in range(1, EXACT_TRIES if decisions.patient else 1):
            unfinished = count < 0
            if not (unfinished & wanted).any():
                break
            y, tries = sample_residual(p, q, *self.proposals(positions, more), sign)
            token = torch.where(unfinished[..., None], y, token)
            tries = torch.where(tries > 0, more * TRIES + tries, tries - more * TRIES)
            count = torch.where(unfinished, tries, count)
        return (token.where(count[..., None] > 0, 0.0) if decisions.zeros else token), count

    def proposals(self, positions: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """The random numbers of TRIES proposals at positions [B, m]: normal [n, B, m, C], uniform twice [n, B, m]."""
        count = positions.shape[1]
        draws = torch.arange(part * TRIES, (part + 1) * TRIES, device=positions.device).repeat(count)
        many = positions.repeat_interleave(TRIES, dim=1)
        normal = self.stream.normal(many, self.model.channels, Purpose.REDRAW, draw=3 * draws)
        uniform, accept = (self.stream.uniform(many, Purpose.REDRAW, draw=3 * draws + i) for i in (1, 2))
        return tuple(t.unflatten(1, (count, TRIES)).movedim(2, 0) for t in (normal, uniform, accept))

    def finish_pass(self, committed: Tensor, accepted: Tensor, width: int) -> None:
        """Commit tokens, record the round, call the callback."""
        self.canvas.done = self.canvas.done + committed
        self.verified_passes = self.verified_passes + (committed > 0)[:, None]
        self.record.round(accepted=accepted, committed=committed, width=width)
        self.passes += 1
        self.lowest, self.highest = self.canvas.extent()
        if self.request.callback:
            self.request.callback(self.canvas.progress(self.passes))
