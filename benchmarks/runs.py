"""One measured comparison: the same prompts and seeds through several methods in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comfyui_specar as specar
import torch

PROMPTS = (
    "heart, 3d, on a blue background",
    "cat, noto, on a yellow background",
    "rocket, flat, on a black background",
    "pizza, 3d, on a white background",
    "tree, noto, on a teal background",
    "robot, flat, on a pink background",
)


@dataclass(frozen=True)
class Case:
    """A named sampling method."""

    name: str
    method: Any


def cases(windows: Sequence[int]) -> list[Case]:
    """Next-token, then every SJD variant: all reuse modes per window, all initialisations at the first window."""
    sjd = specar.methods.SJD
    listed = [Case("next_token", specar.methods.NextToken())]
    for window in windows:
        for reuse in ("coupled", "gumbel", "threshold_exact", "resample", "threshold_paper"):
            listed.append(Case(f"sjd {reuse} w{window}", sjd(window=window, reuse=reuse)))
    for initial in ("left", "upper", "uniform", "repeat"):
        listed.append(Case(f"sjd coupled w{windows[0]} init {initial}", sjd(window=windows[0], initial=initial)))
    return listed


def measure(model, case: Case, prompts: Sequence[str], seeds: int, **parameters: Any) -> dict[str, Any]:
    """Means over prompts x seeds of passes and statistics, and the median seconds a picture takes."""
    length = model.layout().length
    passes, seconds, log_p, accepted, tokens = [], [], [], [], []
    for number, prompt in enumerate(prompts):
        conditioning = model.encode_prompt(prompt)
        for seed in range(seeds):
            begun = time.perf_counter()
            out = specar.sample(model, conditioning, case.method, seed=1000 * number + seed, **parameters)
            seconds.append(time.perf_counter() - begun)
            summary = out.trace.summary()
            passes.append(summary["target_passes"])
            log_p.append(summary["mean_log_p"])
            accepted.append(summary["acceptance_rate"])
            tokens.append(out.tokens.flatten())
    return {
        "name": case.name,
        "passes": statistics.fmean(passes),
        "passes_std_error": statistics.stdev(passes) / len(passes) ** 0.5 if len(passes) > 1 else 0.0,
        "step_compression": length / statistics.fmean(passes),
        "acceptance_rate": statistics.fmean(accepted),
        "mean_log_p": statistics.fmean(log_p),
        "seconds": statistics.median(seconds),
        "tokens": torch.stack(tokens),
    }


def histogram_distance(a: torch.Tensor, b: torch.Tensor, vocab: int) -> float:
    """Total variation between the token histograms of two sets of pictures [n, S]."""
    count = [torch.bincount(x.flatten(), minlength=vocab).double() for x in (a, b)]
    return float((count[0] / count[0].sum() - count[1] / count[1].sum()).abs().sum() / 2)


def compare(model, listed: Sequence[Case], prompts: Sequence[str], seeds: int, say: Callable[[str], None],
            **parameters: Any) -> list[dict[str, Any]]:
    """Rows of all cases, the first being the baseline of the ratios."""
    measure(model, listed[0], prompts[:1], 1, **parameters)  # warm up
    rows = []
    for case in listed:
        row = measure(model, case, prompts, seeds, **parameters)
        if rows:
            row["same_pictures"] = float((row["tokens"] == rows[0]["tokens"]).all(-1).double().mean())
            row["histogram_tv"] = histogram_distance(row["tokens"], rows[0]["tokens"], model.vocab)
        row["passes_ratio"] = (rows[0] if rows else row)["passes"] / row["passes"]
        row["wall_ratio"] = (rows[0] if rows else row)["seconds"] / row["seconds"]
        rows.append(row)
        say(
            f"{row['name']:34s} passes {row['passes']:6.1f} ({row['passes_ratio']:.2f}x)  "
            f"{row['seconds']:6.2f} s ({row['wall_ratio']:.2f}x)  log p {row['mean_log_p']:.3f}"
        )
    return [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
