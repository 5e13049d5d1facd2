"""Count the forward passes of every method on the bundled model.

python -m tools.benchmarks methods [--cfg 1 2] [--windows 16 32] [--seeds 2] [--only NAMES] [--out FILE]
"""

from __future__ import annotations

import comfyui_specar as specar

from .report import command, commit, find, machine, parsed, write
from .runs import PROMPTS, cases, chosen, drafter_cases, measure

SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def main() -> None:
    parser = command("methods", __doc__)
    parser.add_argument("--cfg", type=float, nargs="+", default=[1.0, 2.0], help="guidance scales (default: 1 2)")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[16, 32], help="windows of Jacobi decoding (default: 16 32)"
    )
    parser.add_argument("--only", nargs="+", help="measure only these methods (and next_token)")
    parser.add_argument("--seeds", type=int, default=2, help="images per prompt (default: %(default)s)")
    options = parsed(parser)
    model = specar.load_model(find("default"), device=options.device)
    eagle, small = (specar.load_drafter(find(f"default/{name}"), model) for name in ("eagle", "small"))
    listed = cases(options.windows) + drafter_cases(eagle, small)
    if options.only:
        only = chosen(options.only, [case.name for case in listed])
        listed = [listed[0], *(case for case in listed[1:] if case.name in only)]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": machine(model.device),
        "commit": commit(),
        "prompts": PROMPTS,
        "pictures_per_method": len(PROMPTS) * options.seeds,
        "settings": SETTINGS,
        "runs": [],
    }
    for cfg in options.cfg:
        print(f"guidance {cfg:g}, temperature 1, no top-k, no top-p")
        rows = []
        report["runs"].append({"cfg": cfg, "methods": rows})
        for case in listed:
            row = measure(model, case, PROMPTS, options.seeds, cfg=cfg, **SETTINGS)
            rows.append(row)
            fewer, bound = rows[0]["passes"] / row["passes"], row["tv_bound"]
            print(
                f"{row['name']:36s} passes {row['passes']:6.1f} ({fewer:.2f}x) + {row['draft_passes']:5.0f}  "
                f"TV bound {'unknown' if bound is None else f'{bound:6.2f}'}",
                flush=True,
            )
        if options.out:
            write(report, options.out)


if __name__ == "__main__":
    main()
