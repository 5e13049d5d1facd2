"""Table 6 of "Continuous speculative decoding" (appendix A.1.1): ratios of whole denoising paths, for a pair of models.

    python -m tools.benchmarks path_ratios [--model NAME --drafter FILE] [--images 8] [--tolerance 0.26] [--out FILE]

Every draft token of blocks of four is denoised by drafter (path Y_q) and model, and the ratio of the densities of both
paths is computed: p(Y_q)/q(Y_q) on the drafter's path (eq. 2), and p(Y_p)/q(Y_q) with paths of their own that end in
the drafter's token (eq. 4), whose noise is shared (aligned) or not. "value" is the mean ratio, as the paper says; as
few paths dominate it, the mean logarithm stands beside it. "acceptance rate" is the mean of min(1, ratio). Both with
the last step's Gaussians as they are, and widened to the tolerance. For models with a diffusion head (MAR, Harmon).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.models.diffusion_head import DiffusionHead, Schedule
from torch import Tensor

from .report import command, find, grid, measured_on, parsed, write
from .runs import PROMPTS

DRAFTS = 4
Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # x_t [N, C], index (0: the last) -> mean, log std of x_{t-1}
NAMES = ("ratio", "kappa", "log10 of value", "mean log10", "acceptance rate")
ROWS = ("p(Y)/q(Y)", "p(Y_p)/q(Y_q), w/o align", "p(Y_p)/q(Y_q), w/ align")


def main() -> None:
    parser = command("path_ratios", __doc__)
    parser.add_argument("--model", default="continuous", help="file, folder or bundled model (default: %(default)s)")
    parser.add_argument("--drafter", help="file or folder (default: the bundled model's)")
    parser.add_argument("--images", type=int, default=8, help="number of images (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.26, help="of the widened test (default: %(default)s)")
    options = parsed(parser)
    model = specar.load_model(find(options.model), options.device, torch.float32)
    if not hasattr(model, "head"):
        parser.error(f"{options.model} has no diffusion head. Use MAR or Harmon.")
    drafter = specar.load_drafter(Path(options.drafter or find(options.model) / "small"), model)
    found = measure(model, drafter, model.encode_prompt(PROMPTS[0]), options.images, options.tolerance)
    print(grid(NAMES, [(row, *(f"{number:.4g}" for number in numbers)) for row, *numbers in found]))
    if options.out:
        rows = [dict(zip(NAMES, row, strict=True)) for row in found]
        write({**measured_on(torch.device(options.device)), "images": options.images, "rows": rows}, options.out)


@dataclass(frozen=True)
class Tokens:
    """N tokens to denoise: the inputs of DiffusionHead.denoise (see there)."""

    z: Tensor
    z_uncond: Tensor | None
    cfg: Tensor
    temperature: float
    noise0: Tensor
    noise_t: Tensor
    schedule: Schedule

    def step(self, head: DiffusionHead) -> Step:
        """The denoising steps of these tokens."""

        def step(x: Tensor, index: int) -> tuple[Tensor, Tensor]:
            mean, log_variance = head.mean_log_variance(x, index, self.z, self.schedule)
            if self.z_uncond is not None:  # means are affine in the predicted noise, which guidance extrapolates
                other, _ = head.mean_log_variance(x, index, self.z_uncond, self.schedule)
                mean = other + self.cfg[:, None] * (mean - other)
            return mean, 0.5 * log_variance + math.log(self.temperature)

        return step


def joined(calls: Sequence[Tokens]) -> Tokens:
    """Calls for one token of every image each, as one call with the tokens of an image next to each other."""

    def join(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.stack(tensors, dim=dim + 1).flatten(dim, dim + 1)

    found = {name: join([getattr(call, name) for call in calls]) for name in ("z", "cfg", "noise0")}
    unguided = [call.z_uncond for call in calls if call.z_uncond is not None]
    noise_t = join([call.noise_t for call in calls], dim=1)
    return replace(calls[0], **found, z_uncond=join(unguided) if unguided else None, noise_t=noise_t)


@contextmanager
def recorded(head: DiffusionHead) -> Iterator[list[Tokens]]:
    """What the head is asked to denoise meanwhile."""
    calls, denoise = [], head.denoise

    def listen(*given: Any) -> Any:
        calls.append(Tokens(*(t.clone() if isinstance(t, Tensor) else t for t in given[:7])))
        return denoise(*given)

    head.denoise = listen
    try:
        yield calls
    finally:
        del head.denoise


@torch.inference_mode()
def measure(
    model: Any, drafter: Any, prompt: Any, images: int, tolerance: float, **params: Any
) -> list[tuple[Any, ...]]:
    """Rows of the table: ratio, kappa, and the numbers of ``summary``. prompt: encoded; params: those of sample."""
    method = specar.methods.ContinuousSpeculative(drafter, DRAFTS, condition="drafts", tolerance=tolerance)
    with recorded(model.head) as targets, recorded(drafter.head) as drafts:
        trace = specar.sample(model, prompt, method, batch_size=images, **params).trace
    kappas, generator = (1.0, trace.settings["kappa"]), torch.Generator().manual_seed(0)
    ratios: dict[tuple[str, float], list[Tensor]] = {(row, kappa): [] for kappa in kappas for row in ROWS}
    remaining = iter(drafts)
    for target in targets[-int(trace.positions["block"].max()) :]:  # without those of the prefill
        draft = joined(list(islice(remaining, len(target.z) // images)))
        other = torch.randn(1 + len(draft.noise_t), *draft.noise0.shape, generator=generator).to(draft.z.device)
        steps = target.step(model.head), draft.step(drafter.head)
        for kappa in kappas:
            found = log_ratios(*steps, draft.noise0, draft.noise_t, other, kappa)
            for row, log_ratio in zip(ROWS, found, strict=True):
                ratios[row, kappa].append(log_ratio)
    return [(*key, *summary(torch.cat(found))) for key, found in ratios.items()]


def log_ratios(p: Step, q: Step, noise0: Tensor, noise_t: Tensor, other: Tensor, kappa: float = 1.0) -> list[Tensor]:
    """log of the ratios of ROWS [N], of draft tokens denoised from noise0 [N, C] with noise_t [T, N, C].

    other [T + 1, N, C]: the noise of the model without alignment. kappa: see kernels.continuous.
    """
    drafted = path(q, noise0, noise_t)
    apart, aligned = (path(p, *noise)[:-1] + drafted[-1:] for noise in ((other[0], other[1:]), (noise0, noise_t)))
    return [log_density(p, own, kappa) - log_density(q, drafted, kappa) for own in (drafted, apart, aligned)]


def path(step: Step, noise0: Tensor, noise_t: Tensor) -> list[Tensor]:
    """x_T to x_0 [N, C], with noise in the last step, too."""
    found = [noise0]
    for index, noise in zip(reversed(range(len(noise_t))), noise_t, strict=True):
        mean, log_std = step(found[-1], index)
        found.append(mean + log_std.exp() * noise)
    return found


def log_density(step: Step, points: Sequence[Tensor], kappa: float) -> Tensor:
    """log density [N] of a path from x_T to x_0, but for a constant: x_T is standard normal. fp64."""
    total = -0.5 * points[0].double().square().sum(-1)
    for index, (before, after) in zip(reversed(range(len(points) - 1)), pairwise(points), strict=True):
        mean, log_std = (t.double() for t in step(before, index))
        z = (after - mean) / log_std.exp() / (1.0 if index else kappa)
        total = total - (0.5 * z.square() + log_std).sum(-1)
    return total


def summary(log_ratio: Tensor) -> tuple[float, float, float]:
    """log10 of the mean ratio, mean log10 of the ratio, and the mean of min(1, ratio)."""
    ten = math.log(10)
    value = float(log_ratio.logsumexp(0) - math.log(len(log_ratio)))
    return value / ten, float(log_ratio.mean()) / ten, float(log_ratio.clamp(max=0).exp().mean())


if __name__ == "__main__":
    main()
