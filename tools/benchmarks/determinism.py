"""Generate the same images in several ways and count those that come out the same, token for token.

    python -m tools.benchmarks determinism [--pictures 4] [--only NAME ...] [--out FILE.json]

The reference is every method in a process of its own with one thread, one image at a time. It is compared with a second
run in the same process, one with the model loaded again, another process, one batch, two threads and, if available, a
GPU in fp32. Settings are the bundled model's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from safetensors.torch import load_file, save_file

from .report import commit, machine, versions, write
from .runs import PROMPTS, Case, cases, chosen, drafter_cases, names_of_cases

SCHEMA = "specar.determinism/1"
SEED = 500
WAYS = {  # name -> what the process that generates in this way is given
    "another process": [],
    "one batch": ["--batch"],
    "two threads": ["--threads", "2"],
    "two threads, one batch": ["--threads", "2", "--batch"],
    "on the GPU": ["--device", "cuda"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pictures", type=int, default=4, help="images per method, with consecutive seeds")
    parser.add_argument("--only", nargs="+", help="run only these methods")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    for name, kind in (("--into", Path), ("--threads", int), ("--device", str)):  # of the processes that generate
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--twice", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        work(options)
        return

    only = chosen(options.only or (), names_of_cases())
    selection = ["--pictures", str(options.pictures), *(["--only", *only] if only else [])]
    with tempfile.TemporaryDirectory() as folder:
        reference = drawn(Path(folder, "reference"), [*selection, "--twice"])
        found = {
            "again": compare(part(reference, "again"), part(reference, "first")),
            "model loaded anew": compare(part(reference, "anew"), part(reference, "first")),
        }
        for name, arguments in WAYS.items():
            if "cuda" not in arguments or torch.cuda.is_available():
                other = drawn(Path(folder, "other"), [*selection, *arguments])
                found[name] = compare(part(other, "first"), part(reference, "first"))
    for name, result in found.items():
        print(f"{name:24} {result['same']} of {result['pictures']} images the same  {result['differing']}")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "commit": commit(),
        "methods": len(part(reference, "first")),
        "pictures_of_each": options.pictures,
        "ways": found,
    }
    if options.out:
        write(report, options.out)


def drawn(into: Path, arguments: list[str]) -> dict[str, torch.Tensor]:
    """What another process generates."""
    command = [sys.executable, "-m", "tools.benchmarks", "determinism", "--into", str(into), *arguments]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])
    return load_file(into)


def part(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}: "): value for key, value in tensors.items() if key.startswith(f"{name}: ")}


def compare(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How many images are the same, and of which methods some are not (with the first token that differs)."""
    differing, count = {}, 0
    for name, tokens in reference.items():
        unlike = (found[name] != tokens).flatten(1)
        count += int((~unlike.any(1)).sum())
        firsts = [int(row.long().argmax()) for row in unlike if row.any()]
        if firsts:
            differing[name] = firsts
    return {"pictures": sum(map(len, reference.values())), "same": count, "differing": differing}


def work(options: argparse.Namespace) -> None:
    """Draw, in this process, and write the tokens of every method."""
    torch.set_num_threads(options.threads or 1)
    device = torch.device(options.device or "cpu")
    tensors = images("first", options, device)
    if options.twice:
        tensors |= images("again", options, device) | images("anew", options, device)
    save_file(tensors, options.into)


def images(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Tokens [images, ...] by "name: method". Every call but ``again`` loads the model anew."""
    if name != "again" or device not in _loaded:
        model = specar.load_model(specar.bundled("default"), device, torch.float32)
        eagle, small = (specar.load_drafter(specar.bundled(f"default/{kind}"), model) for kind in ("eagle", "small"))
        _loaded[device] = model, [*cases([16, 32]), *drafter_cases(eagle, small)]
    model, listed = _loaded[device]
    prompt = model.encode_prompt(PROMPTS[0])

    def draw(case: Case) -> torch.Tensor:
        if options.batch:
            return specar.sample(model, prompt, case.method, seed=SEED, batch_size=options.pictures).tokens
        return torch.cat(
            [specar.sample(model, prompt, case.method, seed=SEED + i).tokens for i in range(options.pictures)]
        )

    chosen = [case for case in listed if not options.only or case.name in options.only]
    return {f"{name}: {case.name}": draw(case).cpu().contiguous() for case in chosen}


_loaded: dict[torch.device, tuple[Any, list[Case]]] = {}


if __name__ == "__main__":
    main()
