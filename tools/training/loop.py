"""Shared by the training loops: a time budget, averaged weights, resumable checkpoints."""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Budget:
    """Wall-clock budget; learning rates follow the elapsed fraction, so training ends on time on any machine."""

    def __init__(self, minutes: float, already_spent: float = 0.0) -> None:
        self.seconds = minutes * 60.0
        self.begin = time.monotonic() - already_spent

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begin

    @property
    def fraction(self) -> float:
        return min(self.spent / self.seconds, 1.0)


def rate(fraction: float, step: int, warmup_steps: int = 50, flat_until: float = 0.4) -> float:
    """Multiplier of the learning rate: short warm-up, constant, then linear down to 2 %."""
    decay = 1.0 if fraction < flat_until else 1.0 - 0.98 * (fraction - flat_until) / (1.0 - flat_until)
    return min(1.0, (step + 1) / warmup_steps) * decay


class Average:
    """Exponential moving average of a module's parameters; the first steps use a shorter memory."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))
        for mine, theirs in zip(self.module.parameters(), module.parameters(), strict=True):
            mine.lerp_(theirs, 1.0 - decay)


class Checkpoint:
    """Saves named stateful objects to one file, at most every ``minutes``."""

    def __init__(self, file: Path, minutes: float = 3.0, **parts) -> None:
        self.file, self.parts, self.every = file, parts, minutes * 60.0
        self.saved_at = time.monotonic()

    def resume(self) -> dict | None:
        """Restores the parts and returns the counters of the last save, or None if there is no file."""
        if not self.file.exists():
            return None
        stored = torch.load(self.file, map_location="cpu", weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(stored[name])
        return stored["counters"]

    def save(self, force: bool = False, **counters) -> bool:
        """Writes the file if it is due; returns whether it did."""
        if not force and time.monotonic() - self.saved_at < self.every:
            return False
        state = {name: part.state_dict() for name, part in self.parts.items()}
        partial = self.file.with_suffix(".partial")
        torch.save({**state, "counters": counters}, partial)
        partial.replace(self.file)
        self.saved_at = time.monotonic()
        return True


class Team:
    """Processes that share a batch and average their gradients (on a busy CPU, faster than threads)."""

    def __init__(self, rank: int = 0, size: int = 1, meeting_point: str = "") -> None:
        self.rank, self.size = rank, size
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size)

    def agree(self, parameters: list[nn.Parameter], fraction: float) -> float:
        """Averages the gradients in place and returns the averaged ``fraction``, so that all stop at the same step."""
        if self.size == 1:
            return fraction
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([torch.tensor([fraction]), *(g.flatten() for g in gradients)])
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, flat[1:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        return float(flat[0])


def set_rate(optimizers: list[torch.optim.Optimizer], base: float, multiplier: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = base * multiplier


def multiplies_bf16(device: str) -> bool:
    """Whether the device has matrix units for bf16. On CPUs without them, bf16 is far slower than fp32."""
    return device != "cpu" or torch.cpu._is_avx512_bf16_supported()


def autocast(setting) -> Callable:
    """The mixed-precision context of a setting: bf16 if that is fast, else none."""
    return lambda: torch.autocast(setting.device, torch.bfloat16, enabled=multiplies_bf16(setting.device))


def compiled(setting, function: Callable) -> Callable:
    """The function, compiled if the setting says so."""
    return torch.compile(function, dynamic=False) if setting.compile else function
