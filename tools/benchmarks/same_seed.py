"""Count how often the same seed gives the same image, in SJD's same-seed mode and in batches.

    python -m tools.benchmarks same_seed [--out FILE.json]

The reference is next-token sampling, one image at a time, each with its own seed. It itself, SJD in Gumbel mode with
windows of 16 and 32, and next-token sampling in batches of four are compared with it token by token. Settings are the
model's own.
"""

from __future__ import annotations

from typing import Any

import comfyui_specar as specar
import torch
from torch import Tensor

from .report import command, measured_on, parsed, write
from .runs import PROMPTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMAGES, BATCH = 64, 4
SJD = specar.methods.SJD
WAYS = {  # how they are generated, and how many together
    "next token": (specar.methods.NextToken(), 1),
    "SJD same seed, window 16": (SJD(window=16, reuse="gumbel"), 1),
    "SJD same seed, window 32": (SJD(window=32, reuse="gumbel"), 1),
    f"next token, batches of {BATCH}": (specar.methods.NextToken(), BATCH),
}


def main() -> None:
    options = parsed(command("same_seed", __doc__))
    report: dict[str, Any] = {**measured_on(torch.device(options.device)), "images": IMAGES, "dtypes": {}}
    for name, dtype in DTYPES.items():
        model = specar.load_model(specar.bundled("default"), options.device, dtype)
        reference, found = drawn(model, specar.methods.NextToken(), 1), {}
        for way, (method, batch) in WAYS.items():
            same = int((drawn(model, method, batch) == reference).flatten(1).all(1).sum())
            found[way] = {"images": IMAGES, "same images": same}
            print(f"{name} {way:24} {same} of {IMAGES} images the same", flush=True)
        report["dtypes"][name] = found
        if options.out:
            write(report, options.out)


def drawn(model: Any, method: Any, batch: int) -> Tensor:
    """Tokens [IMAGES, rows, cols]; image i is generated with seed i for the prompt of its batch of four, whatever
    ``batch`` is."""
    tokens = []
    for seed in range(0, IMAGES, batch):
        conditioning = model.encode_prompt(PROMPTS[seed // BATCH % len(PROMPTS)])
        tokens.append(specar.sample(model, conditioning, method, seed=seed, batch_size=batch).tokens.cpu())
    return torch.cat(tokens)
