"""Measure the cost of a forward pass, and compare it with its lower bound.

    python -m tools.benchmarks speed                    # CPU or GPU: the bundled model, also at LlamaGen-B's size

All methods run on the same weights, prompt and filters in one process and take turns (A B C A B C ...), after a
warm-up. ``default`` is the bundled model, and ``default@llamagen-b`` the same widened to LlamaGen-B's shapes (see
widen.py): it generates whole images at the cost of the larger model. Images need more passes for one prompt than for
another: ``--prompts 6`` takes those of ``methods``.

Parts of a report (--parts): methods, baselines (transformers' ``generate`` and a plain loop, beside the methods),
batches (an image's seconds by images). What could not run is listed with the reason. The report is written after every
step, so a run may be stopped at any time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from .passes import Run, bandwidth, baselines, bytes_of_a_pass, weights_read
from .report import Record, command, measured_on, parsed, spread
from .runs import PROMPTS, names_of_cases
from .sizes import SIZES
from .subjects import BASE, CURVES, METHODS, SMALL, Subject, subject
from .tables import row_of, table

SCHEMA = "specar.speed/1"
PARTS = ("methods", "baselines", "batches")
MODELS = ["default", "default@llamagen-b"]
BATCHES = (1, 4, 16)


# Parts


def methods(case: Subject, names: list[str], entry: dict, options, report: Record) -> None:
    """Every method and the baselines, in turns."""
    asked, contestants = case.conditionings(PROMPTS[: options.prompts]), []
    entry["prompts"] = len(asked)
    others = ()
    if "baselines" in options.parts:
        others = baselines(case.model, case.conditioning, case.stretch.layout, case.params)
    for contestant in (*(case.sampler(name) for name in names), *others):
        with report.going_on(f"{case.name}: {contestant.name}"):
            contestant(0)
            contestants.append(contestant)
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for seed in range(1, options.repetitions + 1):
        if seed > 1 and not report.in_time:
            report.not_run(f"{case.name}: repetitions {seed} to {options.repetitions}", "out of time")
            break
        for conditioning in asked:
            for contestant in contestants:
                runs[contestant.name].append(contestant.asked(conditioning)(seed))
        entry["rows"] = [row_of(name, runs, BASE, len(asked)) for name in runs]
        for row in entry["rows"]:
            row |= beside_the_floor(case, row, entry["copy_bytes_per_second"])
            row["pictures_passes"] = row["passes"] + 1  # and that of the prompt
        report.save()


def beside_the_floor(case: Subject, row: dict[str, Any], bytes_per_second: float) -> dict[str, Any]:
    """What a pass must move, how long copying that much takes, and what share of a pass that is."""
    drafter = case.drafter(row["name"])
    moved = bytes_of_a_pass(
        case.model, drafter, case.stretch, case.prompt, case.rows, row["draft_passes"] / row["passes"]
    )
    floor = 1e3 * moved / bytes_per_second
    return {"bytes": int(moved), "floor_ms": round(floor, 4), "of_floor": round(floor / row["pass_ms"]["median"], 4)}


def batches(case: Subject, options, report: Record) -> Iterator[dict]:
    """CURVES' methods with 1, 4 and 16 images."""
    for batch in BATCHES:
        if not report.in_time:
            report.not_run(f"{case.name}: pictures {batch}", "out of time")
            continue
        contestants = [case.sampler(name, batch=batch) for name in CURVES]
        for contestant in contestants:
            contestant(0)
        runs: dict[str, list[Run]] = {name: [] for name in CURVES}
        for seed in range(1, max(options.repetitions // 2, 1) + 1):
            for contestant in contestants:
                runs[contestant.name].append(contestant(seed))
        yield {"pictures": batch, "seconds": {name: spread([run.seconds for run in runs[name]]) for name in CURVES}}


def measure(name: str, cfg: float, options, report: Record) -> None:
    """All parts of one model."""
    device = torch.device(options.device)
    case = subject(name, cfg, device, getattr(torch, options.dtype))
    weights = weights_read(case.model.backbone)
    entry: dict[str, Any] = {
        "name": name,
        "dtype": options.dtype,
        "parameters": sum(p.numel() for p in case.model.backbone.parameters()),
        "weights_read": weights,
        "copy_bytes_per_second": int(bandwidth(device, weights)),
        "settings": asdict(case.params),
        "picture_tokens": case.stretch.layout.length,
    }
    report.content["models"].append(entry)
    wanted = (BASE, *options.methods) if options.methods else (*METHODS, *SMALL)
    if "methods" in options.parts:
        methods(case, list(dict.fromkeys(wanted)), entry, options, report)
    if "batches" in options.parts:
        entry["batches"] = []
        for point in batches(case, options, report):
            entry["batches"].append(point)
            report.save()


def main() -> None:
    parser = command("speed", __doc__)
    parser.add_argument("--dtype", help="precision (default: float32 on a CPU, bfloat16 on a GPU)")
    parser.add_argument(
        "--models",
        nargs="+",
        default=MODELS,
        metavar="MODEL",
        help=f"default, or default@SIZE: {', '.join(SIZES)} (default: {' '.join(MODELS)})",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        choices=names_of_cases(),
        help="a wrong one lists all (default: one of each kind)",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts of the report (default: all)")
    parser.add_argument("--cfg", type=float, nargs="+", default=[2.0], help="guidance scales (default: 2)")
    parser.add_argument(
        "--prompts",
        type=int,
        default=1,
        choices=range(1, len(PROMPTS) + 1),
        help="prompts, in turns; every repetition runs all (default: %(default)s)",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="timed runs (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20, help="start no new measurement after this time")
    options = parsed(parser)
    device = torch.device(options.device)
    options.dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    about = {"device": options.device, "repetitions": options.repetitions}
    content = {"schema": SCHEMA, **measured_on(device), "models": [], **about}
    report = Record(content, options.out, 60 * options.minutes)
    for name in options.models:
        for cfg in options.cfg:
            if not report.in_time:
                report.not_run(name, "out of time")
                continue
            print(f"{name}, guidance {cfg:g} ...", flush=True)
            with report.going_on(name):
                measure(name, cfg, options, report)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    report.save()
    text = table(report.content)
    if options.out:
        options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
