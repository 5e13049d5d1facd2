"""Count how often the same seed gives the same image, in SJD's same-seed mode and in batches.

    python -m tools.benchmarks same_seed [--images 64] [--dtype fp32 bf16] [--out FILE.json]

The reference is next-token sampling, one image at a time, each with its own seed. SJD in Gumbel mode with windows of 16
and 32, and next-token sampling in batches of four, are compared with it token by token. Settings are the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import comfyui_specar as specar
import torch
from torch import Tensor

from .report import command, measured_on, parsed, write
from .runs import PROMPTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = 4


def main() -> None:
    parser = command("same_seed", __doc__)
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="precisions (default: fp32 bf16)"
    )
    parser.add_argument("--images", type=int, default=64, help="number of images (default: %(default)s)")
    options = parsed(parser)
    report: dict[str, Any] = {**measured_on(torch.device(options.device)), "images": options.images, "dtypes": {}}
    for name in options.dtype:
        model = specar.load_model(specar.bundled("default"), options.device, DTYPES[name])
        report["dtypes"][name] = found = compared(model, options.images)
        for way, row in found.items():
            print(
                f"{name} {way:24} {row['same images']} of {row['images']} images the same, "
                f"{row['same tokens']:.2%} of the tokens, {row['ms per pass']:.1f} ms per pass",
                flush=True,
            )
        if options.out:
            write(report, options.out)


def compared(model: Any, images: int) -> dict[str, dict[str, float]]:
    """Way of generating -> images compared, how many are the same, the share of equal tokens, and the time of a
    pass.
    """
    reference = [tokens for tokens, _, _ in drawn(model, specar.methods.NextToken(), images, 1)]
    sjd = specar.methods.SJD
    ways = {
        "next token": (specar.methods.NextToken(), 1),
        "SJD same seed, window 16": (sjd(window=16, reuse="gumbel"), 1),
        "SJD same seed, window 32": (sjd(window=32, reuse="gumbel"), 1),
        f"next token, batches of {BATCH}": (specar.methods.NextToken(), BATCH),
    }
    return {name: compare(drawn(model, method, images, batch), reference) for name, (method, batch) in ways.items()}


def compare(runs: Iterator[tuple[Tensor, float, int]], reference: list[Tensor]) -> dict[str, float]:
    """What is generated beside the reference [1, rows, cols] of each image."""
    whole, equal, images, seconds, passes = 0, 0.0, 0, 0.0, 0
    for tokens, duration, count in runs:
        seconds, passes = seconds + duration, passes + count
        for image in tokens:
            same = (image == reference[images][0]).float().mean().item()
            whole, equal, images = whole + (same == 1.0), equal + same, images + 1
    return {
        "images": images,
        "same images": whole,
        "same tokens": equal / images,
        "ms per pass": 1e3 * seconds / passes,
    }


def drawn(model: Any, method: Any, images: int, batch: int) -> Iterator[tuple[Tensor, float, int]]:
    """Tokens [batch, rows, cols], seconds and passes of each run; image i is generated with seed i for the prompt of
    its batch of four, whatever ``batch`` is."""
    for seed in range(0, images, batch):
        conditioning = model.encode_prompt(PROMPTS[seed // BATCH % len(PROMPTS)])
        begin = time.perf_counter()
        out = specar.sample(model, conditioning, method, seed=seed, batch_size=min(batch, images - seed))
        yield out.tokens.cpu(), time.perf_counter() - begin, out.trace.summary()["target_passes"]
