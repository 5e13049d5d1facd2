"""Measure what every method's images are worth: likelihood, prompt agreement, distances between sets of images.

    python -m tools.benchmarks quality [--models default continuous] [--images 512] [--only NAMES] [--out FILE]
    python -m tools.benchmarks quality --parts draw        # the images only: hours, can be stopped and goes on
    python -m tools.benchmarks quality --parts measure --out FILE  # of the images drawn so far: minutes
    python -m tools.benchmarks quality --map --out FILE    # sampling parameters: guidance, temperature, filters
    python -m tools.benchmarks quality --sheet FILE        # some of the images drawn so far, as a picture

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

from . import quality_map, quality_sheet
from .feature_spaces import Spaces
from .quality_cases import PROMPTS, prompts
from .quality_model import ModelUnderTest
from .quality_reports import check_joins, merged, rounded
from .quality_tables import MAP
from .report import command, commit, machine, parsed, versions, write

PARTS = ("draw", "measure")
MODELS = ("default", "continuous")
ALARM_RATE = 0.01  # probability that the check fails although every lossless method is exact, for each model


def main() -> None:
    parser = command("quality", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="bundled models (default: both)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: both)")
    parser.add_argument(
        "--images",
        type=int,
        default=PROMPTS,
        help=f"per method, each of another prompt, at most {PROMPTS} (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=16, help="images generated together (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="draw only these cases, or points of the map")
    parser.add_argument("--cfg", type=float, default=2.0, help="guidance of the discrete model (default: %(default)s)")
    parser.add_argument(
        "--map",
        action="store_true",
        help="instead of the methods: next token at other guidances, "
        "temperatures, top-k and top-p, and the passes of SJD there; of the discrete model only",
    )
    parser.add_argument("--sheet", type=Path, help="instead of measuring: the picture of docs/numbers.md")
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
    wanted, device = prompts(options.images), torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    chosen = ["default"] if options.map or options.sheet else options.models
    models = [ModelUnderTest.load(name, options.cfg, device, dtype, options.folder) for name in chosen]
    names = [
        name
        for tested in models
        for name in (quality_map.points(tested.parameters) if options.map else [case.name for case in tested.cases])
    ]
    if options.sheet:
        quality_sheet.sheet(models[0]).save(options.sheet, quality=85, method=6)
        return
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; choose from: {'; '.join(names)}")
    for tested in models:
        first = next(iter(quality_map.points(tested.parameters))) if options.map else tested.cases[0].name
        if "measure" in options.parts and options.only and first not in options.only:
            try:
                tested.check_drawn(tested.cases[0], options.images)  # before the others take hours
            except ValueError as error:
                parser.error(str(error))
    if "draw" in options.parts:
        for tested in models:
            if options.map:
                quality_map.draw(tested, wanted, options.batch, options.only)
                continue
            for case in tested.cases:
                if not options.only or case.name in options.only:
                    tested.draw(case, wanted, options.batch)
    if "measure" not in options.parts:
        return
    spaces = Spaces(not options.without_imagenet)
    classifier = {"checksum": spaces.checksum, "held_out": spaces.accuracy}
    measured = {"machine": machine(device), "versions": versions(), "commit": commit()}
    outside = []
    for tested in models:
        name = tested.name + MAP if options.map else tested.name
        model = {"name": name, **tested.conditions(wanted, spaces)}
        new = rounded({"alarm_rate": ALARM_RATE, "classifier": classifier, "models": [model]})
        earlier = earlier_report(options.out) or new | {"models": []}
        check_joins(earlier, new)  # before it takes minutes
        found = quality_map.measure(tested, wanted, spaces) if options.map else tested.measure(wanted, spaces)
        found["rows"] = [{**row, "measured": measured} for row in found["rows"]]
        report = merged(earlier, new | {"models": [rounded(model | found)]})
        if options.out:
            write(report, options.out)
        [found] = (found for found in report["models"] if found["name"] == name)
        outside += [f"{found['name']}: {name}" for name in found["outside"]]
    if outside:
        sys.exit(f"Lossless methods unlike next token (false alarms {ALARM_RATE:.0%}): {', '.join(outside)}.")


def earlier_report(out: Path | None) -> dict[str, Any] | None:
    """What is in a file, if there is one."""
    return json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else None


if __name__ == "__main__":
    main()
