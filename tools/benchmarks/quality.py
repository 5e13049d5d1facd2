"""Measure what every method's images are worth: likelihood, prompt agreement, distances between sets of images.

    python -m tools.benchmarks quality [--models default continuous] [--images 512] [--only NAMES] [--out FILE]
    python -m tools.benchmarks quality --parts draw        # the images only: hours, can be stopped and goes on
    python -m tools.benchmarks quality --parts measure --out FILE  # of the images drawn so far: minutes

All methods get the same prompts, each image with its own seed, at temperature 1 without filters (continuous models:
with their own settings). A second set of next-token images, with other seeds, shows what differs by chance: no method
can come closer. Lossless methods must be indistinguishable from next token: permutation tests of likelihood, agreement
and kernel distances (image and next-token image of a prompt are exchanged), by Holm's procedure over all lossless
methods of a model. The command fails if one is not. A continuous model's exact mode adds the noise of the last
denoising step, which its plain sampler leaves out; it is far below what the features see.

A report grows: --out adds to the file that is there. So a run may be spread over days, and over machines, each of which
draws some cases (--only) and has the images of the reference, drawn there or copied.

See tools/benchmarks/classifier/README.md for the classifier.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.tools.training.settings import BUNDLED

from .feature_spaces import Spaces
from .quality_cases import PROMPTS, prompts
from .quality_model import ModelUnderTest
from .quality_reports import check_joins, merged, rounded
from .report import command, measured_on, parsed, write

PARTS = ("draw", "measure")
ALARM_RATE = 0.01  # probability that the check fails although every lossless method is exact, for each model


def main() -> None:
    parser = command("quality", __doc__)
    parser.add_argument(
        "--models", nargs="+", choices=BUNDLED, default=[*BUNDLED], help="bundled models (default: both)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: both)")
    parser.add_argument(
        "--images",
        type=int,
        default=PROMPTS,
        help=f"per method, each of another prompt, at most {PROMPTS} (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=16, help="images generated together (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="draw only these cases")
    parser.add_argument("--cfg", type=float, default=2.0, help="guidance of the discrete model (default: %(default)s)")
    parser.add_argument(
        "--without-imagenet",
        action="store_true",
        help="compare in the classifier's features only: those of ImageNet need two packages",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/quality"), help="where the images are kept (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="precision of the models, for the images and their likelihood (default: %(default)s)",
    )
    options = parsed(parser)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    models = [ModelUnderTest.load(name, options.cfg, device, dtype, options.folder) for name in options.models]
    names = [case.name for tested in models for case in tested.cases]
    only = set(options.only or names)
    if unknown := only - set(names):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; choose from: {'; '.join(names)}")
    for tested in models:
        if "measure" in options.parts and tested.cases[0].name not in only:
            try:
                tested.check_reference(options.images)  # before the others take hours
            except ValueError as error:
                parser.error(str(error))
    if "draw" in options.parts:
        for tested in models:
            for case in tested.cases:
                if case.name in only:
                    tested.draw(case, prompts(options.images, tested.setting), options.batch)
    if "measure" not in options.parts:
        return
    measured = measured_on(device)
    outside = []
    for tested in models:
        wanted, spaces = prompts(options.images, tested.setting), Spaces(tested.setting, not options.without_imagenet)
        model = {"name": tested.name, **tested.conditions(wanted, spaces)}
        new = rounded({"alarm_rate": ALARM_RATE, "models": [model]})
        earlier = earlier_report(options.out) or new | {"models": []}
        check_joins(earlier, new)  # before it takes minutes
        found = tested.measure(wanted, spaces)
        found["rows"] = [{**row, "measured": measured} for row in found["rows"]]
        report = merged(earlier, new | {"models": [rounded(model | found)]})
        if options.out:
            write(report, options.out)
        [found] = (found for found in report["models"] if found["name"] == tested.name)
        outside += [f"{tested.name}: {name}" for name in found["outside"]]
    if outside:
        sys.exit(f"Lossless methods unlike next token (false alarms {ALARM_RATE:.0%}): {', '.join(outside)}.")


def earlier_report(out: Path | None) -> dict[str, Any] | None:
    """What is in a file, if there is one."""
    return json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else None
