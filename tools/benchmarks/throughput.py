"""Measure images per second by batch size, and by processes and threads.

    python -m tools.benchmarks throughput [--layouts 1x1 2x1 1x2] [--batches 1 2 4 8 16] [--out FILE.json]

2x1 is two processes of one thread each, which both hold a model and generate at the same time (like two ComfyUI
servers, or two actors of a Ray cluster). A batch has one prompt and the model's own settings. A table is written next
to the report. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch

from .report import commit, find, machine, versions, write
from .runs import PROMPTS, cases, chosen, drafter_cases, names_of_cases

SCHEMA = "specar.throughput/1"
METHODS = ("next_token", "sjd coupled w16", "EAGLE-1, 25 drafts")
WORKER_SECONDS = 900  # within which a process of a layout has to answer


class Worker:
    """A model and its drafters, with so many threads."""

    def __init__(self, model: str, device: str, threads: int):
        torch.set_num_threads(threads)
        self.model = specar.load_model(find(model), device=device)
        self.decoder = specar.load_image_decoder(find(model), device=device)
        eagle, small = (specar.load_drafter(find(f"{model}/{name}"), self.model) for name in ("eagle", "small"))
        self.cases = {case.name: case.method for case in (*cases((16, 32)), *drafter_cases(eagle, small))}
        self.prompts = [self.model.encode_prompt(prompt) for prompt in PROMPTS]

    def draw(self, method: str, batch: int, number: int) -> float:
        """Images from prompt to pixels; returns the passes of an image."""
        prompt = self.prompts[number % len(self.prompts)]
        out = specar.sample(self.model, prompt, self.cases[method], seed=1000 * number, batch_size=batch)
        self.decoder.decode(out.latent).sum().item()  # so that a GPU has done it
        return statistics.fmean(out.trace.totals["passes_per_image"])


def work(
    index: int, model: str, device: str, threads: int, points: list[tuple[str, int]], images: int, together, answers
) -> None:
    """One process of a layout: every point at the same time as the others."""
    try:
        worker = Worker(model, device, threads)
        worker.draw("next_token", 1, 0)
        for method, batch in points:
            if batch > 1:
                worker.draw(method, 1, 0)  # warm up
            together.wait(WORKER_SECONDS)
            begun = time.monotonic()
            passes = [worker.draw(method, batch, number) for number in range(index, index + rounds(images, batch))]
            answers.put((index, method, batch, begun, time.monotonic(), statistics.fmean(passes)))
    except BaseException as error:
        together.abort()
        answers.put(error)
        raise


def rounds(images: int, batch: int) -> int:
    return -(-images // batch)


def measure(
    layout: str, model: str, device: str, points: list[tuple[str, int]], images: int
) -> Iterator[dict[str, Any]]:
    """A row for every point (method, batch): what an image takes when all processes of the layout generate."""
    processes, threads = (int(number) for number in layout.split("x"))
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(processes), context.Queue()
    started = [
        context.Process(
            target=work, args=(index, model, device, threads, points, images, together, answers), daemon=True
        )
        for index in range(processes)
    ]
    for process in started:
        process.start()
    found: dict[tuple[str, int], list] = {point: [] for point in points}
    for _ in range(processes * len(points)):
        answer = answers.get(timeout=WORKER_SECONDS)
        if isinstance(answer, BaseException):
            raise answer
        _, method, batch, *measured = answer
        found[method, batch].append(measured)
        if len(found[method, batch]) == processes:
            yield row(layout, method, batch, images, found[method, batch])
    for process in started:
        process.join()


def row(layout: str, method: str, batch: int, images: int, measured: Sequence[Sequence[float]]) -> dict[str, Any]:
    begun, ended, passes = zip(*measured, strict=True)
    drawn, wall = len(measured) * rounds(images, batch) * batch, max(ended) - min(begun)
    return {
        "layout": layout,
        "method": method,
        "batch": batch,
        "pictures": drawn,
        "seconds_per_picture": float(f"{wall / drawn:.4g}"),
        "seconds_until_there": float(f"{wall / rounds(images, batch):.4g}"),
        "passes": round(statistics.fmean(passes), 1),
    }


def table(report: dict[str, Any]) -> str:
    about, rows = report["machine"], report["rows"]
    layouts = list(dict.fromkeys(found["layout"] for found in rows))
    parts = [
        f"# Images per second, {report['device']}",
        f"{about.get('gpu') or about['processor']}, torch {about['torch']}, commit {report['commit']}. Seconds of the "
        "machine for an image of the bundled model, prompt to pixels, and in brackets the seconds until an image of "
        "the batch is there. 2x1: two processes with one thread each, which draw at the same time.",
    ]
    for method in dict.fromkeys(found["method"] for found in rows):
        own = {(found["layout"], found["batch"]): found for found in rows if found["method"] == method}
        lines = [f"| batch | passes | {' | '.join(layouts)} |", f"| --- | --- |{' --- |' * len(layouts)}"]
        for batch in sorted({batch for _, batch in own}):
            points = [own.get((layout, batch)) for layout in layouts]
            cells = [f"{p['seconds_per_picture']:.2f} ({p['seconds_until_there']:.1f})" if p else "" for p in points]
            passes = statistics.fmean(p["passes"] for p in points if p)
            lines.append(f"| {batch} | {passes:.0f} | {' | '.join(cells)} |")
        parts += [f"## {method}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="default", help="name of a bundled model, or a folder that contains eagle/ and small/"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default: %(default)s)"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["1x1", "2x1", "1x2"],
        metavar="PROCESSESxTHREADS",
        help="processes and threads of each (default: 1x1 2x1 1x2)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        help="names, also those of the documents' tables; a wrong one lists all (default: %(default)s)",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="batch sizes (default: 1 2 4 8 16)"
    )
    parser.add_argument(
        "--pictures", type=int, default=4, help="images that each process generates at least per measurement"
    )
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    options.methods = chosen(options.methods, names_of_cases())

    device = torch.device(options.device)
    report = {
        "schema": SCHEMA,
        "device": options.device,
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "model": options.model,
        "prompts": PROMPTS,
        "rows": [],
    }
    points = list(itertools.product(options.methods, options.batches))
    for layout in options.layouts:
        for found in measure(layout, options.model, options.device, points, options.pictures):
            report["rows"].append(found)
            print(
                f"{layout}  {found['method']:20s} batch {found['batch']:2d}  {found['seconds_per_picture']:6.2f} s "
                f"per image, there after {found['seconds_until_there']:6.2f} s",
                flush=True,
            )
            if options.out:
                write(report, options.out)
                options.out.with_suffix(".md").write_text(table(report), encoding="utf-8")
    print(f"\n{table(report)}")


if __name__ == "__main__":
    main()
