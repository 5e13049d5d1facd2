"""Measure every method on a model: forward passes, step compression, wall time against next-token and ``generate``.

    python -m benchmarks [--model default] [--cfg 1 3] [--windows 16 32] [--seeds 2] [--out benchmarks/results/X.json]
                         [--eagle default/eagle --small default/small]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path

import comfyui_specar as specar
import torch

from .generate import seconds_of_generate
from .runs import PROMPTS, cases, compare, drafter_cases


def cpu_name() -> str:
    """The processor as the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def machine(device: torch.device) -> dict:
    """What the numbers were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"processor": cpu_name(), "threads": torch.get_num_threads(), "gpu": gpu, "torch": torch.__version__}


def commit() -> str:
    """The commit of the tree, with a mark if it was changed."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    result = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return result.stdout.strip() or "unknown"


def find(name: str) -> Path:
    """A file or folder, or else the bundled model of that name."""
    return Path(name) if Path(name).exists() else specar.bundled(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", default="default", help="bundled name, or a file or folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cfg", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--eagle", default="default/eagle", help="EAGLE drafter: bundled name, or a file or folder")
    parser.add_argument("--small", default="default/small", help="small model as drafter, likewise")
    parser.add_argument("--only", nargs="+", help="only the methods of these names (and next-token)")
    parser.add_argument("--seeds", type=int, default=2, help="pictures per prompt")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default otherwise)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    model = specar.load_model(find(options.model), device=options.device)
    vae = specar.load_image_decoder(find(options.model), device=options.device)
    eagle, small = (specar.load_drafter(find(name), model) for name in (options.eagle, options.small))
    listed = cases(options.windows) + drafter_cases(eagle, small)
    if options.only:
        listed = [listed[0], *(case for case in listed[1:] if case.name in options.only)]
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
        rows = compare(
            model, vae, listed, PROMPTS, options.seeds, print, cfg=cfg, temperature=1.0, top_k=0, top_p=1.0
        )
        generate = seconds_of_generate(model, guided=cfg != 1)
        print(f"{'transformers generate':36s} passes {model.layout().length:6.1f}                  {generate:6.2f} s")
        report["runs"].append({"cfg": cfg, "transformers_generate_seconds": generate, "methods": rows})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
