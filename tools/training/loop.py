"""The training loop of all models: for a given time, resumable, with averaged weights."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ...device.cpu import unpack
from .muon import Muon, multiplies_bf16, split_parameters
from .settings import Setting

log = logging.getLogger(__name__)

REPORT_EVERY = 50  # steps
WARMUP_STEPS, FLAT_UNTIL = 50, 0.4  # of the learning rate; the latter of the time
M = TypeVar("M", bound=nn.Module)


def rate(fraction: float, step: int) -> float:
    """Multiplier of the learning rate: short warm-up, constant, then linear down to 2 %."""
    decay = 1.0 if fraction < FLAT_UNTIL else 1.0 - 0.98 * (fraction - FLAT_UNTIL) / (1.0 - FLAT_UNTIL)
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


class Average(Generic[M]):
    """Exponential moving average of a module's parameters; the first steps use a shorter memory."""

    def __init__(self, module: M, decay: float) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        unpack(self.module)  # it may have generated images
        decay = min(self.decay, (step + 1) / (step + 10))
        for mine, theirs in zip(self.module.parameters(), module.parameters(), strict=True):
            mine.lerp_(theirs, 1.0 - decay)


class Training(Generic[M]):
    """Training of a module for ``minutes``, resumed from ``file`` where an earlier run has written it.

    All parameters that require a gradient are trained: matrices by Muon, the others, and those whose names contain one
    of ``keep_out`` (input and output layers), by AdamW. The learning rate follows the elapsed share of the time, so
    that training ends on time on any machine. ``average`` is the averaged module, ``step`` the number of steps done so
    far. Pass ``minutes`` as the total, including the time before a resumption.
    """

    def __init__(
        self,
        module: M,
        file: Path,
        minutes: float,
        learning_rate: float,
        keep_out: tuple[str, ...],
        decay: float = 0.995,
        weight_decay: float = 0.0,
    ) -> None:
        self.module, self.file, self.seconds, self.learning_rate = module, file, 60.0 * minutes, learning_rate
        self._average = Average(module, decay)
        self.average = self._average.module
        matrices, others = split_parameters(module, keep_out)
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=learning_rate, weight_decay=weight_decay),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        muon, adamw = self.optimizers
        self._parts: dict[str, Any] = {"model": module, "average": self.average, "muon": muon, "adamw": adamw}
        counters = {"step": 0, "spent": 0.0}
        if file.exists():
            stored = torch.load(file, map_location="cpu", weights_only=True)
            for name, part in self._parts.items():
                part.load_state_dict(stored[name])
            counters = stored["counters"]
        self.step, self._begin, self._saved_at = (
            counters["step"],
            time.monotonic() - counters["spent"],
            time.monotonic(),
        )
        log.info("%.2f M parameters", sum(p.numel() for p in module.parameters()) / 1e6)

    @property
    def spent(self) -> float:
        """Seconds of training so far, those before a resumption among them."""
        return time.monotonic() - self._begin

    @property
    def fraction(self) -> float:
        """The elapsed share of the time, 0 to 1."""
        return min(self.spent / self.seconds, 1.0) if self.seconds else 1.0

    def run(
        self, losses: Callable[[float], Mapping[str, Tensor]], held_out: Callable[[], object], save_minutes: float = 3.0
    ) -> M:
        """Train until the time is over, and return the averaged module, which ``file`` then has.

        losses: elapsed share -> scalars by name, the first of which is minimised; the others are only reported.
        held_out: what to report of the averaged module whenever the file is written.
        """
        if not self.file.exists():
            self._save()
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        begin, running, fraction = self.step, torch.zeros(()), self.fraction
        while fraction < 1.0:
            set_rate(self.optimizers, self.learning_rate, rate(fraction, self.step))
            found = losses(fraction)
            self.module.zero_grad()
            next(iter(found.values())).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self._average.update(self.module, self.step)
            self.step += 1
            values = torch.stack([value.detach().float() for value in found.values()]).cpu()
            running = running + (values - running) / min(self.step - begin, REPORT_EVERY)
            if self.step % REPORT_EVERY == 0:
                numbers = ", ".join(f"{name} {value:.4f}" for name, value in zip(found, running.tolist(), strict=True))
                log.info("step %d, %.1f min: %s", self.step, self.spent / 60, numbers)
            fraction = self.fraction
            if fraction >= 1.0 or time.monotonic() - self._saved_at >= 60.0 * save_minutes:
                self._save()
                log.info("step %d, held out: %s", self.step, held_out())
        return self.average

    def _save(self) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        partial = self.file.with_suffix(".partial")
        torch.save({**state, "counters": {"step": self.step, "spent": self.spent}}, partial)
        partial.replace(self.file)
        self._saved_at = time.monotonic()


def restored(module: M, file: Path) -> M:
    """The module with the averaged weights that a training wrote, on the CPU, for inference."""
    module.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["average"])
    return module.eval().requires_grad_(False)


def set_rate(optimizers: list[torch.optim.Optimizer], base: float, multiplier: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = base * multiplier


def autocast(setting: Setting) -> Callable[[], torch.autocast]:
    """The mixed-precision context of a setting: bf16 if that is fast, else none."""
    return lambda: torch.autocast(setting.device, torch.bfloat16, enabled=multiplies_bf16(setting.device))
