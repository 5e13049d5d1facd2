"""Measure what the node Find Fastest costs on models of released sizes.

    COMFYUI_PATH=/path/to/ComfyUI python -m tools.benchmarks find_fastest [--models NAMES]
        [--seconds 60] [--out FILE.json]

With the node's defaults and without a drafter. The models have random weights, so a pass costs what it costs there, but
acceptance, and with it the choice, says nothing about trained ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import previews, sizes
from .report import commit, machine, versions, write

TOKENS = 256  # the node's default


def measure(name: str, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, Any]:
    """A search: how long it took, and what it measured."""
    from comfyui_specar.nodes import fastest

    model, conditioning = previews.loaded(name, device, dtype)
    request, began = model.model.request(conditioning), time.perf_counter()
    tried, layout = fastest.search(request, model, None, 0.0, TOKENS, seconds)
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "asked": seconds,
        "took": round(time.perf_counter() - began, 2),
        "image_tokens": request.layout.drawn,
        "trial_tokens": layout.drawn,
        "cfg": request.params.cfg,
        "trials": [
            {
                "method": trial.method.name,
                "by_hand": trial.method.by_hand,
                "note": trial.note,
                "ms_per_token": [round(1000 * each, 2) for each in trial.seconds],
            }
            for trial in tried
        ],
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks find_fastest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="precision of the models (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["llamagen-xl", "janus-pro-1b", "lumina-mgpt-7b"],
        choices=sizes.SIZES,
        help="shapes (default: an XL, a 1B and a 7B model)",
    )
    parser.add_argument("--seconds", type=int, default=60, help="that it is asked for (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    sys.argv[1:] = []  # ComfyUI reads them, too
    if "COMFYUI_PATH" not in os.environ:
        parser.error("COMFYUI_PATH does not name a ComfyUI tree")
    previews.start_comfyui(options.device)
    device = torch.device(options.device)
    report = {"machine": machine(device), "versions": versions(), "commit": commit(), "runs": []}
    for name in options.models:
        run = measure(name, getattr(torch, options.dtype), device, options.seconds)
        report["runs"].append(run)
        print(f"{name}: {run['took']:.1f} s, trials of {run['trial_tokens']} of {run['image_tokens']} tokens")
        for trial in run["trials"]:
            print(f"    {trial['by_hand']}: {trial['ms_per_token']} ms per token {trial['note']}", flush=True)
        if options.out:
            write(report, options.out)


if __name__ == "__main__":
    main()
