"""Measure continuous speculative decoding: passes, acceptance, distance between the models, wall time at batch 1 and 8.

    python -m tools.benchmarks continuous [--batches 2] [--only NAMES] [--out FILE]

All cases use the same prompts and seeds. Order and noise depend on the seed alone, so their images can be compared one
by one with the target's own.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfyui_specar as specar
import torch

from .report import command, commit, find, machine, parsed, write
from .runs import PROMPTS, chosen

LENGTHS = (4, 8, 16, 32)
BATCH = 8
PAPER = {  # MAR-H with MAR-B, tables 1, 4 and 5: draft length -> what is printed there
    "acceptance": {4: 0.30, 8: 0.27, 16: 0.26, 32: 0.19},
    "speed_at_batch_1": {4: 1.11, 8: 1.26, 16: 1.37, 32: 1.44},
    "speed_at_batch_8": {4: 1.20, 8: 1.44, 16: 1.51, 32: 1.61},
    "speed_at_batch_256": {4: 1.62, 8: 1.96, 16: 2.20, 32: 2.33},
    "acceptance_aligned": {4: 0.32, 8: 0.31, 16: 0.33, 32: 0.30},
    "acceptance_unaligned": {4: 0.14, 8: 0.13, 16: 0.07, 32: 0.07},
    "distance_aligned": {4: 0.80, 8: 0.82, 16: 0.91, 32: 1.13},
    "distance_unaligned": {4: 2.17, 8: 2.22, 16: 2.36, 32: 2.56},
}


@dataclass(frozen=True)
class Case:
    """A method under its name, with parameters that differ from the model's own."""

    name: str
    method: Any
    parameters: dict[str, Any] = field(default_factory=dict)


def cases(drafter) -> list[Case]:
    """The plain sampler, then speculation along every axis the paper varies, and the modes it does not have."""
    plain, m = specar.methods.ContinuousNextToken, specar.methods.ContinuousSpeculative
    listed = [Case("one token a pass", plain())]
    listed += [Case(f"MAR's schedule, {n} passes", plain(n)) for n in (32, 16, 8)]
    listed += [Case(f"block of {n}", m(drafter, n)) for n in LENGTHS]
    listed += [Case(f"block of {n}, own noises", m(drafter, n, aligned=False)) for n in LENGTHS]
    listed += [Case(f"block of 8, prefill {share:.0%}", m(drafter, 8, prefill=share)) for share in (0.0, 0.15)]
    listed += [Case("block of 8, drafts seen", m(drafter, 8, condition="drafts"))]
    listed += [Case(f"block of 8, tolerance {h:g}", m(drafter, 8, tolerance=h)) for h in (0.5, 1.0, 2.0)]
    listed += [Case(f"block of 8, Sigma {path}", m(drafter, 8, path=path)) for path in ("paper", "official")]
    listed += [Case(f"algorithm 1, {n} drafts", m(drafter, n, mode="prefix")) for n in (4, 8)]
    listed += [Case("exact, 4 drafts", m(drafter, 4, mode="exact"))]
    for cfg in (1.0, 4.0):
        listed += [
            Case(f"one token a pass, guidance {cfg:g}", plain(), {"cfg": cfg}),
            Case(f"block of 8, guidance {cfg:g}", m(drafter, 8), {"cfg": cfg}),
        ]
    for temperature in (0.8, 0.9):
        listed += [
            Case(f"one token a pass, temperature {temperature:g}", plain(), {"temperature": temperature}),
            Case(f"block of 8, temperature {temperature:g}", m(drafter, 8), {"temperature": temperature}),
        ]
    listed += [
        Case("one token a pass, DDIM", plain(), {"kind": "ddim"}),
        Case("block of 8, DDIM", m(drafter, 8), {"kind": "ddim"}),
    ]
    return listed


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over images [B, H, W, 3] (0..1) of the peak signal-to-noise ratio in dB; equal images count as 60."""
    error = (a - b).square().mean((1, 2, 3)).clamp(min=1e-6)
    return float((-10 * error.log10()).mean())


def measure(model, vae, case: Case, batches: int) -> dict[str, Any]:
    """Statistics of ``batches`` batches of BATCH images, and seconds of a single image and of a batch."""
    summaries, images, together, alone = [], [], [], []
    for number, prompt in enumerate(PROMPTS[:batches]):
        conditioning = model.encode_prompt(prompt)
        for batch, seconds in ((1, alone), (BATCH, together)):
            begun = time.perf_counter()
            out = specar.sample(
                model, conditioning, case.method, seed=1000 * number, batch_size=batch, **case.parameters
            )
            seconds.append(time.perf_counter() - begun)
        summaries.append(out.trace.summary())
        images.append(vae.decode(out.latent))
    mean = {
        name: statistics.fmean(s[name] for s in summaries)
        for name in ("target_passes", "draft_passes", "acceptance_rate", "mean_square_distance")
    }
    return {
        "name": case.name,
        **mean,
        "seconds_alone": statistics.median(alone),
        "seconds_of_8": statistics.median(together),
        "images": torch.cat(images),
    }


def compare(model, vae, listed: list[Case], batches: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of all cases. Ratios and images are compared with the first (plain) case of the same parameters."""
    measure(model, vae, listed[0], 1)  # warm up
    rows, plain = [], {}
    for case in listed:
        row = measure(model, vae, case, batches)
        base = plain.setdefault(json.dumps(case.parameters, sort_keys=True), row)
        row |= {
            "passes_ratio": base["target_passes"] / row["target_passes"],
            "wall_ratio_alone": base["seconds_alone"] / row["seconds_alone"],
            "wall_ratio_of_8": base["seconds_of_8"] / row["seconds_of_8"],
            "psnr_to_target": psnr(row["images"], base["images"]),
        }
        rows.append(row)
        say(
            f"{row['name']:36s} passes {row['target_passes']:5.1f} + {row['draft_passes']:5.1f}  accepted "
            f"{row['acceptance_rate']:.2f}  distance^2 {row['mean_square_distance']:6.2f}  wall "
            f"{row['seconds_alone']:5.2f} s ({row['wall_ratio_alone']:.2f}x), 8: {row['seconds_of_8']:6.2f} s "
            f"({row['wall_ratio_of_8']:.2f}x)  PSNR {row['psnr_to_target']:4.1f}"
        )
    return [{key: value for key, value in row.items() if key != "images"} for row in rows]


def main() -> None:
    parser = command("continuous", __doc__)
    parser.add_argument("--batches", type=int, default=4, help=f"number of prompts, each with {BATCH} seeds")
    parser.add_argument("--only", nargs="+", help="measure only these cases (and the first, the baseline)")
    options = parsed(parser)
    model = specar.load_model(find("continuous"), device=options.device)
    vae = specar.load_image_decoder(find("continuous"), device=options.device)
    listed = cases(specar.load_drafter(find("continuous/small"), model))
    if options.only:
        only = chosen(options.only, [case.name for case in listed])
        listed = [listed[0], *(case for case in listed[1:] if case.name in only)]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": machine(model.device),
        "commit": commit(),
        "prompts": PROMPTS[: options.batches],
        "pictures_per_case": options.batches * BATCH,
        "defaults": vars(model.defaults),
        "cases": compare(model, vae, listed, options.batches, print),
        "paper": PAPER,
    }
    if options.out:
        write(report, options.out)


if __name__ == "__main__":
    main()
