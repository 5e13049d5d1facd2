"""Measure every method on a model: forward passes, step compression, wall time against next-token and ``generate``.

python -m tools.benchmarks methods [--model default] [--cfg 1 2] [--windows 16 32] [--seeds 2] [--out FILE]
                             [--eagle default/eagle --small default/small]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import comfyui_specar as specar
import torch

from .generate import seconds_of_generate
from .report import commit, find, machine, write
from .runs import PROMPTS, cases, chosen, compare, drafter_cases


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks methods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="default", help="name of a bundled model, or a file or folder")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default: %(default)s)"
    )
    parser.add_argument("--cfg", type=float, nargs="+", default=[1.0, 2.0], help="guidance scales (default: 1 2)")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[16, 32], help="windows of Jacobi decoding (default: 16 32)"
    )
    parser.add_argument("--eagle", default="default/eagle", help="EAGLE drafter: bundled name, or a file or folder")
    parser.add_argument("--small", default="default/small", help="small model as drafter, named in the same way")
    parser.add_argument("--only", nargs="+", help="measure only these methods (and next_token, the baseline)")
    parser.add_argument("--seeds", type=int, default=2, help="images per prompt")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    model = specar.load_model(find(options.model), device=options.device)
    vae = specar.load_image_decoder(find(options.model), device=options.device)
    eagle, small = (specar.load_drafter(find(name), model) for name in (options.eagle, options.small))
    listed = cases(options.windows) + drafter_cases(eagle, small)
    if options.only:
        only = chosen(options.only, [case.name for case in listed])
        listed = [listed[0], *(case for case in listed[1:] if case.name in only)]
    report = {
        "model": options.model,
        "drafters": {"eagle": options.eagle, "small": options.small},
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": machine(model.device),
        "commit": commit(),
        "prompts": PROMPTS,
        "pictures_per_method": len(PROMPTS) * options.seeds,
        "settings": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        "runs": [],
    }
    for cfg in options.cfg:
        print(f"guidance {cfg:g}, temperature 1, no top-k, no top-p")
        rows = compare(model, vae, listed, PROMPTS, options.seeds, print, cfg=cfg, temperature=1.0, top_k=0, top_p=1.0)
        generate = seconds_of_generate(model, guided=cfg != 1)
        print(f"{'transformers generate':36s} passes {model.layout().length:6.1f}                  {generate:6.2f} s")
        report["runs"].append({"cfg": cfg, "transformers_generate_seconds": generate, "methods": rows})
    if options.out:
        write(report, options.out)
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
