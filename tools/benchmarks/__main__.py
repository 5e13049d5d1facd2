"""Measure this pack:  python -m tools.benchmarks WHAT [options]

    speed       cost of a forward pass: every method compared with transformers' generate and a plain loop; its width,
                batches, and what reading the weights takes
    gpu         the first command to run on a new GPU (3, 10 or 25 minutes): checks Triton kernels and CUDA graphs, then
                measures passes; without a GPU a dry run
    launches    number of kernel launches per pass on a GPU, counted without a GPU
    quality     likelihood, prompt agreement and distances of every method's images; a check of the lossless ones
    same_seed   how often the same-seed mode and batches give the image of next-token sampling
    documents   writes the tables of the documents from the published reports

python -m tools.benchmarks WHAT --help explains the options. Reports are JSON; published ones are in
tools/benchmarks/results/.
"""

from __future__ import annotations

import sys
from importlib import import_module

WHAT = ("speed", "gpu", "launches", "quality", "same_seed", "documents")


def main(arguments: list[str]) -> None:
    """Hand the arguments to the measurement that the first of them names."""
    if not arguments or arguments[0] not in WHAT:
        print(__doc__)
        asked_for_help = not arguments or arguments[0] in ("-h", "--help")
        sys.exit(None if asked_for_help else f"Unknown measurement {arguments[0]!r}; choose one of: {', '.join(WHAT)}.")
    sys.argv[1:] = arguments[1:]
    import_module(f".{arguments[0]}", __package__).main()


if __name__ == "__main__":
    main(sys.argv[1:])
